"""Ray Data in training functions, with real datasets on a real cluster, and workers that are killed."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train
from raysgd.train import DataConfig, Trainer
from raysgd.train.run.splits import make_splits
from raysgd.workers.cluster.nodes import warn_no_room_for_data
from tests.peek import run_with_shards, want_workers

ray_data = pytest.importorskip("ray.data")


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Some tests kill its last worker, so each finds out how many there are. It starts with more than all of them kill."""
    ray_data.DataContext.get_current().enable_progress_bars = False
    made = Trainer("none", num_workers=4, logdir=tmp_path_factory.mktemp("logs"), elastic=ElasticConfig(grow=False))
    made.start()
    yield made
    made.shutdown()


def size_of(trainer: Trainer) -> int:
    return len(trainer.worker_group)


def kill_last(size: int) -> None:
    """Kill the last one of this number of workers."""
    if train.world_size() == size and train.world_rank() == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def numbers(count: int, blocks: int = 8) -> Any:
    # One task at a time, because each process of a task imports for seconds.
    return ray_data.range(count, override_num_blocks=blocks, concurrency=1)


def read_all() -> dict[str, Any]:
    """Read the training data twice, in batches of two frameworks, and the data that is not split once."""
    part = train.get_dataset_shard("train")
    first = [int(i) for batch in part.iter_batches(batch_size=7) for i in batch["id"]]
    second = [int(i) for batch in part.iter_torch_batches(batch_size=7) for i in batch["id"]]
    complete = train.get_dataset_shard("validation")
    return {"first": first, "second": second, "complete": sorted(int(row["id"]) for row in complete.iter_rows())}


def test_each_worker_reads_its_shard(trainer: Trainer, tmp_path: Path) -> None:
    """Read a shard twice, and a dataset that is not split."""
    data, size = {"train": numbers(61), "validation": numbers(10)}, size_of(trainer)
    rounds = run_with_shards(trainer, read_all, data, DataConfig(["train"]), tmp_path)
    for name in ("first", "second"):
        assert [len(each[name]) for each in rounds] == [61 // size] * size, "with equal=True, the last row is not used"
        seen = [row for each in rounds for row in each[name]]
        assert len(set(seen)) == 60 and set(seen) <= set(range(61))
    assert [each["complete"] for each in rounds] == [list(range(10))] * size


def test_other_dataset_configs(trainer: Trainer, tmp_path: Path) -> None:
    """With equal=False every row is used. Ray's own config splits with its own method."""
    from ray.train import DataConfig as RaysConfig

    def rows() -> list[int]:
        return [int(row["id"]) for row in train.get_dataset_shard("b").iter_rows()]

    parts = run_with_shards(trainer, rows, {"b": numbers(101, blocks=5)}, DataConfig(equal=False), tmp_path)
    assert sorted(row for part in parts for row in part) == list(range(101))
    both = {"a": numbers(8), "b": numbers(8)}
    found = run_with_shards(trainer, rows, both, RaysConfig(datasets_to_split=["a"]), tmp_path)
    assert [sorted(part) for part in found] == [list(range(8))] * size_of(trainer)


def read_and_die(config: dict[str, int]) -> dict[str, Any]:
    """The last rank is killed in the middle of its shard. The others wait in a split that never continues."""
    part = train.get_dataset_shard()
    seen = []
    for step, batch in enumerate(part.iter_torch_batches(batch_size=5)):
        if step == 2:
            kill_last(config["size"])
        seen += batch["id"].tolist()
        time.sleep(0.02)
    if (
        train.world_size() == config["size"]
    ):  # a second pass, which the killed rank never joins: here they certainly wait
        for _ in part.iter_batches(batch_size=5):
            pass
    return {"seen": seen, "pid": os.getpid()}


@pytest.mark.elastic
def test_a_split_with_a_failed_reader_blocks_no_rank(trainer: Trainer) -> None:
    survivors, before = trainer.worker_group.execute(os.getpid)[:-1], len(trainer.recoveries)
    result = trainer.run(read_and_die, {"size": size_of(trainer)}, dataset=numbers(240, blocks=20))
    assert [each["pid"] for each in result] == survivors, "the same processes continued"
    assert sorted(row for each in result for row in each["seen"]) == list(range(240)), "they read all rows"
    assert [recovery.reason for recovery in trainer.recoveries[before:]] == ["worker death"]


@pytest.mark.elastic
def test_a_function_in_a_call_of_ray_is_stopped(trainer: Trainer) -> None:
    """`ray.get` ignores all exceptions of signal handlers except KeyboardInterrupt."""

    def wait(config: dict[str, int]) -> int:
        import ray

        if train.world_size() < config["size"]:
            return 1
        time.sleep(0.5)
        kill_last(config["size"])

        @ray.remote(num_cpus=0)
        def forever() -> None:
            time.sleep(3600)

        ray.get(forever.remote())
        return 2

    size = size_of(trainer)
    assert trainer.run(wait, {"size": size}) == [1] * (size - 1)


def test_new_workers_get_new_shards(ray_cluster: None, tmp_path: Path) -> None:
    """A worker joins at a checkpoint, and the dataset is split among two."""

    def parts() -> tuple[int, int]:
        if train.world_size() == 1:
            while True:
                train.save_checkpoint(ready=True)
                time.sleep(0.05)
        return train.world_size(), sum(1 for _ in train.get_dataset_shard().iter_rows())

    with Trainer("none", num_workers=1, logdir=tmp_path) as growing:
        want_workers(growing, 2)
        assert growing.run(parts, dataset=numbers(90)) == [(2, 45)] * 2


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
                with contextlib.suppress(ray.exceptions.ActorUnavailableError):  # its connection has ended first
                    ray.get(handle.get_dataset_context.remote())
                time.sleep(0.05)


@pytest.mark.elastic
def test_an_import_is_never_interrupted(trainer: Trainer, tmp_path: Path) -> None:
    """The module would stay broken in this process."""
    (tmp_path / "slowly_imported.py").write_text(
        "import time\nfor _ in range(40):\n    time.sleep(0.05)\ncomplete = True\n"
    )

    def load(config: dict[str, int]) -> bool:
        import importlib
        import sys

        sys.path.insert(0, str(tmp_path))
        if train.world_rank() == config["size"] - 1:
            time.sleep(0.7)
            kill_last(config["size"])
        incomplete = "slowly_imported" in sys.modules and not hasattr(sys.modules["slowly_imported"], "complete")
        module = importlib.import_module("slowly_imported")
        time.sleep(60 if train.world_size() == config["size"] else 0)
        return bool(module.complete) and not incomplete

    size = size_of(trainer)
    assert trainer.run(load, {"size": size}) == [True] * (size - 1)


def test_a_warning_if_workers_leave_no_cpu_for_the_data(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    import ray

    (node,) = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        assert not warn_no_room_for_data([node] * 7, 1, "train")
        assert not caplog.records
        assert warn_no_room_for_data([node] * 4, 2, "train")
    assert "are held by 4 workers with 2 CPU each" in caplog.text
