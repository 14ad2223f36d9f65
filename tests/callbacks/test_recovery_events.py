"""Recoveries and planned changes in TensorBoard, MLflow and W&B, as the readers of these programs return them."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, Recovery, TorchTrainer, train
from raysgd.callbacks import Callback, MLflowCallback, Run, TensorBoardCallback, WandbCallback
from tests.callbacks.recording import Heard, Line
from tests.callbacks.test_writers import complete_run, curves, result
from tests.faults import until

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
    "worker death: 3 -> 1 workers, ranks 1, 2 removed, epoch 2, batch 7, in place, 2 batches redone, 0.5 s "
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


def test_tensorboard(tmp_path: Path) -> None:
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


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.chdir(tmp_path)  # where MLflow stores the artifacts of a store that it is given
    callback = MLflowCallback(f"sqlite:///{tmp_path}/own.db", logdir=tmp_path)
    callback.on_start(Run(trainer="T", name="n", num_workers=1, folder=tmp_path))
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/own.db")
    callback.on_recovery(FAILURE)
    assert "recovery_seconds" not in client.get_run(callback.run_id).data.metrics, "a call is waiting"
    callback.on_result(result(step=20))
    assert client.get_run(callback.run_id).data.tags["raysgd.recoveries"] == "worker death: 1"
    callback.on_recovery(GROWTH)
    callback.on_recovery(GROWTH)
    callback.on_end(False)
    points = client.get_metric_history(callback.run_id, "recovery_seconds")
    assert [(each.step, each.value, each.timestamp) for each in points][:2] == [
        (17, 0.5, 1_700_000_000_250),
        (19, 0.25, 1_700_000_001_000),
    ]
    assert [each.value for each in client.get_metric_history(callback.run_id, "recovery_join_seconds")] == [0.25]
    run = client.get_run(callback.run_id)
    assert (run.info.status, run.data.metrics["recovery_world_size"]) == ("FINISHED", 3.0)
    assert run.data.tags["raysgd.recoveries"] == "worker death: 1, growth: 2"
    stored = json.loads(Path(client.download_artifacts(run.info.run_id, "recoveries.json", str(tmp_path))).read_text())
    assert [(each["reason"], each["removed_ranks"], each["step"]) for each in stored][:2] == [
        ("worker death", [1, 2], 17),
        ("growth", [], 19),
    ]
    assert (stored[0]["phases"], stored[0]["detail"]) == ({"stop": 0.125, "join": 0.25}, FAILURE.detail)


def offline_rows(folder: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    histories = [r.history.item for r in complete_run(path, Record) if r.WhichOneof("record_type") == "history"]
    return [{each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in row} for row in histories]


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logged(WandbCallback(project="lines", mode="offline"), tmp_path)
    rows = offline_rows(tmp_path)
    assert [row["step"] for row in rows] == [10, 17, 19, 20]
    assert (rows[1]["recovery/text"], rows[1]["recovery/join_seconds"], rows[1]["recovery/world_size"]) == (
        LINE,
        0.25,
        1,
    )
    assert rows[1]["recovery/detail"].startswith("killed: <script>") and rows[2]["recovery/text"] == SECOND_LINE


class Dying(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.world_rank == batch_info.get("victim") and batch_info["batch_idx"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)


@pytest.mark.elastic
def test_of_a_trainer(ray_cluster: None, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TorchTrainer(
        training_operator_cls=Dying,
        num_workers=2,
        use_gpu=False,
        config={"rows": 64},
        elastic=ElasticConfig(grow="epoch"),
        callbacks=[TensorBoardCallback()],
        logdir=tmp_path,
    ) as trainer:
        first = trainer.train()
        trainer.train(info={"victim": 1})
        trainer.resize(2)
        trainer.resize(1)
        death, growth, shrink = trainer.recoveries
        steps = [row["step"] for row in trainer.history]
    assert (death.step, growth.step, shrink.step) == (first["batch_count"] + death.batch, steps[1], steps[1])
    found = [(step, text.partition(":")[0]) for step, _, text in texts(tmp_path)]
    assert found == [(death.step, "worker death"), (growth.step, "growth"), (shrink.step, "shrink")]
    assert "SIGKILL" in texts(tmp_path)[0][2]
    assert [value for _, value in curves(tmp_path)["recovery/seconds"]] == pytest.approx(
        [death.seconds, growth.seconds, shrink.seconds]
    )


@pytest.mark.elastic
def test_of_a_training_function(ray_cluster: None, tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        start = (train.load_checkpoint() or {"done": 0})["done"]
        for epoch in range(start, 4):
            if epoch == 2 and train.world_rank() == 1 and not os.path.exists(config["mark"]):
                for _ in until(lambda: os.path.exists(config["heard"])):  # the driver has what was reported
                    time.sleep(0.01)
                open(config["mark"], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            train.report(epoch=epoch)
            train.save_checkpoint(done=epoch + 1)

    class Marks(Heard):
        def on_result(self, result: Any) -> None:
            super().on_result(result)
            if len(self.named("result")) == 2:
                (tmp_path / "heard").touch()

    heard = Marks()
    trainer = train.Trainer("torch", num_workers=2, logdir=tmp_path)
    trainer.start()
    trainer.run(function, {"mark": str(tmp_path / "mark"), "heard": str(tmp_path / "heard")}, callbacks=[heard])
    trainer.shutdown()
    recovery = heard.named("recovery")[0]
    assert (recovery.reason, recovery.step) == ("worker death", 2), "over the reports, like the results"
    assert recovery.time > 0 and "join" in recovery.phases
