"""Host a replica in a worker: perform calls on it, and return their outcomes. Worker.

The worker can be a Ray actor or the driver's own process.
"""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.core.channel.blobs import Blob, Blobs
from raysgd.core.control import Control
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import GPU, Failed, GpuFault, Interrupted, Ok, Outcome, WorkerFailed
from raysgd.core.protocols import Call, ProcessGroupBackend, Replica, ReplicaFactory
from raysgd.core.ranks import RankInfo
from raysgd.environment import is_installed
from raysgd.errors import described, explain_missing, shown, text_of
from raysgd.workers.calls import PickledObject, unpickle
from raysgd.workers.cluster.foreign import is_exit_of_actor
from raysgd.workers.gpu_faults import is_out_of_memory, wait_for_memory
from raysgd.workers.serialization import dumps

logger = logging.getLogger(__name__)

# The part of the user's code that a verb, or a method of the replica, calls, for messages.
CALLED = {
    "prepare": "the initialization hook",
    "build": "the set-up",
    "warm": "the set-up of a new worker",
    "function": "the training function",
    "apply": "the function",
    "apply_operator": "the function",
    "apply_object": "the function",
}
# The verbs that run the user's set-up.
SET_UP = ("prepare", "build", "warm", "attach")
# In these, the user's code makes no collective call: a failure of another rank cannot cause its errors.
OUTSIDE_THE_GROUP = ("state", "load")
SET_UPS = 3  # of a replacement, on a GPU whose memory a process that has failed still holds
PACKAGE = Path(__file__).resolve().parent.parent


