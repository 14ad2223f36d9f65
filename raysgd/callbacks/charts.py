"""Draw line charts as SVG, to be part of an HTML page. The page's style sheet colours them. Both."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from raysgd.errors import text_of
from raysgd.storage.masking import mask_text

__all__ = ["MOST_SERIES", "Point", "as_html", "line_chart", "ticks", "time_unit"]

Point = tuple[float, float]
MOST_SERIES = 6  # as many as the style sheet has colours for
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 200, 58, 12, 10, 34
MOST_POINTS, MOST_DOTS = 600, 60
MOST_TEXT = 20_000
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # what HTML must not contain
COUNTS = ("epoch", "step", "report")  # axes of whole numbers


def as_html(value: Any) -> str:
    """Return a value as text that contains neither HTML nor the secrets of URIs."""
    text = mask_text(text_of(value))
    text = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... ({len(text)} characters)"
    return escape(CONTROL.sub("\ufffd", text))


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    x: str,
    colours: Sequence[int] = (),
    span: tuple[float, ...] = (),
    marks: Sequence[tuple[float, str]] = (),
    steps: bool = False,
    from_zero: bool = False,
) -> str:
    """Return the lines of `series`, over an axis with the title `x`. A line is interrupted where a value is not finite.

    colours    the number of each line's colour; by default 0, 1, 2 and so on
    span       what the horizontal axis must include
    marks      vertical lines: where, and what the pointer shows there
    steps      the values are counts, and each holds until the next one
    from_zero  the vertical axis begins at 0
    """
    points = [point for line in series.values() for point in line if _is_finite(point)]
    if not points:
        return '<p class="none">No finite values.</p>'
    across = [*(point[0] for point in points), *(where for where, _ in marks), *span]
    upward = [*(point[1] for point in points), *([0.0] if from_zero else [])]
    x_ticks = ticks(min(across), max(across), whole=x in COUNTS)
    y_ticks = ticks(min(upward), max(upward), whole=steps)
    frame = _Frame(min(across), max(across), min(*upward, *y_ticks), max(*upward, *y_ticks))
    numbers = colours or range(len(series))
    lines = [_line(name, number, series[name], frame, steps) for name, number in zip(series, numbers, strict=True)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{as_html(", ".join(series))} over {as_html(x)}">'
        + "".join(_y_tick(frame.y(value), _text(value)) for value in y_ticks)
        + "".join(_x_tick(frame.x(value), _text(value)) for value in x_ticks if frame.left <= value <= frame.right)
        + f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{as_html(x)}</text>'
        + "".join(_mark(frame.x(where), text) for where, text in marks)
        + "".join(lines)
        + "</svg>"
    )


class _Frame:
    """Maps values to places in the picture. An empty range gets some width."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        half = 0.5 if left == right else 0.0
        self.left, self.right, self._low, self._high = left - half, right + half, low, high

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * _share(value, self.left, self.right), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(value, self._low, self._high), 1)


def _share(value: float, low: float, high: float) -> float:
    """Return where a value is between two others, also if their difference is beyond a float."""
    return (value / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)


def ticks(low: float, high: float, *, most: int = 5, whole: bool = False) -> list[float]:
    """Return round numbers that cover a range, `whole` ones if that is asked for.

    >>> ticks(0.0, 7.3), ticks(1, 3, whole=True), ticks(5.0, 5.0)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0], [4.5, 5.0, 5.5])
    """
    if low == high:
        half = 0.5 if abs(low) < 1e15 else abs(low) / 2
        return [low] if whole else [low - half, low, low + half]
    raw = high / most - low / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else raw
    step = next((power * each for each in (1, 2, 2.5, 5) if power * each >= raw), 10 * power)
    step = max(math.ceil(step), 1) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1) if math.isfinite(n * step)]


def time_unit(span_s: float) -> tuple[str, float]:
    """Return the unit in which to show a time of this length, and its seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((unit for unit in units if span_s >= 3 * unit[1]), ("seconds", 1.0))


def _is_finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _line(name: str, number: int, line: Sequence[Point], frame: _Frame, steps: bool) -> str:
    parts: list[list[Point]] = [[]]
    for point in line:
        if _is_finite(point):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    path, dots = "", ""
    for part in parts:
        places = [(frame.x(x), frame.y(y)) for x, y in _thinned(part)]
        for at, (x, y) in enumerate(places):
            path += f"M{x} {y}" if at == 0 else f"H{x}V{y}" if steps else f"L{x} {y}"
    shown = [point for part in parts for point in part]
    if len(shown) <= MOST_DOTS:
        dots = "".join(
            f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="2.5"><title>{as_html(name)}: {_text(y)}</title></circle>'
            for x, y in shown
        )
    return f'<g class="s{number % MOST_SERIES}"><path d="{path}"/>{dots}</g>'


def _thinned(line: Sequence[Point]) -> Sequence[Point]:
    """Return at most MOST_POINTS points: the lowest and the highest of each stretch, and the last."""
    if len(line) <= MOST_POINTS:
        return line
    size = math.ceil(2 * len(line) / (MOST_POINTS - 1))
    kept: list[Point] = []
    for start in range(0, len(line), size):
        stretch = line[start : start + size]
        places = {
            min(range(len(stretch)), key=lambda i: stretch[i][1]),
            max(range(len(stretch)), key=lambda i: stretch[i][1]),
        }
        kept += [stretch[place] for place in sorted(places)]
    return [*kept, line[-1]]


def _x_tick(x: float, text: str) -> str:
    return f'<text x="{x}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{text}</text>'


def _y_tick(y: float, text: str) -> str:
    line = f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{text}</text>'


def _mark(x: float, text: str) -> str:
    place = f"M{x} {TOP}V{HEIGHT - BOTTOM}"
    return f'<path class="mark" d="{place}"><title>{as_html(text)}</title></path>'


def _text(value: float) -> str:
    return f"{int(value)}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
