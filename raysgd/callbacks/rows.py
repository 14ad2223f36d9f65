"""A result as one row of a table."""

from __future__ import annotations

from typing import Any

from raysgd.callbacks.base import Result

__all__ = ["OWN", "row_of"]

OWN = ("kind", "epoch", "step", "world_size", "seconds")


def row_of(result: Result) -> dict[str, Any]:
    """Its own figures, and then the metrics. A metric that has one of our names is called `reported_...`; but `epoch` is
    the same thing."""
    metrics = {
        f"reported_{name}" if name in OWN else name: value
        for name, value in result.metrics.items()
        if name != "epoch" or value != result.epoch
    }
    return {**{name: getattr(result, name) for name in OWN}, **metrics}
