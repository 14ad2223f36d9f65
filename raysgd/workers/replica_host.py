"""The inside of a worker, the same in a Ray actor and in this very process: it performs calls and says how they went."""

from __future__ import annotations

import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.errors import described, shown, text_of
from raysgd.hang import collective_name, is_user_frame
from raysgd.outcomes import CollectivePlace, Failed, Interrupted, Ok, Outcome
from raysgd.progress import Control, Progress
from raysgd.protocols import Backend, Call, Replica, ReplicaFactory
from raysgd.rendezvous import RankInfo
from raysgd.workers.blob import Blob, unpickled

__all__ = ["ReplicaHost"]

logger = logging.getLogger(__name__)

# Their values are the user's own: one that cannot be pickled must not look like a worker's death.
ANSWERS_OF_USERS = {"train", "validate", "apply", "apply_operator"}

# Which part of the user's code a verb, or a method of the replica, calls: for messages about it.
CALLED = {
    "prepare": "the initialization hook",
    "build": "the set-up",
    "warm": "the set-up of a new worker",
    "function": "the training function",
    "apply": "the function",
    "apply_operator": "the function",
    "apply_object": "the function",
}
PACKAGE = Path(__file__).resolve().parent.parent


class ReplicaHost:
    """Hosts one replica. Every call ends in an outcome; nothing is raised out of `perform`.

    A rank whose own code raised leaves the generation at once, so that its peers fall out of their collective
    instead of waiting for it.
    """

    def __init__(self, backend: Backend, control: Control, *, travels: bool = True) -> None:
        self._backend = backend
        self._control = control
        self._travels = travels
        self._replica: Replica | None = None
        self._rank: int | None = None
        control.collectives = backend.collectives

    def perform(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        try:
            value = self._method(verb)(**{name: _opened(value) for name, value in arguments.items()})
            if verb == "run":
                value = self._answer(arguments["call"], value)
        except KeyboardInterrupt as error:
            if not self._travels:
                raise  # Ctrl-C: this process is the driver
            return self._fell(error, _called(verb, arguments))
        except BaseException as error:  # also GeneratorExit, CancelledError, ...: the user's code raised it
            return self._fell(error, _called(verb, arguments))
        if isinstance(value, Interrupted):
            return value
        return Ok(value, self._progress, self._backend.collectives() if verb == "run" else -1)

    @property
    def _progress(self) -> Progress:
        return self._replica.progress if self._replica is not None else Progress()

    def _fell(self, error: BaseException, called: str) -> Outcome:
        interrupted = self._is_interruption(error)
        place = _collective_of(error, self._backend.collectives(), tuple(self._control.begun_after))
        self._backend.leave()
        if interrupted:
            try:
                partial = self._replica.partial() if self._replica is not None else None
            except Exception as raised:  # the user's metrics
                return self._failed(raised, called)
            return Interrupted(partial, described(error), self._progress, place=place)
        return self._failed(error, called)

    def _is_interruption(self, error: BaseException) -> bool:
        if self._control.interrupted and isinstance(error, (RuntimeError, OSError)):
            return True
        try:
            return self._backend.is_interruption(error)
        except Exception as raised:  # a backend reads the error's text, and the user's own error may have none
            logger.debug("%s is taken for the user's own: %r", type(error).__name__, type(raised))
            return False

    def _failed(self, error: BaseException, called: str) -> Failed:
        text = _formatted(error)
        if isinstance(error, SystemExit):
            error = exited(error, called, self._rank)
        return Failed(portable(error) if self._travels else error, text, self._progress)

    def _method(self, verb: str) -> Callable[..., Any]:
        """Return what does it; a call of the trainer's goes straight to the replica."""
        if verb != "run":
            method: Callable[..., Any] = getattr(self, f"_{verb}")
            return method
        if self._replica is None:
            raise RuntimeError("this worker hosts no replica yet")
        return self._replica.run

    def _answer(self, call: Call, value: Any) -> Any:
        """Return what the replica answered, in the form in which it travels."""
        if isinstance(value, memoryview):
            return Blob(value)
        if self._travels and call.name in ANSWERS_OF_USERS:
            _must_travel(value)
        return value

    # -- verbs ----------------------------------------------------------------------------------------

    def _prepare(self, hook: Callable[[], Any] | None, rank: int | None = None) -> None:
        self._rank = rank
        if hook is not None:
            hook()

    def _join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        self._backend.leave()  # a recruit may have met a generation that did not come to stand, and nobody has told it
        self._control.clear()
        self._control.set_world_size(rank_info.world_size)
        self._rank = None if rank_info.solo else rank_info.world_rank
        self._backend.join(rank_info, settings)
        if self._replica is not None:
            self._replica.joined(rank_info)

    def _offer(self) -> dict[str, Any]:
        return self._backend.offer()

    def _build(self, factory: ReplicaFactory, rank_info: RankInfo) -> None:
        self._replica = factory(rank_info, self._control)

    def _warm(
        self, hook: Callable[[], Any] | None, factory: ReplicaFactory, rank_info: RankInfo, settings: dict[str, Any]
    ) -> None:
        """A recruit gets ready beside a running group: it sets up in a generation of its own."""
        self._prepare(hook)
        self._join(rank_info, settings)
        self._build(factory, rank_info)
        self._backend.leave()

    def _leave(self) -> None:
        self._backend.leave()

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


def _called(verb: str, arguments: Mapping[str, Any]) -> str:
    return CALLED.get(arguments["call"].name if verb == "run" else verb, "the operator's method")


def _opened(value: Any) -> Any:
    """Return an argument of a verb, or a call with its arguments, as the user gave it."""
    if isinstance(value, Call):
        return replace(value, arguments={name: unpickled(each) for name, each in value.arguments.items()})
    return unpickled(value)


def exited(error: SystemExit, called: str, rank: int | None) -> RuntimeError:
    """Return what the driver raises for `sys.exit()` on a worker: SystemExit itself would end the user's script there."""
    where = "a new worker" if rank is None else f"rank {rank}"
    name, place = _users_frame(error)
    raised = RuntimeError(
        f"{called} {name} called sys.exit({'' if error.code is None else shown(error.code)}) on {where} ({place}). raysgd "
        "takes this for an error and does not retry it: the process serves the trainer, also after this call. To end "
        "training early, return from your function or method; to report a failure, raise an exception; to end the script, "
        "call sys.exit() in the script itself"
    )
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)


