"""Learning-rate schedules: who steps them, and what happens if one is too short because fewer workers trained, or more epochs,
than it was made for. Worker."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raysgd.errors import ConfigError, counted
from raysgd.torch.foreign import nested_schedulers

logger = logging.getLogger("raysgd")


def steps_of(scheduler: Any) -> Any:
    """Return a number that changes whenever the scheduler steps, None if it has none."""
    steps = getattr(scheduler, "last_epoch", None)
    inner = nested_schedulers(scheduler)  # a ChainedScheduler has no counter of its own
    return steps_of(inner[0]) if steps is None and inner else steps


def step_in_order(scheduler: Any) -> None:
    """Step a scheduler at its time. In its first step, torch warns if the optimizer has not stepped before, which is right if that
    step was left out (for gradients that are not finite), or if the first batches of a window come before it."""
    if steps_of(scheduler):
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
        scheduler.step()


def has_length_in_code(scheduler: Any) -> bool:
    """Return whether checkpoints do not have what determines the rates: LambdaLR's functions are those of the code that runs."""
    return isinstance(scheduler, LambdaLR) and not any(scheduler.state_dict()["lr_lambdas"])


def stepped_twice(operator: str, scheduler: Any, freq: str) -> ConfigError:
    return ConfigError(
        f"{operator}.train_batch steps its scheduler, a {type(scheduler).__name__}, and scheduler_step_freq={freq!r} lets the trainer "
        f"step it after each {freq}, too, so its learning rates would come too early: remove scheduler.step() from train_batch, or "
        "pass scheduler_step_freq='manual'"
    )


def watch_schedule(
    scheduler: Any,
    workers: int,
    *,
    world_size: Callable[[], int],
    planned: Callable[[], int | None],
    needed: Callable[[int], int | None],
) -> None:
    """Let a scheduler keep its last learning rate, with one warning, if its `step` raises an error because it has made all
    its steps, and the reason is another number of workers, or that the run was resumed with more epochs.

    workers     the number of workers for which the schedule was made
    world_size  returns the current number of workers
    planned     returns how many steps `total_steps()` has planned, for schedulers that do not say how many they have
    needed      returns how many steps this many workers make until the end of the running epoch, if that is known

    The number of workers, whether it was different in a step, and the planned steps are attributes of the scheduler, so that its
    own state in checkpoints has them. `step` is replaced in a subclass, because an attribute would be part of that state, too.
    """
    if not isinstance(scheduler, LRScheduler):
        return
    kind: Any = type(scheduler)
    warned = False

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal warned
        now = world_size()
        self._workers_differed = self._workers_differed or now != self._made_for_workers
        try:
            kind.step(self, *args, **kwargs)
        except Exception:
            steps = getattr(self, "total_steps", None) or planned()
            need = needed(max(self._made_for_workers, 1)) if self._workers_differed else None
            longer = (planned() or 0) > (self._made_for_steps or math.inf)
            if steps is None or steps >= self.last_epoch or not (longer or (need is not None and need <= steps)):
                raise
            if not warned:
                warned = True
                made = f"it was made for {steps} steps with {counted(self._made_for_workers, 'worker')}"
                why = (
                    f"and this run, which was resumed with more epochs, has {planned()}. Training continues with the current "
                    "learning rate. To change the schedule, start a new run in another folder"
                    if longer
                    else "and the epochs have more steps, because fewer workers trained in a part of them (now there are "
                    f"{now}). Training continues with the current learning rate. With ElasticConfig(batch='global'), the number "
                    "of steps does not depend on the workers"
                )
                logger.warning("the schedule of %s has ended: %s, %s", kind.__name__, made, why)

    def reduce(self: Any, protocol: Any) -> Any:  # copies and pickled schedulers have the original class
        return object.__new__, (kind,), *super(watched, self).__reduce_ex__(protocol)[2:]

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    watched: Any = type(kind.__name__, (kind,), {**names, "__slots__": (), "step": step, "__reduce_ex__": reduce})
    vars(scheduler).update(_made_for_workers=workers, _workers_differed=False, _made_for_steps=planned())
    scheduler.__class__ = watched
