"""Read what a module's `configure_optimizers` returns, and step its schedulers. Worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd.config import at_least, one_of
from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError

KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass
class Schedule:
    """A learning-rate scheduler, which steps every `frequency` epochs or batches.

    A `plateau` scheduler steps when the value that it monitors has been reported. `due` is whether
    it must still step for the last epoch.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    plateau: bool = False
    due: bool = False

    def steps_after(self, interval: str, count: int) -> bool:
        return self.interval == interval and count % self.frequency == 0


class Schedules:
    """Steps a module's schedulers. With manual optimization, the module steps them itself."""

    def __init__(self, module: Any, schedules: list[Schedule], device: torch.device) -> None:
        self.all, self._module, self._device = schedules, module, device
        automatic = module.automatic_optimization
        self._regular = [each for each in schedules if not each.plateau] if automatic else []
        self._plateaus = [each for each in schedules if each.plateau] if automatic else []

    def step(self, interval: str, count: int, *, unless: Callable[[Any], bool] = lambda scheduler: False) -> None:
        """Step the schedulers that are due after batch number `count` of an epoch, or after epoch
        number `count`, `unless` they keep their last learning rate."""
        for schedule in self._regular:
            if schedule.steps_after(interval, count) and not unless(schedule.scheduler):
                self._module.lr_scheduler_step(schedule.scheduler, None)

    def end_epoch(self, epochs: int) -> None:
        """Mark the due plateau schedulers, which step when a report has their value."""
        for schedule in self._plateaus:
            if schedule.due and schedule.strict:
                raise ConfigError(
                    f"{type(schedule.scheduler).__name__} needs {schedule.monitor!r}, which was not reported for the last epoch: "
                    "log it in training_step, or log it in validation_step and call validate() after each train()"
                )
            schedule.due = schedule.steps_after("epoch", epochs)

    def step_plateaus(self, report: Mapping[str, Any]) -> None:
        """Step due plateau schedulers whose value any rank reports, with the mean on all ranks."""
        if not self._plateaus:
            return
        weight = float(report[NUM_SAMPLES])
        values = [report.get(each.monitor or "") for each in self._plateaus]
        sums = [[0.0, 0.0] if value is None else [float(value) * weight, weight] for value in values]
        table = torch.tensor(sums, dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(table)
        for schedule, (total, weights) in zip(self._plateaus, table.tolist(), strict=True):
            if schedule.due and weights:
                schedule.due = False
                self._module.lr_scheduler_step(schedule.scheduler, total / weights)


def read_configuration(configured: Any, *, automatic: bool) -> tuple[list[Any], list[Schedule]]:
    """Return the optimizers and schedules. `configured` is an optimizer, a list of them,
    (optimizers, schedulers), or one or more dictionaries."""
    if _is_optimizer(configured) or isinstance(configured, Mapping):
        configured = [configured]
    if not isinstance(configured, (list, tuple)) or not configured:
        raise _invalid(configured)
    optimizers: list[Any]
    schedulers: list[Any]
    if all(isinstance(each, Mapping) for each in configured):
        optimizers, schedulers = _from_mappings(list(configured))
    elif len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        optimizers, schedulers = list(configured[0]), _listed(configured[1])
    else:
        optimizers, schedulers = list(configured), []
    if not optimizers or not all(_is_optimizer(each) for each in optimizers):
        raise _invalid(configured)
    if automatic and len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps only one: set "
            "self.automatic_optimization = False in the module's __init__, and step them in training_step"
        )
    return optimizers, [_schedule(each, automatic=automatic) for each in schedulers]


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups") and callable(getattr(value, "step", None))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _from_mappings(given: list[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    optimizers, schedulers = [], []
    for each in given:
        unknown = sorted(each.keys() - {"optimizer", "lr_scheduler", "monitor"})
        if unknown or "optimizer" not in each:
            raise ConfigError(
                "a dictionary from configure_optimizers must have the key 'optimizer', and can have 'lr_scheduler' and "
                f"'monitor'; got {sorted(each)}"
            )
        optimizers.append(each["optimizer"])
        scheduler = each.get("lr_scheduler")
        if scheduler is not None:
            given_as = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
            schedulers.append({"monitor": each.get("monitor"), **given_as})
    return optimizers, schedulers


def _schedule(given: Any, *, automatic: bool) -> Schedule:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    unknown = sorted(options.keys() - set(KEYS))
    if unknown or "scheduler" not in options:
        raise ConfigError(
            f"an lr_scheduler dictionary must have the key 'scheduler', and can have {', '.join(KEYS[1:])}; got "
            f"{sorted(options)}"
        )
    options.pop("name", None)
    plateau = options.pop("reduce_on_plateau", isinstance(options["scheduler"], ReduceLROnPlateau))
    schedule = Schedule(**options, plateau=bool(plateau))
    if not hasattr(schedule.scheduler, "state_dict") or not hasattr(schedule.scheduler, "step"):
        raise ConfigError(f"a learning-rate scheduler must have step() and state_dict(), got {schedule.scheduler!r}")
    one_of("an lr_scheduler's interval", schedule.interval, "epoch", "step")
    at_least("an lr_scheduler's frequency", schedule.frequency, 1, whole=True)
    if schedule.plateau and automatic:
        _check_plateau(schedule)
    return schedule


def _check_plateau(schedule: Schedule) -> None:
    name = type(schedule.scheduler).__name__
    if not schedule.monitor:
        raise ConfigError(
            f'{name} needs a monitor: {{"optimizer": ..., "lr_scheduler": {{"scheduler": ..., "monitor": "val_loss"}}}}'
        )
    if schedule.interval == "step":
        raise ConfigError(
            f"{name} with interval='step' is not supported, because the value that it monitors belongs to an epoch or a "
            "validation: use interval='epoch', or set automatic_optimization = False and step it yourself"
        )


def _invalid(configured: Any) -> ConfigError:
    return ConfigError(
        f"configure_optimizers returned {configured!r}. It can return an optimizer, a list of them, ([optimizers], "
        "[schedulers]), or dictionaries {'optimizer': ..., 'lr_scheduler': ...}"
    )
