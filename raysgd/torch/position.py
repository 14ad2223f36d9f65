"""Where a replica stands: what travels with its state and says what is still to be done."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from raysgd.progress import Progress

__all__ = ["Position"]


@dataclass
class Position:
    """Committed counts. `applied` counts single optimizers' steps: two ranks can be in one batch, the one after its first
    optimizer's step and the other after its second. `epoch` counts epochs begun; `offset` is the place in it; `ended` that it is over.

    stream, parked: the place in a data set passed to `train(dataset=...)`, and the epoch's place meanwhile.
    call_units counts the samples that all ranks together have committed in the call, where a plan knows it.
    call, call_batches, call_expected, call_done, call_epoch (the one it is to end): of the trainer's call that is running or was last.
    """

    step: int = 0
    applied: int = 0
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
    stream: int = 0
    parked: list[Any] | None = None

    def set_aside(self, *, restart: bool = False) -> None:
        """A call on another data set begins: the epoch's place waits, the stream's place is taken up; or, for data that
        each call begins `restart`, the beginning."""
        if self.parked is None:
            self.parked = [self.offset, self.ended, self.stream if restart else None]
            self.offset, self.ended = 0 if restart else self.stream, False
            self.epoch += 1
            self.call_epoch = self.epoch

    def resume_epoch(self) -> None:
        if self.parked is not None:
            kept = self.parked[2] if len(self.parked) > 2 else None  # older checkpoints have two entries
            self.stream = self.offset if kept is None else kept
            self.offset, self.ended = self.parked[:2]
            self.parked = None

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def adopt(self, values: dict[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, values.get(each.name, each.default))

    def open_call(self, call: int) -> bool:
        """Begins a call, or goes on with it; False when its work is done already."""
        if call != self.call:
            self.call, self.call_batches, self.call_expected, self.call_units, self.call_done = call, 0, 0, 0, False
            self.call_epoch = self.epoch + self.ended
        return not self.call_done

    def progress(self, phase: str) -> Progress:
        return Progress(
            step=self.step,
            applied=self.applied,
            loads=self.loads,
            epoch=self.epoch,
            batches=self.call_batches,
            expected=self.call_expected,
            finished=self.call_done,
            phase=phase,
        )
