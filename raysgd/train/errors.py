"""The errors of training functions. All are subclasses of `RaysgdError`. Both.

OutsideRunError (ValueError)              a function such as train.report() was called outside a training function
ReportMismatchError (RuntimeError)        the ranks did not make the same calls in the same order
InactiveWorkerGroupError (NotActiveError) the workers were not started, or were shut down
TrainBackendError (RuntimeError)          calls came in an invalid order, such as results before a start
TrainingRunningError (TrainBackendError)  a call while a training function is running on the same workers
TrainingWorkerError (TrainingFailedError) more workers failed than max_retries allows
"""

from __future__ import annotations

from raysgd.errors import NotActiveError, RaysgdError, TrainerBusyError, TrainingFailedError

__all__ = [
    "InactiveWorkerGroupError",
    "OutsideRunError",
    "ReportMismatchError",
    "SGDBackendError",
    "TrainBackendError",
    "TrainingRunningError",
    "TrainingWorkerError",
]


class OutsideRunError(RaysgdError, ValueError):
    """No training function is running in this process."""


class ReportMismatchError(RaysgdError, RuntimeError):
    """The ranks did not make the same calls, or not equally often."""


class InactiveWorkerGroupError(NotActiveError):
    """There are no workers: call start() first, or create a new object after shutdown()."""


class TrainBackendError(RaysgdError, RuntimeError):
    """Calls came in an invalid order."""


class TrainingRunningError(TrainBackendError, TrainerBusyError):
    """A training function is running on these workers; the message says which one and since when, and what to do."""


class TrainingWorkerError(TrainingFailedError):
    """More workers failed than max_retries allows."""


SGDBackendError = TrainBackendError
