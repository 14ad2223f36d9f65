"""Curves of what was measured, over the epochs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd.callbacks.extra import needs
from raysgd.callbacks.figures import numbers
from raysgd.errors import ConfigError

__all__ = ["drawn"]

# Numbers that say how much was done, not how well.
COUNTS = ("epoch", "step", "world_size", "seconds", "batch_count", "num_samples", "skipped_steps")


def drawn(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str], path: str | Path | None) -> Any:
    """One plot below the other, one for each metric."""
    plotting = needs("matplotlib.figure", who="history.plot()")
    figures = [numbers(row) for row in rows]
    there = list(dict.fromkeys(name for row in figures for name in row))
    chosen = list(metrics) or [n for n in there if n not in COUNTS and not n.startswith(("last_", "_", "profile/"))]
    absent = [name for name in chosen if name not in there]
    if absent or not chosen:
        raise ConfigError(
            f"there is nothing to plot of {', '.join(absent) or 'this history'}: "
            f"the numbers that were measured are {', '.join(there) or 'none yet'}"
        )
    figure = _notebook_figure(plotting.Figure)(figsize=(7, 2.2 * len(chosen) + 0.6), layout="constrained")
    epochs = all(row.get("epoch") is not None for row in rows)
    for name, axes in zip(chosen, figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0], strict=True):
        points = [(row["epoch" if epochs else "step"], row[name]) for row in figures if name in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("epoch" if epochs else "step")
    if path is not None:
        figure.savefig(path)
    return figure


def _notebook_figure(figure: Any) -> Any:
    """A figure that notebooks show, without pyplot and its list of all figures, which would keep each one."""

    def image(self: Any) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    return type("Figure", (figure,), {"_repr_png_": image})