class ReplicaHost:
    """Owns one replica. `perform` returns an outcome for every call; it raises nothing but
    `ray.actor.exit_actor()`'s request to end the process.

    A rank whose own code raised an error leaves the generation at once, so that the collective
    calls of its peers fail instead of waiting for it. `remote` is False if outcomes do not leave
    this process. `find_fault` finds the fault of a GPU in an error, where the process can end for
    it.
    """

    def __init__(self, backend: ProcessGroupBackend, control: Control, *, remote: bool = True) -> None:
        self._backend = backend
        self._control = control
        self._remote = remote
        self.find_fault: Callable[[BaseException], GpuFault | None] = lambda error: None
        self._replica: Replica | None = None
        self._rank: int | None = None
        self._lacks_state = self._cut_short = False  # see `Progress`
        self._arguments: dict[str, Any] = {}  # what the verb "run" gets if it comes next, and without arguments
        control.collectives, control.ensure_whole = backend.collectives, backend.ensure_whole
        control.is_interruption, control.dumps = backend.is_interruption, dumps

    def perform(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        defaults, self._arguments = self._arguments, {}
        if verb == "run":
            arguments = arguments or defaults
        call = arguments["call"] if verb == "run" else None
        try:
            value = self._method(verb)(**{name: _opened(value) for name, value in arguments.items()})
            if verb == "run":
                value = self._sendable(value)
                self._backend.ensure_whole()  # the value may have been computed from what a peer has sent
        except BaseException as error:  # the user's code may also raise GeneratorExit, CancelledError, ...
            if is_exit_of_actor(error):
                raise  # Ray ends this process, which is a worker failure
            if isinstance(error, KeyboardInterrupt) and not self._remote:
                raise  # Ctrl-C: this process is the driver
            return self._outcome_of(error, verb, _called(verb, arguments), call)
        if isinstance(value, Interrupted):
            return value
        return Ok(value, self._progress, self._control.calls() if verb == "run" else -1)

    @property
    def holds_state(self) -> bool:
        """Whether the replica has the training's state, and not its own initial one."""
        return self._replica is not None and not self._lacks_state

    @property
    def _progress(self) -> Progress:
        progress = self._replica.progress if self._replica is not None else Progress()
        if self._lacks_state or self._cut_short:
            return replace(progress, lacks_state=self._lacks_state, cut_short=self._cut_short)
        return progress

    def _outcome_of(self, error: BaseException, verb: str, called: str, call: Call | None) -> Outcome:
        if (broken := self._broken(error, verb)) is not None:
            return broken  # without leaving the group, which could wait for the GPU
        interrupted = self._is_interruption(error, verb)
        calls = self._control.calls_at(_frames(error))
        self._backend.leave()
        if interrupted:
            self._cut_short = call is not None and call.change > 0
            try:
                partial = self._replica.partial() if self._replica is not None else None
            except Exception as raised:  # the user's metrics, or the GPU on which they are
                return self._broken(raised, verb) or self._failed(raised, called)
            return Interrupted(partial, described(error), self._progress, collectives=calls)
        return self._failed(error, called)

    def _broken(self, error: BaseException, verb: str) -> WorkerFailed | None:
        """The outcome of a worker whose GPU is broken, or None. In the set-up, an error that a
        kernel may have caused is the user's."""
        fault = self.find_fault(error)
        if fault is None or (fault.by_kernel and verb in SET_UP):
            return None
        return WorkerFailed(described(error).splitlines()[0], GPU, progress=self._progress, fault=fault)

    def _is_interruption(self, error: BaseException, verb: str) -> bool:
        if self._control.interrupted and isinstance(error, Exception) and verb not in OUTSIDE_THE_GROUP:
            # A mistake in the user's code comes again when the batch is repeated.
            logger.info("an error while a failure of another rank is handled counts as a part of it", exc_info=error)
            return True
        try:
            return self._backend.is_interruption(error)
        except Exception as raised:  # backends read the error's text, and `str()` of a user's error can raise
            logger.debug("%s counts as an error of user code: %r", type(error).__name__, type(raised))
            return False

    def _failed(self, error: BaseException, called: str) -> Failed:
        explain_missing(error)  # an operator's __getattr__ would slow each access of an attribute
        text = _formatted(error)
        if isinstance(error, SystemExit):
            error = exited(error, called, self._rank)
        return Failed(picklable(error) if self._remote else error, text, self._progress)

    def _method(self, verb: str) -> Callable[..., Any]:
        """Find the method for a verb. The trainer's calls go straight to the replica."""
        if verb != "run":
            method: Callable[..., Any] = getattr(self, f"_{verb}")
            return method
        if self._replica is None:
            raise RuntimeError("this worker hosts no replica yet")
        self._lacks_state = self._cut_short = False  # all ranks begin with the same
        return self._replica.run

    def _sendable(self, value: Any) -> Any:
        """What the replica returned, in the form in which it is sent to the driver. It is pickled
        here, because a value that Ray could not pickle would look like a worker failure."""
        if isinstance(value, memoryview):
            return Blob(value)
        if isinstance(value, Blobs):  # of live weights
            return value if self._remote else value.copy()
        if not self._remote:
            return value
        return replace(value, value=_pickled(value.value)) if isinstance(value, Interrupted) else _pickled(value)

    # -- verbs ----------------------------------------------------------------------------------------

    def _keep(self, **arguments: Any) -> None:
        """Keep the arguments of the next call."""
        self._arguments = arguments

    def _prepare(self, hook: Callable[[], Any] | None, rank: int | None = None) -> None:
        self._rank = rank
        if hook is not None:
            hook()
            if self._remote:
                gc.freeze()  # collections, which some trainers make, need not look at all that it has imported

    def _join(
        self, rank_info: RankInfo, settings: dict[str, Any], giver: int | None = None, takes: bool = False
    ) -> None:
        """Join a generation. Ranks that are behind take the state of the rank `giver`."""
        self._backend.leave()  # a replacement worker does not know if the group that it joined was never formed
        self._control.clear()
        self._rank = None if rank_info.solo else rank_info.world_rank
        self._control.joined_after = 0
        self._backend.join(rank_info, settings)
        if giver is not None and self._replica is not None:
            self._replica.share_state(giver, takes=takes, is_new=self._lacks_state)
            self._lacks_state, self._cut_short = self._lacks_state and not takes, self._cut_short and not takes
        self._joined(rank_info)

    def _joined(self, rank_info: RankInfo) -> None:
        self._control.set_rank(rank_info.world_rank, rank_info.world_size)
        if self._replica is not None:
            self._replica.joined(rank_info)
            self._backend.ensure_whole()
            self._control.joined_after = max(self._backend.collectives(), 0)
        self._lacks_state = self._cut_short = False  # because the ranks have agreed on one before

    def _offer(self) -> dict[str, Any]:
        return self._backend.offer()

    def _build(self, factory: ReplicaFactory, rank_info: RankInfo) -> None:
        replica = factory(rank_info, self._control)
        self._backend.ensure_whole()  # of models, rank 0 sends its own
        self._replica, self._lacks_state = replica, True

    def _warm(
        self, hook: Callable[[], Any] | None, factory: ReplicaFactory, rank_info: RankInfo, settings: dict[str, Any]
    ) -> None:
        """Set up a replacement worker alongside a running group, in a generation of its own."""
        self._prepare(hook)
        for tries_left in reversed(range(SET_UPS)):
            try:
                self._join(rank_info, settings)
                self._build(factory, rank_info)
                break
            except Exception as error:
                if not (tries_left and is_out_of_memory(error)):
                    raise
                traceback.clear_frames(error.__traceback__)  # which hold what was built so far
                if not wait_for_memory():
                    raise
                logger.warning("trying the set-up again, because a process that failed has given back the GPU's memory")
        self._backend.leave()

    def _leave(self) -> None:
        self._backend.leave()

    def _state(self, transfer: str) -> Interrupted | None:
        """Give the state to those that take it."""
        assert self._replica is not None
        data = self._replica.state()
        return self.try_move(lambda: self._control.giving(transfer).send(data))

    def _load(self, transfer: str) -> Interrupted | None:
        assert self._replica is not None
        states = []
        if (ended := self.try_move(lambda: states.append(self._control.take(transfer)))) is not None:
            return ended  # then it has what it had before
        self._replica.load(states[0])
        self._lacks_state = self._cut_short = False
        return None

    def try_move(self, move: Callable[[], Any]) -> Interrupted | None:
        """Move a state, or what a call needs. If the transfer ends early, another worker has
        failed, not this one."""
        try:
            move()
        except OSError as error:
            return Interrupted(None, described(error), self._progress)
        return None

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
    """An argument of a verb as it was passed, with the arguments of a call unpickled."""
    if isinstance(value, Call):
        return replace(value, arguments={name: unpickle(each) for name, each in value.arguments.items()})
    return unpickle(value)


def exited(error: SystemExit, called: str, rank: int | None) -> RuntimeError:
    """The error for `sys.exit()` on a worker: SystemExit would end the user's script."""
    where = "a new worker" if rank is None else f"rank {rank}"
    name, place = _users_frame(error)
    raised = RuntimeError(
        f"{called} {name} called sys.exit({'' if error.code is None else shown(error.code)}) on {where} ({place}). raysgd "
        "treats this as an error and does not retry it, because the trainer still needs the process after this call. To "
        "end training early, return from your function or method; to report a failure, raise an exception; to end the "
        "script, call sys.exit() in the script itself"
    )
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)


