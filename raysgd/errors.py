"""What can go wrong, as types.

    RaysgdError
      ConfigError (ValueError)            an argument: what was passed, what is legal, what to do
      NotActiveError (RuntimeError)       a call on a trainer that was shut down
      ResourceError (TimeoutError)        the cluster cannot hold what was asked for
      ClusterError (ConnectionError)      Ray itself does not answer any more
      CheckpointError (RuntimeError)      a file or state that cannot be loaded, and why
      TrainerBusyError (RuntimeError)     a call in one thread while a call in another one is running
      TrainingFailedError (RuntimeError)  losses went past the bound, or there is nobody left to go on
      OutOfStepError (TrainingFailedError) ranks made different collective calls
      HangError (RuntimeError)            nothing moved for longer than the limit, and nobody could be blamed
      WorkerStartError (RuntimeError)     a worker process died or stalled before it was ready

A user's own exception is never wrapped: it is raised with its own type, and carries the rank and the
remote traceback as a note and as its cause (`RemoteTraceback`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "HangError",
    "NotActiveError",
    "OutOfStepError",
    "RaysgdError",
    "RemoteTraceback",
    "ResourceError",
    "TrainerBusyError",
    "TrainingFailedError",
    "WorkerStartError",
    "causes_of",
    "described",
    "shown",
    "text_of",
]


class RaysgdError(Exception):
    """The root of the tree: catches everything raysgd itself raises."""


class ConfigError(RaysgdError, ValueError):
    """An argument is wrong; the message names it, what is legal and what to do."""


class NotActiveError(RaysgdError, RuntimeError):
    """The trainer was shut down, or its workers are gone for good."""


class ResourceError(RaysgdError, TimeoutError):
    """The cluster did not offer what was asked for within the limit."""


class ClusterError(RaysgdError, ConnectionError):
    """Ray's control service (GCS) did not answer within the limit."""


class CheckpointError(RaysgdError, RuntimeError):
    """A checkpoint is damaged, foreign or does not fit; nothing was changed."""


class TrainerBusyError(RaysgdError, RuntimeError):
    """A second thread called the trainer while a call was running; the message names both."""


class TrainingFailedError(RaysgdError, RuntimeError):
    """More was lost than the call was allowed to lose; the message tells the story."""


class HangError(TrainingFailedError):
    """Nothing moved for longer than the limit."""


class OutOfStepError(TrainingFailedError):
    """Some ranks made a collective call that others did not make; the message names them. It is never retried."""


class WorkerStartError(RaysgdError, RuntimeError):
    """A worker process died or stalled before it was ready."""


def shown(value: Any, most: int = 200) -> str:
    """Return the value's `repr`, shortened, for a message; it never raises, whatever the value's own `__repr__` does."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def text_of(value: Any) -> str:
    """Return `str(value)`; it never raises, whatever the value's own `__str__` does."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} whose str raises {type(error).__name__}>"


def described(error: BaseException) -> str:
    """Return an exception's type and text, for a message."""
    return f"{type(error).__name__}: {text_of(error)}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the error that caused it or that was being handled when it was raised, and so on: 10 at most."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


class RemoteTraceback(Exception):
    """Carries a worker's traceback text to the driver, as the cause of the user's exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
