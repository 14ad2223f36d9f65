"""Callbacks and the history of function trainers: the common protocol, and the names in older code."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.callbacks import Callback, CallResult, History, Run
from raysgd.compat.results_preprocessors import IndexedResultsPreprocessor
from raysgd.train import DataParallelTrainer, RunConfig, ScalingConfig, Trainer, TrainingCallback
from raysgd.train import Result as ReadBack
from raysgd.train.callbacks import LoggerCallback, TorchTensorboardProfilerCallback, Trial, make_callback_list
from tests.callbacks.recording import Broken, Heard
from tests.faults import until


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer("none", num_workers=2, logdir=tmp_path_factory.mktemp("logs"), max_retries=1)
    assert repr(made) == "Trainer(BackendConfig, 2 workers, 0 runs, not active)"
    made.start()
    yield made
    made.shutdown()


def epochs(config: dict[str, Any]) -> None:
    for epoch in range(config["epochs"]):
        train.report(epoch=epoch, loss=1 / (1 + epoch), rank=train.world_rank())


def test_the_callback_protocol(trainer: Trainer) -> None:
    heard, before = Heard(), len(trainer.history)
    trainer.run(epochs, {"epochs": 2}, callbacks=[heard, Broken()])
    assert heard.order == ["start", "result", "result", "end"]
    (run,) = heard.named("start")
    assert (run.trainer, run.name, run.num_workers, run.config) == ("Trainer", "epochs", 2, {"epochs": 2})
    assert run.folder == trainer.latest_run_dir
    first, second = heard.named("result")
    assert (first.kind, first.epoch, first.step, first.world_size) == ("report", 0, 1, 2)
    assert [row["rank"] for row in second.by_worker] == [0, 1]
    assert second.metrics == second.by_worker[0]
    assert [(row["epoch"], row["loss"]) for row in trainer.history[before:]] == [(0, 1), (1, 0.5)]
    assert repr(trainer).startswith("Trainer(BackendConfig, 2 workers, 1 run, newest run_001, idle")


class StopAfterTwo(Callback):
    """Stops the run at its second round, when the driver has more."""

    stops_training = True

    def on_start(self, run: Run) -> None:
        self.folder = run.folder

    def on_result(self, result: CallResult) -> None:
        if result.epoch == 1:
            for _ in until((self.folder / "reported").exists):
                time.sleep(0.01)
            raise TimeoutError("enough")


def epochs_and_mark() -> None:
    epochs({"epochs": 4})
    Path(str(train.get_context().get_trial_dir()), "reported").touch()


class CreatesFile(Callback):
    """Creates a file that the function looks for."""

    stops_training = True

    def on_start(self, run: Run) -> None:
        assert run.folder.is_dir()
        (run.folder / "opened").touch()


def test_on_start_is_called_before_the_function_starts(trainer: Trainer) -> None:
    def finds_it() -> bool:
        return Path(str(train.get_context().get_trial_dir()), "opened").exists()

    for _ in range(3):
        assert trainer.run(finds_it, callbacks=[CreatesFile()]) == [True, True]
    heard = Heard()
    with pytest.raises(ValueError, match="takes 2"):
        trainer.run(lambda a, b: None, callbacks=[heard])
    assert heard.order == [], "the run has not started"


def test_reports_are_written_when_a_callback_stops_the_run(ray_cluster: None, tmp_path: Path) -> None:
    heard = Heard()
    run = RunConfig(name="run", storage_path=tmp_path, callbacks=[StopAfterTwo(), heard])
    with pytest.raises(TimeoutError, match="enough") as raised:
        DataParallelTrainer(epochs_and_mark, run_config=run).fit()
    assert heard.order == ["start", "result", "result", "error", "end"]
    assert heard.named("error") == [raised.value] and heard.named("end") == [True]
    assert [row["epoch"] for row in ReadBack.from_path(tmp_path / "run").history] == [0, 1, 2, 3]


class V1:
    """A callback for Ray 1.7, which is not a subclass."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start_training(self, logdir: Path, config: dict[str, Any], **info: Any) -> None:
        self.heard.append((logdir, config, info))

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self.heard.append(results)

    def finish_training(self, error: bool = False) -> None:
        self.heard.append(error)