def _users_frame(error: BaseException) -> tuple[str, str]:
    """Find the name of the user's function that was called, and the file and line at which it was.
    An installed library, such as torch's DataLoader, may have called it."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and PACKAGE not in Path(file).parents:
            name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
            frames.append((is_installed(file), name.rpartition("<locals>.")[2], f"{file}:{line}"))
    return min(frames, key=lambda each: each[0], default=(False, "", "at an unknown line"))[1:]


def _frames(error: BaseException) -> list[str]:
    """The frames that the error passed, innermost first."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [f"{code.co_filename}:{line} {code.co_name}" for code, line in reversed(frames)]


def _formatted(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as raised:  # an exception whose attributes raise errors
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{described(error)} (formatting it raised {type(raised).__name__})"


def picklable(error: BaseException) -> BaseException:
    """The error, one of its type that can be pickled, or a RuntimeError."""
    makers: list[Callable[[], BaseException]] = [lambda: error, lambda: PicklableError(error)]
    for make in makers:
        try:
            candidate = make()
        except Exception as raised:
            logger.debug("%s cannot be copied: %r", type(error).__name__, type(raised))
            continue
        if isinstance(_pickled_and_back(candidate), BaseException):
            return candidate
    return RuntimeError(f"{type(error).__qualname__}: {text_of(error)} (the exception itself cannot be pickled)")


class PicklableError(Exception):
    """Carries an exception of user code, and is unpickled as an exception of its type, which is
    created without `__init__`, because many exceptions cannot be created from their `args`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
        self._kind = type(error)
        self._args = error.args if _is_picklable(error.args) else (text_of(error),)
        self._state = {name: value for name, value in vars(error).items() if _is_picklable(value)}

    def __reduce__(self) -> Any:
        return _recreate, (self._kind, self._args, self._state)


def _recreate(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    base = next(
        each for each in kind.__mro__ if each.__module__ == "builtins"
    )  # the user's `__new__` may need arguments
    error: BaseException = base.__new__(kind)  # type: ignore[call-overload]
    BaseException.args.__set__(error, args)  # type: ignore[attr-defined]  # a frozen dataclass cannot be assigned to
    vars(error).update(state)
    return error


def _pickled_and_back(value: Any) -> Any:
    """Make a pickled copy of the value, or None: a user's class may raise anything here."""
    from ray import cloudpickle

    try:
        return pickle.loads(cloudpickle.dumps(value))
    except BaseException as error:
        logger.debug("%s cannot be pickled: %s", type(value).__name__, described(error))
        return None


def _is_picklable(value: Any) -> bool:
    return value is None or _pickled_and_back((value,)) is not None


def _pickled(value: Any) -> PickledObject:
    from ray import cloudpickle

    try:
        return PickledObject(cloudpickle.dumps(value))
    except Exception as error:
        items = value.items() if isinstance(value, Mapping) else ()
        names = ", ".join(shown(name) for name, each in items if not _is_picklable(each))
        what = f"the answer cannot be sent to the driver: {names or shown(value)} ({described(error)})"
        raise TypeError(f"{what}: return plain values, tensors or arrays") from error
