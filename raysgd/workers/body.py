"""The inside of a worker, the same in a Ray actor and in this very process: it performs calls and says how they went."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from raysgd.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.progress import Control, Progress
from raysgd.protocols import Backend, Replica, ReplicaFactory
from raysgd.rendezvous import Seat
from raysgd.workers.blob import Blob, unpacked

__all__ = ["Body"]

logger = logging.getLogger(__name__)

# Their values are the user's own: one that cannot be pickled must not look like a worker's death.
ANSWERS_OF_USERS = {"train", "validate", "apply", "apply_operator"}


class Body:
    """Hosts one replica. Every call ends in an outcome; nothing is raised out of `perform`.

    A rank whose own code raised leaves the generation at once, so that its peers fall out of their collective
    instead of waiting for it.
    """

    def __init__(self, backend: Backend, control: Control, *, travels: bool = True) -> None:
        self._backend = backend
        self._control = control
        self._travels = travels
        self._replica: Replica | None = None

    def perform(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        try:
            value = getattr(self, f"_{verb}")(**{name: unpacked(value) for name, value in arguments.items()})
        except Exception as error:
            return self._fell(error)
        except SystemExit as error:
            return self._fell(RuntimeError(f"the operator called sys.exit({error.code!r})"))
        if isinstance(value, Interrupted):
            return value
        return Ok(value, self._progress)

    @property
    def _progress(self) -> Progress:
        return self._replica.progress if self._replica is not None else Progress()

    def _fell(self, error: Exception) -> Outcome:
        text = traceback.format_exc()
        foreign = self._backend.is_interruption(error)
        told = self._control.interrupted and isinstance(error, (RuntimeError, OSError))
        self._backend.leave()
        if foreign or told:
            partial = self._replica.partial() if self._replica is not None else None
            return Interrupted(partial, f"{type(error).__name__}: {error}", self._progress)
        return Failed(portable(error) if self._travels else error, text, self._progress)

    # -- verbs ----------------------------------------------------------------------------------------

    def _prepare(self, hook: Callable[[], Any] | None) -> None:
        if hook is not None:
            hook()

    def _join(self, seat: Seat, settings: dict[str, Any]) -> None:
        self._backend.leave()  # a recruit may have met a generation that did not come to stand, and nobody has told it
        self._control.clear()
        self._control.shared_by(seat.world_size)
        self._backend.join(seat, settings)
        if self._replica is not None:
            self._replica.seated(seat)

    def _build(self, factory: ReplicaFactory, seat: Seat) -> None:
        self._replica = factory(seat, self._control)

    def _warm(
        self, hook: Callable[[], Any] | None, factory: ReplicaFactory, seat: Seat, settings: dict[str, Any]
    ) -> None:
        """A recruit gets ready beside a running group: it sets up in a generation of its own."""
        self._prepare(hook)
        self._join(seat, settings)
        self._build(factory, seat)
        self._backend.leave()

    def _leave(self) -> None:
        self._backend.leave()

    def _run(self, method: str, arguments: dict[str, Any]) -> Any:
        if self._replica is None:
            raise RuntimeError("this worker hosts no replica yet")
        value = self._replica.run(method, **{name: unpacked(value) for name, value in arguments.items()})
        if isinstance(value, memoryview):
            return Blob(value)
        if self._travels and method in ANSWERS_OF_USERS:
            _must_travel(value)
        return value

    def _apply(self, function: Callable[[], Any]) -> Any:
        return function()

    def _state(self) -> Blob:
        assert self._replica is not None
        return Blob(self._replica.state())

    def _load(self, data: Blob) -> None:
        assert self._replica is not None
        self._replica.load(data.data)

    def _close(self) -> None:
        try:
            if self._replica is not None:
                self._replica.close()
        finally:
            self._replica = None
            self._backend.leave()


def portable(error: BaseException) -> BaseException:
    """The error itself if it survives a journey; else one of its type that does; else a RuntimeError that says what it was."""
    for candidate in (error, Remade(error)):
        if _travels(candidate):
            return candidate
    return RuntimeError(f"{type(error).__qualname__}: {error} (the exception itself cannot be pickled)")


class Remade(Exception):
    """Arrives as an exception of the user's own type, made without its `__init__`: many cannot be made from their `args`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self._kind = type(error)
        self._args = error.args if _travels(error.args) else (str(error),)
        self._state = {name: value for name, value in vars(error).items() if _travels(value)}

    def __reduce__(self) -> Any:
        return _remake, (self._kind, self._args, self._state)


def _remake(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def _travels(value: Any) -> bool:
    from ray import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:
        return False
    return True


def _must_travel(value: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the answer cannot be sent to the driver ({error}): return plain values, tensors or arrays, got {value!r:.200}"
        ) from error
