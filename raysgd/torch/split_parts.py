"""`TrainingOptions(on_oom="split")`: a batch whose parts do not fit into memory is computed in
twice as many. Worker."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy
import torch

from raysgd.core.batch_mode import Violation, refused
from raysgd.errors import ConfigError
from raysgd.torch.batch_mode import KeepBatch
from raysgd.torch.buffers import BATCH_NORMS
from raysgd.torch.part_states import PartStates
from raysgd.torch.parts import Parts
from raysgd.training.feed import Feed
from raysgd.training.step import Step
from raysgd.training.step_policy import Policy

logger = logging.getLogger("raysgd")

SPLIT = "a part did not fit into memory on rank %d. on_oom='split' lets %d parts share a batch, instead of %d"
NOT_SPLIT = "on_oom='split' does not divide the parts of this batch, which does not fit into memory: %s"
STEPPED = "an optimizer had begun its step, which may have changed weights"
SMALL = "a part has one row"
FROM_THE_START = "pass TorchTrainer(parts=n) in place of on_oom, or a smaller batch_size"
NORMALIZES = Violation(
    "BatchNorm in train mode normalizes with the rows of a part", "use GroupNorm, or call eval() on it in setup"
)
BUFFERS = Violation("the model changes a buffer in its forward pass", "compute it in on_step(self, info)")
STATES = Violation("self.part_state belongs to a part", FROM_THE_START)
DRAWS = Violation("train_batch draws random numbers, of which smaller parts have others", FROM_THE_START)
BATCHES = Violation("the loader has a batch sampler, or no batches", "make it with batch_size")


class SplitParts(Policy):
    """Lets all ranks compute the batch of a step that has run out of memory again, in twice as many
    parts, and the following ones, too. Refuses what has other results in smaller parts, unless the
    loss itself depends on which rows are together, which cannot be known."""

    def __init__(self, parts: Parts, keep: KeepBatch, states: PartStates, device: torch.device) -> None:
        self._parts, self._keep, self._states, self._device = parts, keep, states, device
        self._step: Step | None = None  # the running one, or that which an error has ended
        self._begun = False  # whether an optimizer has begun to make it
        self._random: Any = None  # the states of the generators when the part began
        self._checks = True  # in the first step
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # with what they had when its part began

    def watch(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                has_none = f"{type(optimizer).__name__} has no register_step_pre_hook"
                self._refuse(Violation(has_none, "use an optimizer of the class torch.optim.Optimizer"))
            optimizer.register_step_pre_hook(self._begin_step)

    def _begin_step(self, *_: Any) -> None:
        self._begun = True

    def on_epoch(self, feed: Feed) -> None:
        self._step, self._random = None, self._generators()
        self._refuse(BATCHES if feed.source.loader.batch_size is None else self._against())

    def begin(self, step: Step) -> None:
        self._step, self._begun, self._random = step, False, self._generators()
        if self._checks:
            self._buffers = [(each, each.clone()) for model in self._parts.models for each in model.buffers()]

    def trained(self, step: Step) -> None:
        if self._checks:
            self._refuse(self._against())

    def on_step(self, step: Step) -> None:
        if step.outcome != "undone":
            self._step, self._checks, self._buffers = None, False, []

    def split(self, rank: int) -> str | None:
        """Divide the parts of a batch for which the memory was too small. Return what the log says;
        None if the error did not occur in a step, or its parts cannot be divided."""
        step, self._step = self._step, None
        if step is None:
            return None
        rows, parts, found = step.current.rows or 0, self._keep.parts, self._against()
        if reason := STEPPED if self._begun else SMALL if rows <= parts else found and found.found:
            logger.warning(NOT_SPLIT, reason)
            return None
        self._keep.parts = min(2 * parts, rows)
        return SPLIT % (rank, self._keep.parts, parts)

    def _against(self) -> Violation | None:
        """Find what smaller parts would change."""
        if self._states.state():
            return STATES
        modules = [each for model in self._parts.models for each in model.modules() if each.training]
        if any(isinstance(each, BATCH_NORMS) or getattr(each, "running_mean", None) is not None for each in modules):
            return NORMALIZES
        if any(not torch.equal(*each) for each in self._buffers):
            return BUFFERS
        return DRAWS if self._generators() != self._random else None

    def _refuse(self, found: Violation | None) -> None:
        if found is not None:
            raise ConfigError(refused(found, "on_oom='split'"))

    def _generators(self) -> Any:
        on_device = torch.cuda.get_rng_state(self._device).tolist() if self._device.type == "cuda" else None
        (_, numbers, place, *_), own = cast("Any", numpy.random.get_state()), torch.get_rng_state()
        return own.numpy().tobytes(), on_device, random.getstate(), numbers.tobytes(), place
