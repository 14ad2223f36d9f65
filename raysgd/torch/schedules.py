"""Learning-rate schedules: who steps them, and what happens if one is too short because fewer
workers trained, or more epochs, than it was made for. Worker."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raysgd.errors import ConfigError, counted
from raysgd.torch.foreign import nested_schedulers


def steps_of(scheduler: Any) -> Any:
    """Return a number that changes whenever the scheduler steps, None if it has none."""
    steps = getattr(scheduler, "last_epoch", None)
    inner = nested_schedulers(scheduler)  # a ChainedScheduler has no counter of its own
    return steps_of(inner[0]) if steps is None and inner else steps


def step_in_order(scheduler: Any) -> None:
    """Step a scheduler at its time. In its first step, torch warns if the optimizer has not stepped
    before, which is right if that step was left out (for gradients that are not finite), or if the
    first batches of a window come before it."""
    if steps_of(scheduler):
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
        scheduler.step()


def has_length_in_code(scheduler: Any) -> bool:
    """Return whether checkpoints do not have what determines the rates: LambdaLR's functions are
    those of the code that runs."""
    return isinstance(scheduler, LambdaLR) and not any(scheduler.state_dict()["lr_lambdas"])


def stepped_twice(operator: str, scheduler: Any, freq: str) -> ConfigError:
    return ConfigError(
        f"{operator}.train_batch steps its scheduler, a {type(scheduler).__name__}, and scheduler_step_freq={freq!r} lets the trainer "
        f"step it after each {freq}, too, so its learning rates would come too early: remove scheduler.step() from train_batch, or "
        "pass scheduler_step_freq='manual'"
    )


class MadeFor(NamedTuple):
    """What the schedules of a run were made for. Part of a replica's state, as a tuple.

    workers  how many workers
    steps    how many steps `total_steps()` had planned, None if it had not
    changed  whether the number of workers was another one when a schedule stepped
    """

    workers: int
    steps: int | None = None
    changed: bool = False


def why_too_short(
    scheduler: Any, made: MadeFor, *, now: int, planned: int | None, needed: Callable[[int], int | None]
) -> str:
    """Return why a scheduler that has made all its steps keeps its last learning rate instead of
    raising an error: the reason is another number of workers, or that the run was resumed with more
    epochs. Return "" if it must step.

    now      the current number of workers
    planned  how many steps `total_steps()` has planned, for schedulers that do not say how many
             they have
    needed   returns how many steps this many workers make until the end of the running epoch, None
             if that is not known
    """
    own, made_steps = getattr(scheduler, "total_steps", None), steps_of(scheduler)
    steps = own if isinstance(own, int) else planned
    if not isinstance(scheduler, LRScheduler) or steps is None or made_steps is None or made_steps < steps:
        return ""
    length = (
        f"{type(scheduler).__name__} has ended: it was made for {steps} steps with {counted(made.workers, 'worker')}"
    )
    if (planned or 0) > (made.steps or math.inf):
        return (
            f"{length}, and this run, which was resumed with more epochs, has {planned}. Training continues with the current "
            "learning rate. To change the schedule, start a new run in another folder"
        )
    need = needed(max(made.workers, 1)) if made.changed else None
    if need is None or need > steps:
        return ""
    return (
        f"{length}, and the epochs have more steps, because fewer workers trained in a part of them (now there are {now}). Training "
        "continues with the current learning rate. With ElasticConfig(batch='global'), the number of steps does not depend on the "
        "workers"
    )
