"""Send calls to workers, and their answers back, over the control connections. Both.

Ray would cost the driver several times as much for each worker. Calls and answers are pickled, and the token of a control
connection is sent in the clear, so each carries a code. Its key reaches the workers through Ray, and no connection of
raysgd. A code includes the number of the call, so that none can be used again."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
import struct
from dataclasses import replace

from raysgd.core.messages import CallAnswer, PerformCall
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.errors import described
from raysgd.workers.blob import SMALL, PickledObject, unpickled
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded

__all__ = ["ANSWER", "CALL", "CALL_HEAD", "CallChannel", "packed_outcome", "seal", "unseal", "with_value"]

CALL_HEAD = struct.Struct(">qq")  # the numbers of a call and of the generation, before what is the same for all ranks
CODE_BYTES = 32
CALL, ANSWER = b"call", b"answer"
PERFORM = PerformCall()


class CallChannel:
    """Owns, on the driver, the key of one group's calls and answers."""

    def __init__(self, control: ControlServer) -> None:
        self._control = control
        self.key = secrets.token_bytes(CODE_BYTES)

    def send(self, worker: str, data: bytes) -> bool:
        """Send a call: `CALL_HEAD`, then the pickled verb and arguments. Return False if the worker has no connection,
        which is or will be reported as a `WorkerEnded` event."""
        return self._control.send(worker, PERFORM, seal(self.key, CALL, data))

    def free_main_thread(self, worker: str) -> None:
        """Let the worker perform what it has received, and then a call that was submitted to Ray before this."""
        self._control.send(worker, PERFORM)

    def opened(self, event: Event) -> Event:
        """Return the end of the call that a `CallAnswer` reports, and other events as they are."""
        if not (isinstance(event, MessageReceived) and isinstance(event.message, CallAnswer)):
            return event
        try:
            data = unseal(self.key, ANSWER, bytes(event.body))
        except ValueError as error:
            return WorkerEnded(event.worker, str(error), "network")
        call, _ = CALL_HEAD.unpack_from(data)
        try:
            outcome: Outcome = pickle.loads(memoryview(data)[CALL_HEAD.size :])
        except BaseException as error:  # the user's classes may raise anything
            outcome = Failed(error, described(error))
        return CallEnded(event.worker, call, with_value(outcome))


def seal(key: bytes, kind: bytes, data: bytes) -> bytes:
    return _code(key, kind, data) + data


def unseal(key: bytes, kind: bytes, sealed: bytes) -> bytes:
    """Return what was sealed. Raise ValueError if it was not sealed with this key, as this kind of message."""
    data = sealed[CODE_BYTES:]
    if not hmac.compare_digest(sealed[:CODE_BYTES], _code(key, kind, data)):
        raise ValueError("a call or an answer on its control connection was not made with this trainer's key")
    return data


def _code(key: bytes, kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CODE_BYTES, key=key, person=kind).digest()


def packed_outcome(outcome: Outcome) -> bytes | None:
    """Return a small outcome pickled, or None for one that Ray should send, because that copies it less often."""
    value = outcome.value if isinstance(outcome, Ok | Interrupted) else None
    if isinstance(outcome, Failed):
        from ray import cloudpickle

        packed: bytes = cloudpickle.dumps(outcome)
        return packed if len(packed) < SMALL else None
    small = value is None or (isinstance(value, PickledObject) and len(value) < SMALL)
    return pickle.dumps(outcome) if small else None


def with_value(outcome: Outcome) -> Outcome:
    """Return the outcome with its value unpickled, or the error if that fails."""
    if not (isinstance(outcome, (Ok, Interrupted)) and isinstance(outcome.value, PickledObject)):
        return outcome
    try:
        return replace(outcome, value=unpickled(outcome.value))
    except BaseException as error:  # the user's classes may raise anything
        return Failed(error, described(error), outcome.progress)
