"""A small operator, and a callback that records its calls."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Recovery, TrainingOperator
from raysgd.callbacks import Callback, CallResult, Run, Underway
from raysgd.callbacks.callback_list import CallbackList
from raysgd.core.measures.progress import Progress


class Line(TrainingOperator):
    """Fits a line, with 4 batches of 8 rows. Raises an error if `info` says so."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, config.get("rows", 32)).reshape(-1, 1)
        model = torch.nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(x, 2 * x + 5), batch_size=8)
        self.register_data(train_loader=loader, validation_loader=loader)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("fail"):
            raise ZeroDivisionError("planned")
        return super().train_batch(batch, batch_info)


class Heard(Callback):
    """Records every call as (name, argument)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run: Run) -> None:
        self.calls.append(("start", run))

    def on_progress(self, now: Underway) -> None:
        self.calls.append(("progress", now))

    def on_result(self, result: CallResult) -> None:
        self.calls.append(("result", result))

    def on_recovery(self, recovery: Recovery) -> None:
        self.calls.append(("recovery", recovery))

    def on_error(self, error: BaseException) -> None:
        self.calls.append(("error", error))

    def on_end(self, failed: bool) -> None:
        self.calls.append(("end", failed))

    def named(self, name: str) -> list[Any]:
        return [given for call, given in self.calls if call == name]

    @property
    def order(self) -> list[str]:
        """Return the names of the calls, without progress."""
        return [call for call, _ in self.calls if call != "progress"]


class Broken(Callback):
    """Raises an error in every call."""

    def _raise(self, given: Any) -> None:
        raise LookupError("broken on purpose")

    on_start = on_progress = on_result = on_recovery = on_error = on_end = _raise


class Demanding(Broken):
    stops_training = True


def result(**more: Any) -> CallResult:
    """Return a result of a TorchTrainer with two workers, after one epoch."""
    plain: dict[str, Any] = {
        "kind": "train",
        "epoch": 1,
        "step": 4,
        "metrics": {"epoch": 1, "train_loss": 0.5},
        "by_worker": [],
        "world_size": 2,
        "seconds": 1.5,
    }
    return CallResult(**{**plain, **more})


def called_by_a_trainer(*callbacks: Callback) -> CallbackList:
    """Return what calls these callbacks in a trainer."""
    return CallbackList(list(callbacks))


def underway(worker: str = "", metrics: Any = None, **progress: Any) -> Underway:
    """Return what callbacks hear while a call of train() runs; `progress` are the worker's counters."""
    return Underway(kind="train", worker=worker, progress=Progress(**progress), metrics=metrics or {})


def run_points(callback: Any, folder: Path) -> None:
    """Let a callback hear of a call of train() and one of validate(), each of which reports four times."""
    callback.on_start(Run(trainer="TorchTrainer", name="Line", num_workers=3, folder=folder))
    for kind in ("train", "validate"):
        callback.on_progress(Underway(kind=kind, worker="", progress=Progress(phase=kind)))
        for batches, loss in ((1, 4.0), (2, 0.5), (3, 2.0), (5, 0.25)):
            metrics = {"loss": 9.0, "last_loss": loss, "num_samples": 8}
            progress = Progress(step=10 + batches, epoch=1, batches=batches)
            callback.on_progress(Underway(kind=kind, worker="a", progress=progress, metrics=metrics, world_size=3))
    callback.on_end(False)
