"""What a call of an operator for TensorFlow returns on one rank, and what it has measured so far.
Worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.constants import GLOBAL, PER_WORKER
from raysgd.core.measures.metrics import Measured
from raysgd.replica.calls import Phase
from raysgd.replica.results import Results
from raysgd.tf.channel import Channel
from raysgd.tf.data import OwnSource
from raysgd.tf.operator import KerasInternals, TrainingOperator
from raysgd.tf.registered import assign


class KerasResults(Results):
    """Adds what only TensorFlow needs: Keras metrics."""

    _internals: KerasInternals

    def __init__(self, operator: TrainingOperator, internals: KerasInternals, sources: Mapping[str, Any]) -> None:
        super().__init__(operator, internals)
        self._sources, self._prefix = sources, "train_"

    def begin(self, phase: Phase, *, profile: bool, new_call: bool) -> None:
        super().begin(phase, profile=profile, new_call=new_call)
        self._prefix = "train_" if phase == "train" else self._internals.prefix
        for metric in self._operator._metrics():
            metric.reset_state()

    def so_far(self, result: dict[str, Any] | None = None) -> Measured:
        """What the running call has measured so far; Keras metrics are those of this rank."""
        metrics = metric_results(self._operator._metrics(), Channel())
        partial = super().so_far(result)
        return replace(partial, metrics={self._prefix + name: metrics[name] for name in metrics} | partial.metrics)

    def to_report(self) -> Measured | None:
        return super().so_far()

    def batch_mode(self) -> str:
        return PER_WORKER if isinstance(self._sources.get("train"), OwnSource) else GLOBAL

    def add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        for name, value in metric_results(self._operator._metrics(), self._internals.channel).items():
            report.setdefault(self._prefix + name, value)
        return {"stop": self._operator._on_report(self._prefix, report)}


def metric_results(metrics: Sequence[Any], channel: Channel) -> dict[str, Any]:
    """Compute each Keras metric's result by its name. Their variables are sums, so summing these
    over the ranks is exact. All ranks must call this at the same time."""
    variables = [variable for metric in metrics for variable in metric.variables]
    if channel.size > 1:
        assign(variables, channel.sum(variables))
    results: dict[str, Any] = {}
    for metric in metrics:
        if not getattr(metric, "built", True):
            continue  # it has not seen a batch yet
        value = metric.result()
        named = value if isinstance(value, dict) else {metric.name: value}
        results |= {
            name: float(number) if getattr(number, "shape", ()) == () else number.numpy()
            for name, number in named.items()
        }
    return results
