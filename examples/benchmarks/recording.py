"""Record the output of a real run of recorded.py with the time of each line, and draw it as an animated SVG.

    python examples/benchmarks/recording.py            runs it: results/recording.json, and docs/benchmarks/recording.svg
    python examples/benchmarks/recording.py --draw     draws the result that is there

Waits of more than two seconds are shortened to two in the picture. The lines are shown as they were printed, except that
long ones are wrapped.
"""

import argparse
import json
import re
import textwrap
import time
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from processes import HERE, child, command_for
from report import machine

RESULT = HERE / "results" / "recording.json"
PICTURE = HERE.parents[1] / "docs" / "benchmarks" / "recording.svg"
COLUMNS, LINE_PX, CHARACTER_PX, MARGIN_PX = 92, 19, 7.85, 14
AT_MOST_S, AT_END_S = 2.0, 6.0
NOISE = re.compile(r"Token authentication|FutureWarning|Started a local Ray|^\s*$")
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d0d4da; white-space: pre }
.typed { fill: #e9a13b; font-weight: bold }
.change { fill: #6cb6ff }
@media (prefers-reduced-motion: reduce) { text { animation: none !important } }
"""


def record() -> list[tuple[float, str]]:
    """Run the script, and return each line with the seconds since the first one."""
    lines = []
    with child(["bash", "-c", 'exec "$@" 2>&1', "bash", *command_for(HERE / "recorded.py")], {}) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if not NOISE.search(text):
                lines.append((time.monotonic(), re.sub(r"\x1b\[[0-9;]*m", "", text.rstrip())))
        if process.wait() != 0:
            raise RuntimeError("recorded.py failed:\n" + "\n".join(text for _, text in lines))
    return [(round(at - lines[0][0], 3), text) for at, text in lines]


def shortened(times: Sequence[float]) -> list[float]:
    """Return when each line appears in the picture: no wait is longer than AT_MOST_S."""
    shown = [0.0]
    for before, at in pairwise(times):
        shown.append(shown[-1] + min(at - before, AT_MOST_S))
    return shown


def kind(text: str) -> str:
    if text.startswith("$ "):
        return "typed"
    return "change" if re.match(r"worker death|starting|growth", text) else "plain"


def drawn(lines: Sequence[tuple[float, str]]) -> str:
    """Return the SVG. Each line is hidden until its time; the picture begins again after its end."""
    lines = [(0.0, "$ python recorded.py"), *((at + 0.5, text) for at, text in lines)]
    times = shortened([at for at, _ in lines])
    total = times[-1] + AT_END_S
    styles, texts, row = [], [], 0
    for number, ((_, text), at) in enumerate(zip(lines, times, strict=True)):
        start = at / total * 100
        styles.append(
            f"@keyframes k{number} {{ 0%, {start:.2f}% {{ opacity: 0 }} {start + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        for part in textwrap.wrap(text, COLUMNS, subsequent_indent="    "):
            row += 1
            place = f'x="{MARGIN_PX}" y="{MARGIN_PX + row * LINE_PX}"'
            moving = f'style="animation: k{number} {total:.1f}s infinite"'
            texts.append(f'<text class="{kind(text)}" {place} {moving}>{escape(part)}</text>')
    width, height = COLUMNS * CHARACTER_PX + 2 * MARGIN_PX, (row + 1) * LINE_PX + 2 * MARGIN_PX
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img">'
    title = "<title>A worker is killed in the middle of an epoch, and training continues</title>"
    back = f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1b1f24"/>'
    return "\n".join([head, title, f"<style>{STYLE}{chr(10).join(styles)}</style>", back, *texts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw the result that is there; run nothing")
    args = parser.parse_args()
    if not args.draw:
        lines = record()
        RESULT.write_text(json.dumps({"benchmark": "recording", "machine": machine(), "lines": lines}, indent=1) + "\n")
    PICTURE.write_text(drawn(json.loads(RESULT.read_text())["lines"]), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
