"""TensorBoard, MLflow and W&B: results, recoveries and planned changes, as the readers of these programs return them."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, Recovery
from raysgd.callbacks import Callback, MLflowCallback, Run, TensorBoardCallback, WandbCallback
from raysgd.train.callbacks import make_callback_list
from tests.callbacks.recording import result, run_points
from tests.callbacks.test_writers import report, run_callback, trained
from tests.local.ground import Fault, LocalGround
from tests.local.group import Cluster


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the events as TensorBoard reads them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("kind", [TensorBoardCallback, MLflowCallback])
def test_points_within_a_call(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard" if kind is TensorBoardCallback else "mlflow")
    callback = kind(log_every=2)
    run_points(callback, tmp_path)
    if kind is TensorBoardCallback:
        assert curves(tmp_path)["batch/loss"] == [(12, 0.5), (15, 0.25)]
        return
    from mlflow.tracking import MlflowClient

    points = MlflowClient(callback.tracking_uri).get_metric_history(callback.run_id, "batch_loss")
    assert [(point.step, point.value) for point in points] == [(12, 0.5), (15, 0.25)]


def test_results_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    returned = trained(TensorBoardCallback(), folder=tmp_path)
    found = curves(tmp_path)
    assert [step for step, _ in found["train/train_loss"]] == [4, 8]
    assert [value for _, value in found["train/train_loss"]] == pytest.approx(
        [returned[0]["train_loss"], returned[2]["train_loss"]]
    )
    assert found["validate/val_loss"] == [(4, pytest.approx(returned[1]["val_loss"]))]
    assert found["train/world_size"] == [(4, 1.0), (8, 1.0)]


def test_tensorboard_of_one_worker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_callback(
        TensorBoardCallback(tmp_path / "own", worker_to_log=1), tmp_path, report(1, loss=2.0), report(2, a={"b": 3})
    )
    assert curves(tmp_path / "own") == {"rank": [(1, 1.0), (2, 1.0)], "loss": [(1, 2.0)], "a/b": [(2, 3.0)]}


def test_results_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "beside.txt").write_text("kept")
    callback = MLflowCallback(experiment_name="lines", tags={"who": "test"}, save_artifact=True)
    returned = trained(callback, folder=tmp_path)
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("lines")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rows": "32", "nested/lr": "0.1"}
    assert run.data.tags["who"] == "test"
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(point.step, point.value) for point in history] == [
        (4, returned[0]["train_loss"]),
        (8, returned[2]["train_loss"]),
    ]
    assert "beside.txt" in [file.path for file in client.list_artifacts(run.info.run_id)]

    run_callback(MLflowCallback(experiment_name="lines", worker_to_log=1), tmp_path, report(1, loss=2.0))
    newest = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])[0]
    assert (newest.data.metrics["loss"], newest.data.metrics["rank"]) == (2.0, 1.0), "a second run, of rank 1"


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a W&B file, which has LevelDB's log format: blocks of 32 KiB after a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    assert not data or data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):  # it is still being written
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a record in one piece, or the last piece of one
            yield whole
            whole = b""


def complete_run(path: Path, make_record: Callable[[], Any]) -> list[Any]:
    """Return the records of a W&B file. W&B's own process writes the last ones soon after `finish()` has returned."""
    deadline = time.monotonic() + 60
    while True:
        found = []
        for data in records(path):
            found.append(make_record())
            found[-1].ParseFromString(data)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        assert time.monotonic() < deadline, (
            f"the run has no end: {[record.WhichOneof('record_type') for record in found]}"
        )
        time.sleep(0.05)