def _users_frame(error: BaseException) -> tuple[str, str]:
    """Return the name of the user's function that was called, and the file and line where it was then."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and PACKAGE not in Path(file).parents:
            name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
            return name.rpartition("<locals>.")[2], f"{file}:{line}"
    return "", "its place is unknown"


def _collective_of(error: BaseException, count: int, begun: tuple[tuple[int, int], ...]) -> CollectivePlace:
    """Return which collective call the error came out of, and the line of the user's that called it."""
    frames = [
        f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ][::-1]
    users = [frame for frame in frames if is_user_frame(frame)]
    return CollectivePlace(count, collective_name(frames), users[0] if users else "", begun)


def _formatted(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as raised:  # an exception with attributes that raise
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{described(error)} (formatting it raised {type(raised).__name__})"


def portable(error: BaseException) -> BaseException:
    """Return the error itself if it survives a journey; else one of its type that does; else a RuntimeError about it."""
    makers: list[Callable[[], BaseException]] = [lambda: error, lambda: Remade(error)]
    for make in makers:
        try:
            candidate = make()
        except Exception as raised:
            logger.debug("%s cannot be made again: %r", type(error).__name__, type(raised))
            continue
        if isinstance(_arrived(candidate), BaseException):
            return candidate
    return RuntimeError(f"{type(error).__qualname__}: {text_of(error)} (the exception itself cannot be pickled)")


class Remade(Exception):
    """Arrives as an exception of the user's own type, made without its `__init__`: many cannot be made from their `args`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
        self._kind = type(error)
        self._args = error.args if _travels(error.args) else (text_of(error),)
        self._state = {name: value for name, value in vars(error).items() if _travels(value)}

    def __reduce__(self) -> Any:
        return _remake, (self._kind, self._args, self._state)


def _remake(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    base = next(
        each for each in kind.__mro__ if each.__module__ == "builtins"
    )  # a `__new__` of the user's may want more
    error: BaseException = base.__new__(kind)  # type: ignore[call-overload]
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]  # a frozen dataclass cannot be assigned to
    vars(error).update(state)
    return error


def _arrived(value: Any) -> Any:
    """Return the value after a journey; None if it does not survive that, whatever its own pickling raises."""
    from ray import cloudpickle

    try:
        return pickle.loads(cloudpickle.dumps(value))
    except BaseException as error:
        logger.debug("%s cannot be pickled: %s", type(value).__name__, described(error))
        return None


def _travels(value: Any) -> bool:
    return value is None or _arrived((value,)) is not None


def _must_travel(value: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        names = (
            [shown(name) for name, each in value.items() if not _travels(each)] if isinstance(value, Mapping) else []
        )
        what = f"the answer cannot be sent to the driver: {', '.join(names) or shown(value)} ({described(error)})"
        raise TypeError(f"{what}: return plain values, tensors or arrays") from error
