"""Read what a module's `configure_optimizers` returns, and step its schedulers. Worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from raysgd.constants import NUM_SAMPLES
from raysgd.core.control import Control
from raysgd.errors import ConfigError
from raysgd.torch.foreign import configured_optimizers


class Schedules:
    """Steps a module's schedulers: `all` are Lightning's `LRSchedulerConfig` of each, and `due` is
    whether it must still step for the last epoch, which is so until the value that it monitors has
    been reported."""

    def __init__(self, module: Any, schedules: list[Any], device: torch.device) -> None:
        self.all, self.due = schedules, [False for _ in schedules]
        self._module, self._device = module, device
        self._regular = [each for each in schedules if not each.reduce_on_plateau]
        self._plateaus = [n for n, each in enumerate(schedules) if each.reduce_on_plateau]

    def step(self, interval: str, count: int, *, unless: Callable[[Any], bool] = lambda scheduler: False) -> None:
        """Step the schedulers that are due after batch number `count` of an epoch, or after epoch
        number `count`, `unless` they keep their last learning rate."""
        for schedule in self._regular:
            if schedule.interval == interval and count % schedule.frequency == 0 and not unless(schedule.scheduler):
                self._module.lr_scheduler_step(schedule.scheduler, None)

    def end_epoch(self, epochs: int) -> None:
        """Mark the due plateau schedulers, which step when a report has their value."""
        for number in self._plateaus:
            schedule = self.all[number]
            if self.due[number] and schedule.strict:
                raise ConfigError(
                    f"{type(schedule.scheduler).__name__} needs {schedule.monitor!r}, which was not reported for the last epoch: "
                    "log it in training_step, or log it in validation_step and call validate() after each train()"
                )
            self.due[number] = epochs % schedule.frequency == 0

    def step_plateaus(self, report: Mapping[str, Any], control: Control) -> None:
        """Step due plateau schedulers whose value any rank reports, with the mean on all ranks."""
        if not self._plateaus:
            return
        weight = float(report[NUM_SAMPLES])
        values = [report.get(self.all[number].monitor) for number in self._plateaus]
        sums = [[0.0, 0.0] if value is None else [float(value) * weight, weight] for value in values]
        table = torch.tensor(sums, dtype=torch.float64, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(table)
            control.ensure_whole()
        for number, (total, weights) in zip(self._plateaus, table.tolist(), strict=True):
            if self.due[number] and weights:
                self.due[number] = False
                self._module.lr_scheduler_step(self.all[number].scheduler, total / weights)


def read_configuration(module: Any, core: Any) -> tuple[list[Any], list[Any]]:
    """Read the optimizers and the `LRSchedulerConfig` of each scheduler that the module configures,
    as Lightning reads them. `core` is Lightning's module `core.optimizer`."""
    configured = module.configure_optimizers()
    try:
        optimizers, schedules = configured_optimizers(core, module, configured)
    except Exception as error:
        raise ConfigError(f"{type(module).__name__}.configure_optimizers returned {configured!r}: {error}") from error
    for each in schedules:
        if each.frequency < 1:
            raise ConfigError(f"{type(each.scheduler).__name__} has frequency={each.frequency!r}: use 1 or more")
        if each.reduce_on_plateau and each.interval == "step":
            raise ConfigError(
                f"{type(each.scheduler).__name__} with interval='step' is not supported, because the value that it monitors belongs to "
                "an epoch or a validation: use interval='epoch'"
            )
    return optimizers, schedules