def offline_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[Any]]:
    """Return the rows of the W&B run in a folder, its config, and [project, name, exit code]."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    facts: list[Any] = []
    for record in complete_run(path, Record):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif kind == "run":
            facts += [record.run.project, record.run.display_name]
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":  # set while the run's own record was being written
            config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "exit":
            facts.append(record.exit.exit_code)
    return rows, config, facts


def test_results_in_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    returned = trained(WandbCallback(project="lines", name="first", mode="offline"), folder=tmp_path)
    rows, config, facts = offline_run(tmp_path)
    assert config["rows"] == 32 and facts == ["lines", "first", 0]
    assert [row["step"] for row in rows] == [4, 4, 8]
    assert rows[0]["train/train_loss"] == returned[0]["train_loss"]
    assert rows[1]["validate/val_loss"] == returned[1]["val_loss"]


def ray_callbacks(uri: str) -> list[Any]:
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.logger import CSVLoggerCallback, TBXLoggerCallback
    from ray.tune.logger import JsonLoggerCallback as RayJsonLoggerCallback

    mlflow = MLflowLoggerCallback(tracking_uri=uri, experiment_name="line")
    return [TBXLoggerCallback(), CSVLoggerCallback(), RayJsonLoggerCallback(), mlflow]


def test_rays_own_callbacks_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # Ray's callback sets it, and leaves it
    folder = tmp_path / "run_001"
    callbacks = make_callback_list(ray_callbacks(uri))
    callbacks.start(Run(trainer="Trainer", name="f", num_workers=2, config={"lr": 0.1}, folder=folder))
    for step in (1, 2):
        row = {"loss": 1 / step, "epoch": step - 1, "_training_iteration": step}
        callbacks.result(result(kind="report", epoch=step - 1, step=step, metrics=row, by_worker=[row, row]))
    callbacks.end(failed=True)

    assert curves(folder)["ray/tune/loss"] == [(1, 1.0), (2, 0.5)]

    lines = (folder / "progress.csv").read_text().splitlines()
    written = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["loss"], row["training_iteration"]) for row in written] == [("1.0", "1"), ("0.5", "2")]

    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    assert [(row["loss"], row["training_iteration"], row["config"]) for row in rows] == [
        (1.0, 1, {"lr": 0.1}),
        (0.5, 2, {"lr": 0.1}),
    ]
    assert json.loads((folder / "params.json").read_text()) == {"lr": 0.1}

    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("line")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"lr": "0.1"}
    assert run.info.status == "FAILED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 0.5)]


# -- recoveries ---------------------------------------------------------------------------------------


FAILURE = Recovery(
    reason="worker death",
    removed_ranks=(1, 2),
    world_size_before=3,
    world_size_after=1,
    in_place=True,
    batches_redone=2,
    seconds=0.5,
    epoch=2,
    batch=7,
    detail="killed: <script>x</script>\nsecond line \ud800",
    time=1_700_000_000.25,
    step=17,
    phases={"stop": 0.125, "join": 0.25},
)
GROWTH = Recovery("growth", (), 1, 3, True, 0, 0.25, epoch=2, batch=9, time=1_700_000_001.0, step=19)
LINE = (
    "worker death: 3 -> 1 worker, ranks 1, 2 removed, epoch 2, batch 7, in place, 2 batches redone, 0.5 s "
    "(stop 0.125, join 0.25)"
)
SECOND_LINE = "growth: 1 -> 3 workers, epoch 2, batch 9, in place, 0 batches redone, 0.25 s"


def logged(callback: Callback, folder: Path) -> None:
    callback.on_start(Run(trainer="TorchTrainer", name="Line", num_workers=3, folder=folder))
    callback.on_result(result(step=10))
    callback.on_recovery(FAILURE)
    callback.on_recovery(GROWTH)
    callback.on_result(result(step=20))
    callback.on_end(False)


def texts(folder: Path) -> list[tuple[int, float, str]]:
    """Return what TensorBoard's text plugin shows: (step, time, text) of each point."""
    multiplexers = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_multiplexer")
    providers = pytest.importorskip("tensorboard.backend.event_processing.data_provider")
    context = pytest.importorskip("tensorboard.context").RequestContext()
    multiplexer = multiplexers.EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = providers.MultiplexerDataProvider(multiplexer, str(folder))
    found = provider.read_tensors(context, experiment_id="", plugin_name="text", downsample=100)
    return [(each.step, each.wall_time, each.numpy.item().decode()) for each in found["."]["recovery"]]


