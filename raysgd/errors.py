"""What can go wrong, as types.

    RaysgdError
      ConfigError (ValueError)            an argument: what was passed, what is legal, what to do
      NotActiveError (RuntimeError)       a call on a trainer that was shut down
      ResourceError (TimeoutError)        the cluster cannot hold what was asked for
      ClusterError (ConnectionError)      Ray itself does not answer any more
      CheckpointError (RuntimeError)      a file or state that cannot be loaded, and why
      TrainingFailedError (RuntimeError)  losses went past the bound, or there is nobody left to go on
      HangError (RuntimeError)            nothing moved for longer than the limit, and nobody could be blamed
      WorkerStartError (RuntimeError)     a worker process died or stalled before it was ready

A user's own exception is never wrapped: it is raised with its own type, and carries the rank and the
remote traceback as a note and as its cause (`RemoteTraceback`).
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "HangError",
    "NotActiveError",
    "RaysgdError",
    "RemoteTraceback",
    "ResourceError",
    "TrainingFailedError",
    "WorkerStartError",
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


class TrainingFailedError(RaysgdError, RuntimeError):
    """More was lost than the call was allowed to lose; the message tells the story."""


class HangError(TrainingFailedError):
    """Nothing moved for longer than the limit."""


class WorkerStartError(RaysgdError, RuntimeError):
    """A worker process died or stalled before it was ready."""


class RemoteTraceback(Exception):
    """Carries a worker's traceback text to the driver, as the cause of the user's exception."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"
