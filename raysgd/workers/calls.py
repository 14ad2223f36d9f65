"""Pickle the outcomes of calls, and unpickle them where they are needed. Both.

Calls and answers go over the control connections. Ray, which would cost the driver several times as
much for each worker, sends only large ones."""

from __future__ import annotations

import pickle
from dataclasses import replace

from raysgd.core.messages import CallAnswer
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.errors import described
from raysgd.workers.blob import SMALL, PickledObject, unpickled
from raysgd.workers.events import CallEnded, Event, MessageReceived


def packed_outcome(outcome: Outcome) -> bytes | None:
    """Return a small outcome pickled, or None for one that Ray should send, because that copies it
    less often."""
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