class V1Subclass(TrainingCallback):
    """It takes no config."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start_training(self, logdir: Path) -> None:  # type: ignore[override]
        self.heard.append((logdir, {"lr": 1}, {}))

    handle_result, finish_training = V1.handle_result, V1.finish_training  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [V1, V1Subclass])
def test_callbacks_of_v1(kind: Any, tmp_path: Path) -> None:
    old, rows = kind(), [{"rank": 0}, {"rank": 1}]
    callbacks = make_callback_list([old])
    callbacks.start(Run(trainer="T", name="f", num_workers=2, config={"lr": 1}, folder=tmp_path))
    callbacks.result(
        CallResult(kind="report", epoch=0, step=1, metrics=rows[0], by_worker=rows, world_size=2, seconds=0.1)
    )
    callbacks.end(failed=False)
    assert old.heard == [(tmp_path, {"lr": 1}, {}), rows, False]


class Processing(TrainingCallback):
    """Overrides what Ray 1.11 to 1.13 call with the rows."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def process_results(self, results: list[dict[str, Any]], **info: Any) -> None:
        self.heard.append(results[1:])


class Preprocessing(V1Subclass):
    """Handles the rows that a preprocessor returns."""

    results_preprocessor = IndexedResultsPreprocessor(1)


@pytest.mark.parametrize("kind", [Processing, Preprocessing])
def test_callbacks_that_preprocess_rows(kind: Any, tmp_path: Path) -> None:
    old, rows = kind(), [{"rank": 0}, {"rank": 1}]
    make_callback_list([old]).result(
        CallResult(kind="report", epoch=0, step=1, metrics=rows[0], by_worker=rows, world_size=2, seconds=0.1)
    )
    assert old.heard == [[{"rank": 1}]]


class Logging(LoggerCallback):
    """The custom callback of Ray's guide."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        assert iteration == result["_training_iteration"] == result["training_iteration"]
        assert trial.last_result == result
        self.results.append(trial.last_result)


class NoSubclass:
    """The same callback without the base class."""

    log_trial_result = Logging.log_trial_result

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []


def test_fit_accepts_the_same_callbacks(ray_cluster: None, tmp_path: Path) -> None:
    logging, other, heard = Logging(), NoSubclass(), Heard()
    made = DataParallelTrainer(
        epochs,
        train_loop_config={"epochs": 2},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[logging, other, heard]),
    )
    assert repr(made) == "DataParallelTrainer(epochs, 2 workers, 0 reports so far)"
    result = made.fit()
    assert [row["epoch"] for row in logging.results] == [row["epoch"] for row in other.results] == [0, 1]
    assert logging.trial is not None
    assert logging.trial.config == {"epochs": 2}
    assert heard.order == ["start", "result", "result", "end"]
    assert heard.named("start")[0].trainer == "DataParallelTrainer"
    assert isinstance(made.history, History)
    assert made.history.column("loss") == [1, 0.5]
    assert [row["loss"] for row in result.history] == [1, 0.5]


class Wanting(Callback):
    def on_result(self, result: CallResult) -> None:
        self.wants_stop = True


def test_a_callback_that_wants_a_function_to_stop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    callbacks, row = make_callback_list([Wanting()]), {"loss": 1}
    for step in (1, 2):
        callbacks.result(
            CallResult(kind="report", epoch=0, step=step, metrics=row, by_worker=[row], world_size=1, seconds=0.1)
        )
    assert ["Wanting wants training to stop, but raysgd cannot" in each for each in caplog.messages] == [True]


def test_a_history_is_not_a_list_of_callbacks() -> None:
    with pytest.raises(ValueError, match="must be a list of"):
        make_callback_list(History())


def profiled() -> None:
    import torch

    profiler = train.torch.TorchWorkerProfiler()
    with torch.profiler.profile(on_trace_ready=profiler.trace_handler):
        torch.ones(3, 3) @ torch.ones(3, 3)
    train.report(rank=train.world_rank(), **profiler.get_and_clear_profile_traces())
    train.report(again=True, **profiler.get_and_clear_profile_traces())


def test_traces_of_the_functions_profiler(trainer: Trainer) -> None:
    heard = Heard()
    callback = TorchTensorboardProfilerCallback(workers_to_log=[1])
    trainer.run(profiled, callbacks=[callback, heard])
    (path,) = (Path(str(trainer.latest_run_dir)) / "pytorch_profiler").iterdir()
    assert path.name.startswith("rank1.")
    assert path.name.endswith(".pt.trace.json")
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names
    rows = [row for each in heard.named("result") for row in each.by_worker] + trainer.history.rows[-2:]
    assert not [name for row in rows for name in row if name.startswith("__")], (
        "only the profiler's callback gets traces"
    )
    for yielded in trainer.run_iterator(profiled):
        assert not [name for row in yielded for name in row if name.startswith("__")]
