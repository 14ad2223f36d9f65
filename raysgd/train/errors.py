"""The errors of training functions. All are subclasses of `RaysgdError`. Both."""

from __future__ import annotations

from raysgd.errors import NotActiveError, RaysgdError, TrainerBusyError, TrainingFailedError


class OutsideRunError(RaysgdError, ValueError):
    """A function such as train.elastic() was called outside a training function."""


class ReportMismatchError(RaysgdError, RuntimeError):
    """The ranks did not make the same calls in the same order, or some have returned without
    one."""


class InactiveWorkerGroupError(NotActiveError):
    """The workers were not started, or were shut down: call start(), or create a new object."""


class TrainBackendError(RaysgdError, RuntimeError):
    """Calls came in an invalid order, such as results before a start."""


class TrainingRunningError(TrainBackendError, TrainerBusyError):
    """A training function is running on these workers: which one, since when, what to do."""


class TrainingWorkerError(TrainingFailedError):
    """More workers failed than max_retries allows."""


SGDBackendError = TrainBackendError
