"""The position of a replica in its data: part of its state, and what determines the work that is
left. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raysgd.core.measures.progress import Progress
from raysgd.errors import CheckpointError
from raysgd.replica.steps.step import Step


def check_count(name: str, value: Any) -> None:
    """Raise CheckpointError unless a value that a user may have changed in a state is a count."""
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{name} is {value!r:.60}, and must be an integer of at least 0")


def check_counters(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a state has counters and positions that can be loaded."""
    for name in ("global_step", "epoch"):  # which users change
        check_count(name, state.get(name, 0))
    for name in ("position", "validation_position", "test_position"):
        values = state.get(name) or {}
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{name} is {values!r:.60}, and must be a dictionary")
        for each in fields(Position):
            value, usual = values.get(each.name, each.default), each.default
            fits = value is None or isinstance(value, (list, tuple)) if usual is None else type(value) is type(usual)
            if not fits or (type(value) is int and value < (-1 if each.name == "call" else 0)):
                raise CheckpointError(f"{each.name} in {name} is {value!r:.60}, which no position has")


def align_position(state: dict[str, Any]) -> dict[str, Any]:
    """Make the position in a state agree with its `epoch`. If a user has changed that number, so
    many epochs count as trained, and the next one begins at its beginning. What is not a number of
    epochs is left to the checks."""
    epoch, position = state.get("epoch"), state.get("position")
    if type(epoch) is not int or epoch < 0 or not isinstance(position, Mapping):
        return state
    counted = position.get("counted")
    if epoch == (counted or position.get("epoch", 0)):
        return state
    begins = {
        "epoch": epoch,
        "counted": epoch if counted else 0,
        "offset": 0,
        "ended": True,
        "epoch_batches": 0,
        "parked": None,
    }
    changed = {**state, "position": {**position, **begins}}
    loader = state.get("loader")
    if isinstance(loader, Mapping):  # without its places in the epoch that it was in
        changed["loader"] = {name: each for name, each in loader.items() if name != "marks"}
    return changed


@dataclass
class Position:
    """What has been committed. The names of the fields are keys in checkpoints.

    step           batches since the beginning of training
    applied        steps of single optimizers: of two ranks in one batch, one can be ahead by one
                   optimizer's step
    loads          how often the user has loaded a state, or changed it with a call that does not
                   train
    changes        the number of the newest such change in the run, which a load continues
    epoch          epochs of the data that have begun
    counted        epochs for users that have begun, if these are calls with a number of steps
                   (Keras' `steps_per_epoch`)
    offset, ended  the position in the current epoch, and whether the epoch has ended
    epoch_batches  batches of the current epoch
    overdue        whether an error has ended a call with `call_ended`, and no later one has stepped
    parked         the epoch's position while a call trains on a data set of its own; in
                   evaluations, the epoch, the offset, and whether it had ended, where the newest
                   call began
    left_out       batches in a row up to now whose step was left out (`SkipStep`)
    contract       what prevents that the batch is divided into parts, and an advice (`Violation`,
                   as a tuple), or empty texts; None before the first step
    call           the number of the current call, or of the last one. The following belong to it:
    call_batches   batches committed
    call_expected  batches that the call will have, if that is known
    call_done      whether the call is done
    call_ended     whether an epoch has ended in it, and schedules that step at its end have not yet
    call_epoch     the epoch with which the call ends
    call_units     samples that all ranks together have committed, if the source counts them
    """

    drawn = 0.0  # what this rank has committed itself, relative to equal shares; no field, and so in no state
    step: int = 0
    applied: int = 0
    loads: int = 0
    changes: int = 0
    epoch: int = 0
    counted: int = 0
    offset: int = 0
    ended: bool = True
    call: int = -1
    call_batches: int = 0
    call_expected: int = 0
    call_units: int = 0
    call_done: bool = False
    call_ended: bool = False
    overdue: bool = False
    call_epoch: int = 0
    left_out: int = 0
    contract: Any = None
    epoch_batches: int = 0
    parked: list[Any] | None = None

    def set_aside(self) -> None:
        """Store the epoch's position, because a call on another data set begins."""
        if self.parked is None:
            self.parked = [self.offset, self.ended, self.epoch_batches]
            self.offset, self.ended, self.epoch_batches = 0, False, 0
            self.epoch += 1
            self.call_epoch = self.epoch

    def resume_epoch(self) -> None:
        """Restore the epoch's position, if it was stored."""
        if self.parked is not None:
            self.offset, self.ended, self.epoch_batches = self.parked
            self.parked = None

    @property
    def users_epoch(self) -> int:
        """How many epochs have begun, as users count them."""
        return self.counted or self.epoch

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def adopt(self, values: Mapping[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, values.get(each.name, each.default))
        self.contract = None if self.contract is None else tuple(self.contract)  # JSON makes a list of it

    def commit(self, step: Step) -> None:
        """Count what a step has trained. From now on its batches are never drawn again."""
        step.committed = True
        if step.outcome == "open":  # the loop is done with it, and no optimizer that can be watched has stepped
            step.outcome = "applied"
        for drawn in step.drawn:
            if drawn.rows is not None:
                self.drawn += drawn.weight * drawn.rows
                self.call_units += drawn.rows if drawn.last_part else 0
        self.offset = step.current.offset
        batches = step.batches
        self.step += batches
        self.epoch_batches += batches
        self.call_batches += batches

    def is_new(self, call: int, *, continues: bool = False) -> bool:
        """Whether this is another call than the one in which this is a position. With `continues`,
        a position that was loaded is in this call, if it is in one."""
        if continues and self.call < 0 and self.call_batches:
            self.call = call
        return call != self.call

    def open_call(self, call: int) -> bool:
        """Begin a call, or continue it. Return False if its work is done already."""
        if call != self.call:
            self.call, self.call_batches, self.call_expected, self.call_units = call, 0, 0, 0
            self.overdue = self.overdue or self.call_ended
            self.call_done = self.call_ended = False
            self.call_epoch = self.epoch + self.ended
        return not self.call_done

    def count_call(self, steps: int) -> None:
        """Note that the call that begins is an epoch of so many steps. Older checkpoints have not
        counted those before; a state whose epoch a user has set to 0 has none."""
        self.counted = 1 + (self.counted or (self.step // steps if self.epoch else 0))

    def progress(self, phase: str) -> Progress:
        return Progress(
            step=self.step,
            applied=self.applied,
            loads=self.loads,
            epoch=self.users_epoch,
            batches=self.call_batches,
            expected=self.call_expected,
            finished=self.call_done,
            phase=phase,
            call=self.call,
        )
