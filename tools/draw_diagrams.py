"""Draw the diagrams of the documentation, each in a light and a dark variant: python tools/draw_diagrams.py"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from raysgd.core.decisions.sampling_plan import SamplingPlan

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "diagrams"
COLOURS = {
    "light": {"ink": "#1f2328", "soft": "#6b7480", "box": "#ffffff", "machine": "#f3f4f6", "line": "#b6bcc4"},
    "dark": {"ink": "#d0d4da", "soft": "#9aa3ad", "box": "#22272e", "machine": "#1b1f24", "line": "#4a525c"},
}
CONTROL, GRADIENTS, RAY = "#e0632b", "#4a90d9", "#8d96a0"
FONT = "font-family: system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


@dataclass
class Drawing:
    """Collects the parts of one SVG in one variant."""

    width: int
    height: int
    title: str
    colours: dict[str, str]
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, *, fill: str = "box", dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        look = f'fill="{self.colours[fill]}" stroke="{self.colours["line"]}" rx="7"{dash}'
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {look}/>')

    def text(
        self, x: int, y: int, text: str, *, size: int = 13, ink: str = "ink", bold: bool = False, middle: bool = True
    ) -> None:
        look = f'font-size="{size}" fill="{self.colours.get(ink, ink)}"' + (' font-weight="600"' if bold else "")
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text x="{x}" y="{y}" {look}{anchor}>{escape(text)}</text>')

    def line(self, path: str, colour: str, *, dashed: bool = False, both: bool = True) -> None:
        name = colour.strip("#")
        ends = f'marker-end="url(#{name})"' + (f' marker-start="url(#{name})"' if both else "")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash} {ends}/>')

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{colour.strip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
            for colour in (CONTROL, GRADIENTS, RAY)
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{FONT}" role="img">'
        return "\n".join([head, f"<title>{escape(self.title)}</title><defs>{heads}</defs>", *self.parts, "</svg>\n"])


def processes(colours: dict[str, str]) -> Drawing:
    """Draw which processes there are on three machines, and what they send each other."""
    d = Drawing(760, 430, "Which processes talk to each other", colours)
    d.box(10, 10, 250, 330, fill="machine")
    d.text(135, 33, "the machine of your script", ink="soft")
    d.box(30, 48, 210, 210)
    d.text(135, 72, "driver: your script", bold=True)
    for row, text in enumerate(
        ("trainer: train(), save(), ...", "engine: handles failures", "control server", "store for the rendezvous")
    ):
        d.box(45, 88 + 40 * row, 180, 32, fill="machine")
        d.text(135, 109 + 40 * row, text)
    for number in range(2):
        top = 10 + 170 * number
        d.box(450, top, 300, 160, fill="machine")
        d.text(600, top + 22, f"machine {number + 2}", ink="soft")
        d.box(470, top + 34, 260, 78)
        d.text(600, top + 56, f"worker, rank {number}: a Ray actor", bold=True)
        d.text(600, top + 76, "your operator, model, optimizer")
        d.text(600, top + 96, "loaders, with processes of their own", ink="soft")
        d.box(470, top + 120, 260, 28, dashed=True)
        d.text(600, top + 139, "Ray: raylet", ink="soft")
    d.box(30, 300, 210, 28, dashed=True)
    d.text(135, 319, "Ray: GCS and raylet", ink="soft")
    d.line("M225 180 C 330 150 360 80 468 80", CONTROL)
    d.line("M225 192 C 330 215 360 250 468 250", CONTROL)
    d.line("M722 124 L 722 212", GRADIENTS)
    d.line("M240 308 C 350 300 400 150 468 146", RAY, dashed=True)
    d.line("M240 318 C 350 330 400 318 468 314", RAY, dashed=True)
    for row, (colour, text) in enumerate(
        (
            (CONTROL, "control channel: calls and answers, progress, heartbeats, snapshots, checkpoints"),
            (GRADIENTS, "process group (gloo, NCCL or Horovod): gradients, and the state for workers that join"),
            (RAY, "Ray: starts and ends workers, reports machines that end"),
        )
    ):
        y = 366 + 23 * row
        d.line(f"M20 {y} L 62 {y}", colour, dashed=colour == RAY)
        d.text(74, y + 4, text, middle=False)
    return d


def owners(world_size: int, offset: int) -> list[int | None]:
    """Return the rank that gets each sample after `offset`, with batches of 2 on each worker."""
    plan = SamplingPlan(total=24, step_size=2 * world_size, parts=world_size, world_size=world_size)
    found: list[int | None] = [None] * 24
    while plan.steps_left(offset):
        for rank, part in enumerate(plan.step_at(offset)):
            found[part.start : part.stop] = [rank] * (part.stop - part.start)
        offset = plan.offset_after(offset)
    return found


def epoch(colours: dict[str, str]) -> Drawing:
    """Draw how the library divides 24 samples of an epoch among three workers, before and after one of them fails."""
    d = Drawing(760, 260, "How an epoch is divided before and after a failure", colours)
    hues = ("#e0632b", "#4a90d9", "#4fa37a")
    d.text(20, 28, "the epoch's 24 samples, in their order, with batches of 2 on each worker", bold=True, middle=False)

    def cells(y: int, workers: list[int | None], note: str) -> None:
        for sample, owner in enumerate(workers):
            colour = colours["machine"] if owner is None else hues[owner]
            style = f'fill="{colour}" stroke="{colours["line"]}"'
            d.parts.append(f'<rect x="{20 + 30 * sample}" y="{y}" width="28" height="26" rx="3" {style}/>')
            d.text(34 + 30 * sample, y + 18, str(sample + 1), size=11, ink="#ffffff" if owner is not None else "soft")
        d.text(20, y + 44, note, ink="soft", middle=False)

    three, two = owners(3, 0), [worker and 2 for worker in owners(2, 12)]  # worker 2 is rank 1 then
    cells(46, list(three), "planned with three workers: each step takes the next six samples")
    cells(
        112,
        [*three[:12], *[None] * 12],
        "two steps are done; in the third, worker 1 is killed, and its samples are still to do",
    )
    cells(178, list(two), "planned again with two workers: each of the other samples is used once")
    for number, hue in enumerate(hues):
        d.parts.append(f'<rect x="{20 + 110 * number}" y="236" width="14" height="14" rx="3" fill="{hue}"/>')
        d.text(40 + 110 * number, 248, f"worker {number}", middle=False)
    return d


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in (("processes", processes), ("epoch", epoch)):
        for mode, colours in COLOURS.items():
            (FOLDER / f"{name}_{mode}.svg").write_text(draw(colours).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
