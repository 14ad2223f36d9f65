"""What acts in the steps of operators for PyTorch, in this order. Worker.

Each decides by itself, after `setup`, whether a run needs it."""

from __future__ import annotations

from typing import Any

from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.state.buffers import RestoreBuffers
from raysgd.torch.step.attributes import WatchAttributes
from raysgd.torch.step.moved_weights import RestoreWeights
from raysgd.torch.step.options import (
    Accumulate,
    CallOnStep,
    Clip,
    DuringExchange,
    Hold,
    ReadAfterLaunch,
    RestoreMetrics,
    RestoreSettings,
)
from raysgd.torch.step.parts.batch_mode import KeepBatch
from raysgd.torch.step.parts.dealing import Dealer
from raysgd.torch.step.parts.part_states import PartStates
from raysgd.torch.step.precision import Precision
from raysgd.torch.step.profiling import Profiler
from raysgd.torch.step.skipped_steps import SkipStep
from raysgd.torch.step.weights import GradientWeights
from raysgd.torch.step.whole_gradients import WholeGradients

IN_ORDER: tuple[type[Policy], ...] = (
    PartStates,  # keeps what a committed step has made of them, before another may raise an error
    ReadAfterLaunch,  # when the backward pass is launched: what follows may wait for the device
    RestoreBuffers,  # sends them, for which the next one waits, too
    WholeGradients,  # nothing is decided from gradients that have not arrived whole
    Precision,  # refuses a step without it before anything is computed from its gradients
    RestoreWeights,  # looks whether user code has moved them, before others call it
    RestoreSettings,
    KeepBatch,  # refuses code that does not follow the contract, before its counts travel
    GradientWeights,  # which the window may correct
    RestoreMetrics,
    SkipStep,  # before gradients that are not finite are clipped
    Accumulate,
    Hold,
    Clip,  # what is left of a step that is made
    DuringExchange,  # adds its hook to the loss last, so that it runs first
    WatchAttributes,
    Profiler,
    CallOnStep,  # may raise an error, when the others have ended the step
    Dealer,  # last, because what it changes is of the next step
)


def policies_for(run: Any) -> list[Policy]:
    """Collect what takes part in the steps of the operator with these internals."""
    return [policy for each in IN_ORDER if (policy := each.for_run(run)) is not None]
