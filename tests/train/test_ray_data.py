"""Ray Data in training functions, with real datasets on a real cluster, and workers that are killed."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train
from raysgd.ray_data.splits import make_splits, no_room_for_data
from raysgd.train import DataConfig, Trainer
from tests.peek import executor_of, want_workers

ray_data = pytest.importorskip("ray.data")

STILL = ElasticConfig(grow=False)
Make = Callable[..., Trainer]


@pytest.fixture
def made(ray_cluster: None, tmp_path: Path) -> Any:
    ray_data.DataContext.get_current().enable_progress_bars = False
    trainers: list[Trainer] = []

    def make(backend: Any = "none", num_workers: int = 2, **arguments: Any) -> Trainer:
        trainer = Trainer(backend, num_workers=num_workers, logdir=tmp_path / "logs", **arguments)
        trainers.append(trainer)
        trainer.start()
        return trainer

    yield make
    for trainer in trainers:
        trainer.shutdown()


def numbers(count: int, blocks: int = 8) -> Any:
    return ray_data.range(count, override_num_blocks=blocks)


def read_all() -> dict[str, Any]:
    """Read the training data twice, in batches of two frameworks, and the data that is not split once."""
    part = train.get_dataset_shard("train")
    first = [int(i) for batch in part.iter_batches(batch_size=7) for i in batch["id"]]
    second = [int(i) for batch in part.iter_torch_batches(batch_size=7) for i in batch["id"]]
    complete = train.get_dataset_shard("validation")
    return {"first": first, "second": second, "complete": sorted(int(row["id"]) for row in complete.iter_rows())}


def test_each_worker_reads_its_shard(made: Make) -> None:
    """Read a shard twice, and a dataset that is not split."""
    data = {"train": numbers(101), "validation": numbers(10)}
    trainer = made()
    shards = make_splits(data, DataConfig(["train"]))
    rounds = _run_with(trainer, read_all, shards)
    assert [len(each["first"]) for each in rounds] == [50, 50], "with equal=True, one row of 101 is not used"
    assert [len(each["second"]) for each in rounds] == [50, 50]
    for name in ("first", "second"):
        seen = [row for each in rounds for row in each[name]]
        assert len(set(seen)) == 100 and set(seen) <= set(range(101))
    assert [each["complete"] for each in rounds] == [list(range(10))] * 2


def _run_with(trainer: Trainer, function: Any, shards: Any) -> list[Any]:
    """Run a function like a trainer with a dataset_config, which `Trainer.run(dataset=...)` does not have."""
    from raysgd.train.run import RunOptions

    executor = executor_of(trainer)
    executor.start_training(function, trainer.logdir / "own", options=RunOptions(shards=shards))
    return executor.finish_training()


def test_other_dataset_configs(made: Make) -> None:
    """With equal=False every row is used. Ray's own config splits with its own method."""
    from ray.train import DataConfig as RaysConfig

    def rows() -> list[int]:
        return [int(row["id"]) for row in train.get_dataset_shard("b").iter_rows()]

    trainer = made()
    parts = _run_with(trainer, rows, make_splits({"b": numbers(101, blocks=5)}, DataConfig(equal=False)))
    assert sorted(row for part in parts for row in part) == list(range(101))
    shards = make_splits({"a": numbers(8), "b": numbers(8)}, RaysConfig(datasets_to_split=["a"]))
    assert [sorted(part) for part in _run_with(trainer, rows, shards)] == [list(range(8))] * 2


def test_batches_for_tensorflow(made: Make) -> None:
    pytest.importorskip("tensorflow")

    def rows() -> list[int]:
        part = train.get_dataset_shard()
        own = train.tensorflow.prepare_dataset_shard(part.to_tf("id", "id", batch_size=7))
        first = sorted(int(row) for features, _ in own for row in features)
        second = sorted(int(row) for batch in part.iter_tf_batches(batch_size=7) for row in batch["id"])
        assert first == second
        return first

    assert made(num_workers=1).run(rows, dataset=numbers(20)) == [list(range(20))]


