"""Pickle the arguments and outcomes of calls, and unpickle them where they are needed. Both.

Calls and answers go over the control connections. What is large of them takes the way of a state,
in parts, so that the driver sees it move, however slow the network is: a transfer to a worker, and
its bulk connection from there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import CallAnswer
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.errors import described
from raysgd.workers.events import CallEnded, Event, MessageReceived

SMALL = 1 << 16  # bytes that do not delay what follows them on a control connection


class PickledObject(Blob):
    """A user's object as bytes, pickled once for all workers, or what a call returned."""


def unpickle(value: Any) -> Any:
    return pickle.loads(value.data) if isinstance(value, PickledObject) else value


def has_large(arguments: Mapping[str, Any]) -> bool:
    return any(isinstance(each, Blob) and len(each) >= SMALL for each in arguments.values())


def pickle_in_parts(value: Any, dumps: Callable[..., bytes]) -> tuple[bytes, list[memoryview]]:
    """Pickle a value, with what is large of it apart: the data of each `Blob`, which is not copied,
    and before them the rest, if that is large, too."""
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= SMALL:
            large.append(view)
        return view.nbytes < SMALL

    packed = dumps(value, protocol=5, buffer_callback=stays)
    return (packed, large) if len(packed) < SMALL else (b"", [memoryview(packed), *large])


def unpickle_parts(packed: bytes, large: Sequence[Any]) -> Any:
    """Restore the value that `pickle_in_parts` has pickled."""
    first, *buffers = [packed, *large] if packed else large
    return pickle.loads(first, buffers=buffers)


def pack_outcome(outcome: Outcome) -> tuple[bytes, list[memoryview]]:
    """Pickle an outcome in parts. cloudpickle, which takes longer, also pickles the user's
    errors."""
    if isinstance(outcome, Ok | Interrupted) and isinstance(outcome.value, Blob | None):
        return pickle_in_parts(outcome, pickle.dumps)
    from ray import cloudpickle

    return pickle_in_parts(outcome, cloudpickle.dumps)


def open_answer(event: Event) -> Event:
    """The end of the call that a `CallAnswer` reports, and other events as they are."""
    if not (isinstance(event, MessageReceived) and isinstance(event.message, CallAnswer)):
        return event
    answer = event.message
    try:
        outcome: Outcome = unpickle_parts(answer.outcome, event.body)
    except BaseException as error:  # the user's classes may raise anything
        outcome = Failed(error, described(error))
    return CallEnded(event.worker, answer.call, with_value(outcome))


def with_value(outcome: Outcome) -> Outcome:
    """The outcome with its value unpickled, or the error if that fails."""
    if not (isinstance(outcome, (Ok, Interrupted)) and isinstance(outcome.value, PickledObject)):
        return outcome
    try:
        return replace(outcome, value=unpickle(outcome.value))
    except BaseException as error:  # the user's classes may raise anything
        return Failed(error, described(error), outcome.progress)
