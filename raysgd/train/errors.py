"""What can go wrong with functions on workers, as types; all are `RaysgdError`.

OutsideRunError (ValueError)              a session function was called where no training function runs
ReportMismatchError (RuntimeError)        ranks do not report the same things in the same order
InactiveWorkerGroupError (NotActiveError) the workers were not started, or were shut down
TrainingRunningError (TrainBackendError)  a call while a training function is running on the same workers
TrainBackendError (RuntimeError)          calls in an order that makes no sense (results before a start)
TrainingWorkerError (TrainingFailedError) more workers were lost than max_retries allows
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
    """There is no training function running in this process."""


class ReportMismatchError(RaysgdError, RuntimeError):
    """Every rank must report the same kinds of things, equally often."""


class InactiveWorkerGroupError(NotActiveError):
    """There are no workers: call start() first, or make a new one after shutdown()."""


class TrainBackendError(RaysgdError, RuntimeError):
    """Calls came in an order that makes no sense."""


class TrainingRunningError(TrainBackendError, TrainerBusyError):
    """A training function is running on these workers; the message says which one, since when, and what to do."""


class TrainingWorkerError(TrainingFailedError):
    """More workers were lost than the run is allowed to lose."""


SGDBackendError = TrainBackendError
