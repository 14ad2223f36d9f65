"""Keras metrics, over all ranks: their variables are sums, so what is summed over the ranks is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.tf.channel import Channel
from raysgd.tf.parts import assign

__all__ = ["metric_results"]


def metric_results(metrics: Sequence[Any], channel: Channel) -> dict[str, Any]:
    """Each metric's result by its name, the same on every rank. All ranks must ask at the same time."""
    variables = [variable for metric in metrics for variable in metric.variables]
    if channel.size > 1:
        assign(variables, channel.sum(variables))
    results: dict[str, Any] = {}
    for metric in metrics:
        if not getattr(metric, "built", True):
            continue  # no batch has come yet
        value = metric.result()
        named = value if isinstance(value, dict) else {metric.name: value}
        results |= {name: float(number) if _is_single(number) else number.numpy() for name, number in named.items()}
    return results


def _is_single(value: Any) -> bool:
    return getattr(value, "shape", ()) == ()