def kill_one(config: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed in the middle of its shard. Rank 0 waits in a split that never continues."""
    part = train.get_dataset_shard()
    size = train.world_size()
    if size == 2 and config["where"] == "before" and train.world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = []
    for step, batch in enumerate(part.iter_torch_batches(batch_size=5)):
        if size == 2 and config["where"] == "within" and train.world_rank() == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += batch["id"].tolist()
        time.sleep(0.02)
    if size == 2:  # a second pass: here rank 0 certainly waits, because the killed rank never joins it
        for _ in part.iter_batches(batch_size=5):
            pass
    return {"seen": sorted(seen), "pid": os.getpid()}


@pytest.mark.elastic
@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.nightly), "within"])
def test_a_split_with_a_failed_reader_blocks_no_rank(made: Make, where: str) -> None:
    trainer = made(elastic=STILL)
    survivor = trainer.worker_group.execute(os.getpid)[0]
    result = trainer.run(kill_one, {"where": where}, dataset=numbers(400, blocks=20))
    assert [each["pid"] for each in result] == [survivor], "the same process continued"
    assert result[0]["seen"] == list(range(400)), "alone it reads all rows"
    assert [r.reason for r in trainer.recoveries] == ["worker death"]


@pytest.mark.elastic
def test_a_function_in_a_call_of_ray_is_stopped(made: Make) -> None:
    """`ray.get` ignores all exceptions of signal handlers except KeyboardInterrupt."""

    def wait() -> int:
        import ray

        if train.world_size() == 1:
            return 1
        if train.world_rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        @ray.remote(num_cpus=0)
        def forever() -> None:
            time.sleep(3600)

        ray.get(forever.remote())
        return 2

    assert made(elastic=STILL).run(wait) == [1]


def test_new_workers_get_new_shards(made: Make) -> None:
    """A worker joins at a checkpoint, and the dataset is split among three."""

    def parts() -> tuple[int, int]:
        if train.world_size() == 2:
            while True:
                train.save_checkpoint(ready=True)
                time.sleep(0.05)
        return train.world_size(), sum(1 for _ in train.get_dataset_shard().iter_rows())

    trainer = made(elastic=ElasticConfig())
    want_workers(trainer, 3)
    assert trainer.run(parts, dataset=numbers(90)) == [(3, 30)] * 3


def test_a_split_ends_with_its_run(ray_cluster: None) -> None:
    """The actors of a split are ended by the next attempt, and at the end of the run."""
    import ray

    shards = make_splits(numbers(20))
    assert shards is not None

    def actor() -> Any:
        (handle,) = {each["train"]._coord_actor for each in shards(2)}
        assert ray.get(handle.get_dataset_context.remote()) is not None
        return handle

    first, second = actor(), actor()
    shards.close()
    for handle in (first, second):
        until = time.monotonic() + 60
        with pytest.raises(ray.exceptions.ActorDiedError):
            while time.monotonic() < until:  # Ray ends it asynchronously
                ray.get(handle.get_dataset_context.remote())
                time.sleep(0.05)


@pytest.mark.elastic
def test_an_import_is_never_interrupted(made: Make, tmp_path: Path) -> None:
    """The module would stay broken in this process."""
    (tmp_path / "slowly_imported.py").write_text(
        "import time\nfor _ in range(40):\n    time.sleep(0.05)\ncomplete = True\n"
    )

    def load() -> bool:
        import importlib
        import sys

        sys.path.insert(0, str(tmp_path))
        if train.world_size() == 2 and train.world_rank() == 1:
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGKILL)
        incomplete = "slowly_imported" in sys.modules and not hasattr(sys.modules["slowly_imported"], "complete")
        module = importlib.import_module("slowly_imported")
        time.sleep(0.0 if train.world_size() == 1 else 60)
        return bool(module.complete) and not incomplete

    assert made(elastic=STILL).run(load) == [True]


def test_a_warning_if_workers_leave_no_cpu_for_the_data(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    import ray

    (node,) = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        assert not no_room_for_data([node] * 7, 1, "train")
        assert not caplog.records
        assert no_room_for_data([node] * 4, 2, "train")
    assert "are held by 4 workers with 2 CPU each" in caplog.text
