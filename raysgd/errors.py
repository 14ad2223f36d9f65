"""The exceptions that raysgd raises, and text for messages. Both.

    RaysgdError
      ConfigError (ValueError)            a wrong argument: what was passed, what is allowed, what to do
        MissingPartError (RuntimeError)   an operator needs a part that `setup` did not register or set
      NotActiveError (RuntimeError)       a call on a trainer that was shut down
        SupersededError                   another script has taken over this trainer's workers
      ResourceError (TimeoutError)        the cluster has no room for the workers
      ClusterError (ConnectionError)      Ray no longer answers
      CheckpointError (RuntimeError)      a file or state that cannot be loaded, and why
      TrainerBusyError (RuntimeError)     a call while another thread's call is running
      TrainingFailedError (RuntimeError)  more workers failed than the call allows, or none is left
        HangError                         code hung twice in a row at the same place of a call
        OutOfStepError                    ranks made different collective calls
        DivergenceError                   the ranks' weights differ: parameter, ranks and size
      NonFiniteError (FloatingPointError) gradients that are not finite: parameter, step, rank and samples
      WorkerStartError (RuntimeError)     a worker process ended or stalled before it was ready

An exception that the user's code raises is never wrapped: it keeps its type, and has the rank as a
note and the remote traceback as its cause (`RemoteTraceback`).
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


class RaysgdError(Exception):
    """The base class of all exceptions of raysgd."""


class ConfigError(RaysgdError, ValueError):
    """An argument is wrong. The message says what was passed, what is allowed and what to do."""


class MissingPartError(ConfigError, RuntimeError):
    """An operator lacks a part that its `setup` should register. (RaySGD: a RuntimeError.)"""


class NotActiveError(RaysgdError, RuntimeError):
    """The trainer was shut down, or its workers ended and cannot be replaced."""


class SupersededError(NotActiveError):
    """Raised by all calls of a trainer with a name once another script has taken over its
    workers."""


class ResourceError(RaysgdError, TimeoutError):
    """The cluster did not have room for the workers within the limit."""


class ClusterError(RaysgdError, ConnectionError):
    """Ray's control service (GCS) did not answer within the limit."""


class CheckpointError(RaysgdError, RuntimeError):
    """A checkpoint is damaged, was not written by raysgd, or does not fit the trainer. Nothing was
    changed, unless the message says so."""


class TrainerBusyError(RaysgdError, RuntimeError):
    """A second thread called the trainer while a call was running. The message names both calls."""


class TrainingFailedError(RaysgdError, RuntimeError):
    """More workers failed than the call allows, or none is left."""


class HangError(TrainingFailedError):
    """Code hung twice in a row at the same place of a call, each time for longer than the limit."""


class OutOfStepError(TrainingFailedError):
    """Some ranks made a collective call that others did not. The call is never retried."""


class DivergenceError(TrainingFailedError):
    """The ranks do not train the same model. The trainer can be used again."""


class NonFiniteError(RaysgdError, FloatingPointError):
    """Gradients are not finite, or too many steps were left out. No rank has made the step."""


class WorkerStartError(RaysgdError, RuntimeError):
    """A worker process ended or stalled before it was ready."""