def test_recoveries_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logged(TensorBoardCallback(), tmp_path)
    shown = [
        (17, FAILURE.time, f"{LINE}\n\n    killed: <script>x</script>\n    second line ?"),
        (19, GROWTH.time, SECOND_LINE),
    ]
    assert texts(tmp_path) == shown
    found = curves(tmp_path)
    assert found["recovery/seconds"] == [(17, 0.5), (19, 0.25)]
    assert found["recovery/world_size"] == [(17, 1.0), (19, 3.0)]
    assert found["recovery/batches_redone"] == [(17, 2.0), (19, 0.0)]
    assert (found["recovery/stop_seconds"], found["recovery/join_seconds"]) == ([(17, 0.125)], [(17, 0.25)])
    assert [step for step, _ in found["train/train_loss"]] == [10, 20]


def test_recoveries_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has failed, and its experiment is named after the operator."""
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.chdir(tmp_path)  # where MLflow stores the artifacts of a store that it is given
    callback = MLflowCallback(f"sqlite:///{tmp_path}/own.db", logdir=tmp_path)
    callback.on_start(Run(trainer="TorchTrainer", name="Line", num_workers=1, folder=tmp_path))
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/own.db")
    callback.on_recovery(FAILURE)
    assert "recovery_seconds" not in client.get_run(callback.run_id).data.metrics, "a call is waiting"
    callback.on_result(result(step=20))
    assert client.get_run(callback.run_id).data.tags["raysgd.recoveries"] == "worker death: 1"
    callback.on_recovery(GROWTH)
    callback.on_recovery(GROWTH)
    callback.on_end(True)
    points = client.get_metric_history(callback.run_id, "recovery_seconds")
    assert [(each.step, each.value, each.timestamp) for each in points][:2] == [
        (17, 0.5, 1_700_000_000_250),
        (19, 0.25, 1_700_000_001_000),
    ]
    assert [each.value for each in client.get_metric_history(callback.run_id, "recovery_join_seconds")] == [0.25]
    run = client.get_run(callback.run_id)
    assert (run.info.status, run.data.metrics["recovery_world_size"]) == ("FAILED", 3.0)
    assert client.get_experiment_by_name("Line").experiment_id == run.info.experiment_id
    assert run.data.tags["raysgd.recoveries"] == "worker death: 1, growth: 2"
    stored = json.loads(Path(client.download_artifacts(run.info.run_id, "recoveries.json", str(tmp_path))).read_text())
    assert [(each["reason"], each["removed_ranks"], each["step"]) for each in stored][:2] == [
        ("worker death", [1, 2], 17),
        ("growth", [], 19),
    ]
    assert (stored[0]["phases"], stored[0]["detail"]) == ({"stop": 0.125, "join": 0.25}, FAILURE.detail)


def test_recoveries_in_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logged(WandbCallback(project="lines", mode="offline"), tmp_path)
    rows, _, _ = offline_run(tmp_path)
    assert [row["step"] for row in rows] == [10, 17, 19, 20]
    assert (rows[1]["recovery/text"], rows[1]["recovery/join_seconds"]) == (LINE, 0.25)
    assert rows[1]["recovery/world_size"] == 1
    assert rows[1]["recovery/detail"].startswith("killed: <script>") and rows[2]["recovery/text"] == SECOND_LINE


def test_of_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    callbacks, logdir = [TensorBoardCallback()], tmp_path / "logs"
    with Cluster():
        ground = LocalGround(
            tmp_path, num_workers=2, elastic=ElasticConfig(grow="epoch"), callbacks=callbacks, logdir=logdir
        )
        trainer = ground.trainer
        first = trainer.train()
        ground.arm(Fault(1, 2))
        trainer.train()
        trainer.resize(2)
        trainer.resize(1)
        death, growth, shrink = trainer.recoveries
        steps = [row["step"] for row in trainer.history]
        trainer.shutdown()
    assert (death.step, growth.step, shrink.step) == (first["batch_count"] + death.batch, steps[1], steps[1])
    found = [(step, text.partition(":")[0]) for step, _, text in texts(logdir)]
    assert found == [(death.step, "worker death"), (growth.step, "growth"), (shrink.step, "shrink")]
    assert "SIGKILL" in texts(logdir)[0][2]
    assert [value for _, value in curves(logdir)["recovery/seconds"]] == pytest.approx(
        [death.seconds, growth.seconds, shrink.seconds]
    )
