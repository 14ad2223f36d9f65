"""The callbacks of transformers that log to a service, in a Trainer that repeats steps. Worker."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from raysgd.train.in_place.points import Points


class Trackers:
    """Owns what these callbacks have yet to log. It waits in `points` for the next commit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._callbacks = [each for each in trainer.callback_handler.callbacks if is_tracker(each)]
        self._on_log = [each.on_log for each in self._callbacks]
        self.points = Points(self._track)

    def hold_back(self) -> None:
        """Note what the Trainer lets them log, from now on."""
        for number, each in enumerate(self._callbacks):
            each.on_log = partial(self._note_log, number)

    def let_through(self) -> None:
        for each in self._callbacks:
            del each.on_log

    def _note_log(self, number: int, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        """Called in place of a tracker's `on_log`."""
        place = {name: getattr(state, name) for name in ("global_step", "epoch")}
        self.points.add(number, place, dict(logs))

    def _track(self, number: int, place: Mapping[str, Any], logs: dict[str, Any]) -> None:
        """Let a tracker log what was logged at this place."""
        trainer = self._trainer
        state, alone = copy.copy(trainer.state), copy.copy(trainer.callback_handler)
        vars(state).update(place)
        alone.callbacks = [SimpleNamespace(on_log=self._on_log[number])]
        alone.call_event("on_log", trainer.args, state, trainer.control, logs=logs)


def is_tracker(callback: Any) -> bool:
    """Whether it sends what is logged to a service or a file of its own."""
    return any(each.__module__.startswith("transformers.integrations") for each in type(callback).__mro__)