def shown(value: Any, most: int = 200) -> str:
    """Show the value's `repr`, shortened. Never raise, even if `__repr__` does."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "batch", "batches"), counted(2000, "worker")
    ('1 batch', '2,000 workers')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def ranked(ranks: Iterable[int]) -> str:
    """Ranks with their noun.

    >>> ranked([1]), ranked([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    names = [str(rank) for rank in ranks]
    return f"rank{'' if len(names) == 1 else 's'} {', '.join(names)}"


def text_of(value: Any) -> str:
    """Call `str(value)`. Never raise, even if the value's `__str__` does."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} whose str raises {type(error).__name__}>"


def described(error: BaseException) -> str:
    """An exception's type and text, for a message."""
    return f"{type(error).__name__}: {text_of(error)}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, what caused it or was handled when it was raised, and so on: 10 at most."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


class RemoteTraceback(Exception):
    """Carries a worker's traceback to the driver, as the cause of the user's exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# Names of other libraries' arguments, and the words that people try first, with our name.
ELSEWHERE = {
    "folder": ("dir", "dirpath", "directory", "path"),
    "path": ("dir", "dirpath", "directory", "folder"),
    "keep": ("save_total_limit", "save_top_k"),
    "best": ("monitor",),
    "accumulate": ("accumulate_grad_batches", "grad_accumulation", "gradient_accumulation_steps"),
    "clip_norm": (
        "clip_grad",
        "clip_grad_norm",
        "grad_clip",
        "gradient_clip_val",
        "gradient_clipping",
        "max_grad_norm",
    ),
    "precision": ("amp", "dtype", "mixed_precision"),
    "parallel": ("strategy",),
    "max_attempts": ("max_failures", "max_restarts"),
    "storage_path": ("local_dir",),
    "world_rank": ("rank", "global_rank"),
    "get_model": ("model", "module"),
    "get_local_operator": ("operator",),
}
# What to do in place of using attributes of other libraries' operators and trainers.
LOADER = "keep the loader in an attribute of your own, beside register_data()"
INSTEAD = {"log": "return metrics from train_batch", "_train_loader": LOADER, "_validation_loader": LOADER}


def close_to(name: str, known: Iterable[str]) -> str:
    """Find the name among these that was most likely meant, "" if none is similar."""
    names = list(known)
    same = [ours for ours, theirs in ELSEWHERE.items() if name in theirs and ours in names]
    return next(iter(same or difflib.get_close_matches(name, names, n=1, cutoff=0.65)), "")


def explain_missing(error: BaseException) -> None:
    """Say in the error of an attribute that an object of raysgd's does not have which one was
    meant."""
    if not isinstance(error, AttributeError) or hasattr(type(error.obj), name := str(error.name)):
        return
    if any(each.__module__.startswith("raysgd.") for each in type(error.obj).__mro__):
        meant = close_to(name, (each for each in dir(error.obj) if not each.startswith("_")))
        if hint := INSTEAD.get(name, meant and f"did you mean {meant!r}?"):
            error.args = (f"{error}: {hint}",)


def suggesting(function: F) -> F:
    """Let a function say which arguments it takes, and which was meant, when they do not fit."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_arguments(function, *args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


def check_arguments(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Raise a TypeError that names the function's arguments if these do not fit."""
    signature = _signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(_explained(function, signature, kwargs, error)) from None


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def suggesting_fields(kind: C, *, instead: Mapping[str, str] | None = None) -> C:
    """Let a class do the same for its `__init__`, such as a dataclass for its fields. `instead`
    says what to do about names of other libraries that the class does not have."""
    original = cast(Any, kind).__init__
    if instead:
        original.instead = instead
    setattr(kind, "__init__", suggesting(original))  # noqa: B010  # mypy allows no assignment
    return kind


def _explained(function: Any, signature: inspect.Signature, names: Iterable[str], error: TypeError) -> str:
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    kinds = {each.name: each.kind for each in signature.parameters.values() if each.name != "self"}
    known = [each for each, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD]
    by_keyword = [each for each, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    for wrong in names:
        if wrong not in known:
            meant = close_to(wrong, known)
            hint = f"did you mean {meant!r}?" if meant else f"its arguments are {', '.join(known)}"
            return f"{name} takes no argument {wrong!r}: {getattr(function, 'instead', {}).get(wrong, hint)}"
    if by_keyword and "too many positional" in str(error):
        places = ", ".join(each for each in known if each not in by_keyword)
        by_place = (
            f"only {places} as positional arguments: pass the others"
            if places
            else "no positional arguments: pass them"
        )
        return f"{name} takes {by_place} by keyword, {name}({by_keyword[0]}=...). They are {', '.join(by_keyword)}"
    return f"{name}: {error}; its arguments are {', '.join(known)}"
