"""What a call of an operator for PyTorch returns on one rank, and what it has measured so far.
Worker."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Any

from raysgd.constants import NUM_SAMPLES
from raysgd.core.measures.metrics import SKIPPED, Measured
from raysgd.core.tree import mapped
from raysgd.replica.calls import Phase
from raysgd.replica.results import Results
from raysgd.torch.data.registered_rows import RegisteredRows
from raysgd.torch.internals import TorchInternals
from raysgd.torch.operator import TrainingOperator

logger = logging.getLogger("raysgd")

PARTIAL_S = 10.0
NOT_FINITE = (
    "%s is %s in epoch %d, after %d batches of the call. The loss of a batch was not finite, and the weights may not be either. To end "
    "training at the first step whose gradients are not finite, and to see its samples, pass TrainingOptions(on_nonfinite='raise'). To "
    "leave out such steps, pass 'skip'"
)


class TorchResults(Results):
    """Adds what only torch needs: registered metrics, skipped steps, and numbers on a GPU, which
    are read only from time to time."""

    _internals: TorchInternals

    def __init__(
        self,
        operator: TrainingOperator,
        internals: TorchInternals,
        rows: RegisteredRows,
    ) -> None:
        super().__init__(operator, internals)
        self._rows = rows
        self._phase: Phase = "train"  # the running call's
        self._partial_at = 0.0
        self._partial: Measured | None = None
        self._warns_of_loss = False  # in it, if it is not finite

    def begin(self, phase: Phase, *, profile: bool, new_call: bool) -> None:
        super().begin(phase, profile=profile, new_call=new_call)
        internals = self._internals
        if new_call:  # registered metrics continue after a change of the group
            internals.registered.begin_measuring(self._metric_of(phase))
        internals.registered.precision.forget_skipped()
        internals.skip_step.skipped = 0
        self._phase = phase
        if new_call:
            internals.registered.refuse_changed(replaceable=internals.settings.threads is not None)
            internals.registered.exchange.begin_call()
            self._operator._warn_of_replaced()
            action, first = internals.registered.options.on_nonfinite, internals.rank_info.world_rank == 0
            self._warns_of_loss = phase == "train" and action is None and first
        self._partial_at, self._partial = time.monotonic() + PARTIAL_S, None

    def measured(self, metrics: dict[str, Any]) -> Measured:
        position = self._internals.position
        for name, value in metrics.items() if self._warns_of_loss and metrics.get(NUM_SAMPLES, 1) else ():
            if "loss" in name and isinstance(value, float) and not math.isfinite(value):
                logger.warning(NOT_FINITE, name, value, position.users_epoch, position.call_batches)
                self._warns_of_loss = False
                break
        return super().measured(metrics)

    def to_report(self) -> Measured | None:
        """The partial result. Metrics on a GPU are read only from time to time, because that waits
        for the device."""
        now, phase = time.monotonic(), self._phase
        if self._operator.device.type == "cpu" or now >= self._partial_at:
            self._partial_at, self._partial = now + PARTIAL_S, self.so_far()
        if self._internals.rank_info.world_size == 1:
            return self._partial
        # The driver compares these with the data of other ranks.
        rows = {name: each.for_ranks for name, each in self._rows.known(phase).items() if each.for_ranks}
        return replace(self._partial or Measured(), rows=rows)

    def of_call(self, result: Any, profile: bool, phase: Phase, reduced: bool) -> Measured:
        report, in_full = super().of_call(result, profile, phase, reduced), self._internals.registered.precision.output
        if phase == "train":
            return report
        return replace(report, metrics=mapped(in_full, report.metrics), returned=mapped(in_full, report.returned))

    def _counts(self) -> dict[str, Any]:
        internals = self._internals
        skipped = internals.registered.precision.skipped() + internals.skip_step.skipped
        return {SKIPPED: skipped} if skipped else {}

    def batch_mode(self) -> str:
        return self._internals.keep_batch.mode if self._phase == "train" else ""

    def add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        internals = self._internals
        report.update(internals.registered.measured(self._metric_of(phase)))
        return {} if internals.profiler is None else {"traces": internals.profiler.taken()}

    def _metric_of(self, phase: Phase) -> Phase:
        """The phase of the registered metric that the methods of this phase update."""
        default = type(self._operator).test_batch is TrainingOperator.test_batch
        has_metric = phase != "test" or "test" in self._internals.registered.metrics
        return "validation" if default and not has_metric else phase
