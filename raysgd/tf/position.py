"""Where a replica stands: what travels with its state and says what is still to be done."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from raysgd.core.progress import Progress
from raysgd.errors import CheckpointError

__all__ = ["Position"]

# The order of an epoch is that of its number: each epoch before it is begun once.
MOST_EPOCHS, MOST = 1_000_000, 1 << 62


@dataclass
class Position:
    """Committed counts. `epoch` counts epochs begun; `offset` is the place in it, in batches of all ranks together;
    `ended` that it is over. The others are of the trainer's call that is running or was last: call_units counts the
    samples that all ranks together have committed in it, call_epoch is the epoch that it is to end."""

    step: int = 0
    loads: int = 0
    epoch: int = 0
    offset: int = 0
    ended: bool = True
    call: int = -1
    call_batches: int = 0
    call_expected: int = 0
    call_units: int = 0
    call_done: bool = False
    call_epoch: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def check(cls, values: Any, name: str) -> None:
        """Could `adopt` take this? Raises, with what is wrong with it."""
        known: dict[str, Any] = {each.name: each.default for each in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known.keys():
            found = (
                sorted(map(str, values.keys() - known.keys())) if isinstance(values, dict) else type(values).__name__
            )
            raise CheckpointError(f"the checkpoint's {name} must be a dictionary of {', '.join(known)}; it is {found}")
        for each, default in known.items():
            value = values.get(each, default)
            most = MOST_EPOCHS if each in ("epoch", "call_epoch") else MOST
            right = type(value) is type(default) and (isinstance(value, bool) or (min(default, 0) <= value <= most))
            if not right:
                kind = "True or False" if isinstance(default, bool) else f"a whole number of 0 to {most}"
                raise CheckpointError(f"the checkpoint's {name} has {each}={value!r:.60}: it must be {kind}")
        if values.get("ended") is False and not values.get("epoch"):
            raise CheckpointError(f"the checkpoint's {name} is in the middle of an epoch, and none was begun")

    def adopt(self, values: dict[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, values.get(each.name, each.default))

    def open_call(self, call: int) -> bool:
        """Begins a call, or goes on with it; False when its work is done already."""
        if call != self.call:
            self.call, self.call_batches, self.call_expected, self.call_units, self.call_done = (
                call,
                0,
                0,
                0,
                False,
            )
            self.call_epoch = self.epoch + self.ended
        return not self.call_done

    def progress(self, phase: str) -> Progress:
        return Progress(
            step=self.step,
            loads=self.loads,
            epoch=self.epoch,
            batches=self.call_batches,
            expected=self.call_expected,
            finished=self.call_done,
            phase=phase,
        )
