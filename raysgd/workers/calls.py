"""Pickle the arguments and outcomes of calls, and unpickle them where they are needed. Both.

Calls and answers go over the control connections. Ray, which would cost the driver several times as
much for each worker, sends only large ones."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from raysgd.core.messages import CallAnswer
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.errors import described
from raysgd.workers.events import CallEnded, Event, MessageReceived

SMALL = 1 << 16  # bytes that are not worth a place in Ray's object store


class Blob:
    """Bytes that are sent outside the pickle stream (as a `PickleBuffer`), so that a large state is
    copied only once.

    `ref` is where the group has put them in Ray's object store. It is not sent.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.ref: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if int(protocol) >= 5:
            return type(self), (pickle.PickleBuffer(self.data),)
        return type(self), (bytes(self.data),)

    def __len__(self) -> int:
        return memoryview(self.data).nbytes


class PickledObject(Blob):
    """A user's object as bytes, pickled once for all workers, or what a call returned."""


def unpickled(value: Any) -> Any:
    return pickle.loads(value.data) if isinstance(value, PickledObject) else value


def packed_outcome(outcome: Outcome) -> bytes | None:
    """Return an outcome pickled, or None for a large one, which Ray copies less often."""
    value = outcome.value if isinstance(outcome, Ok | Interrupted) else None
    if isinstance(outcome, Failed):
        from ray import cloudpickle

        packed: bytes = cloudpickle.dumps(outcome)
        return packed if len(packed) < SMALL else None
    small = value is None or (isinstance(value, PickledObject) and len(value) < SMALL)
    return pickle.dumps(outcome) if small else None


def opened(event: Event) -> Event:
    """Return the end of the call that a `CallAnswer` reports, and other events as they are."""
    if not (isinstance(event, MessageReceived) and isinstance(event.message, CallAnswer)):
        return event
    try:
        outcome: Outcome = pickle.loads(event.message.outcome)
    except BaseException as error:  # the user's classes may raise anything
        outcome = Failed(error, described(error))
    return CallEnded(event.worker, event.message.call, with_value(outcome))


def with_value(outcome: Outcome) -> Outcome:
    """Return the outcome with its value unpickled, or the error if that fails."""
    if not (isinstance(outcome, (Ok, Interrupted)) and isinstance(outcome.value, PickledObject)):
        return outcome
    try:
        return replace(outcome, value=unpickled(outcome.value))
    except BaseException as error:  # the user's classes may raise anything
        return Failed(error, described(error), outcome.progress)
