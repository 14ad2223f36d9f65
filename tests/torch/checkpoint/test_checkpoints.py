"""A checkpoint of two workers can be loaded by one and by three."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.core.snapshot import SnapshotStore
from raysgd.torch import TorchTrainer
from raysgd.trainer import loads
from tests import storing
from tests.local.group import Cluster
from tests.peek import loads_of, newest_snapshot
from tests.torch.on_workers.operators import Large
from tests.torch.small import weights


def on(workers: int) -> TorchTrainer:
    config = {"shuffle": True}
    return TorchTrainer(training_operator_cls=Large, num_workers=workers, use_gpu=False, config=config, seed=3)


class Saved:
    """The state of the two workers when they saved, and what they did after that."""

    def __init__(self, trainer: TorchTrainer, path: Path) -> None:
        trainer.train()
        trainer.train(num_steps=2)
        self.path = trainer.save(path)
        self.weights = weights(trainer)
        self.rest = trainer.train()
        self.epoch_after = trainer.train()["epoch"]
        self.weights_after = weights(trainer)


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[TorchTrainer]:
    with on(2) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def saved(pair: TorchTrainer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pair, tmp_path_factory.mktemp("two") / "two.pt")


def test_a_trainer_that_loads_its_checkpoint_repeats_the_same_steps(pair: TorchTrainer, saved: Saved) -> None:
    pair.load(saved.path)
    assert torch.equal(weights(pair), saved.weights)
    rest = pair.train()
    assert [rest[name] == saved.rest[name] for name in ("batch_count", "num_samples")] == [True, True]
    assert rest["train_loss"] == pytest.approx(saved.rest["train_loss"], rel=1e-5)
    assert pair.train()["epoch"] == saved.epoch_after
    assert torch.allclose(weights(pair), saved.weights_after, rtol=1e-5)
    assert pair.apply_all_operators(lambda operator: operator.note) == [{"loaded": {"rank": 0}}] * 2
    assert pair.apply_all_operators(lambda operator: float(operator.table.sum())) == [2e6, 2e6], "8 MB, to each rank"


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_can_load_it(saved: Saved, workers: int) -> None:
    with Cluster(), on(workers) as trainer:
        trainer.load(saved.path)
        assert torch.equal(weights(trainer), saved.weights)
        rest = trainer.train()
        assert rest["num_samples"] == 32, "the rest of the epoch that two workers had begun"
        assert rest["epoch"] == saved.rest["epoch"]
        assert trainer.train()["num_samples"] == 64


def no_bytes(*_: Any) -> Any:
    raise AssertionError("the driver reads the file itself")


def test_workers_that_see_the_file_read_it_themselves(
    pair: TorchTrainer, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train()
    storing.instead(monkeypatch, "read", no_bytes)
    pair.load(saved.path)
    assert torch.equal(weights(pair), saved.weights)
    assert pair.train()["num_samples"] == saved.rest["num_samples"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_does_not_see_the_file_is_sent_it(
    pair: TorchTrainer, saved: Saved, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.train()
    pair.apply_all_operators(lambda operator: storing.miss_next_file() if operator.world_rank == rank else None)
    read: list[Any] = []
    storing.instead(monkeypatch, "read", lambda real, path: (read.append(path), real(path))[1])
    pair.load(saved.path)
    assert len(read) == 1, "the driver must read the file once, to send it"
    assert torch.equal(weights(pair), saved.weights)
    sums = pair.apply_all_operators(lambda operator: [float(p.sum()) for p in operator.model.parameters()])
    assert sums[0] == sums[1]
    assert pair.train()["num_samples"] == saved.rest["num_samples"]
    assert len(loads_of(pair)) == 1, "a rank that loaded it twice must not count as further"


def kill_all(trainer: TorchTrainer) -> None:
    for process in trainer.apply_all_workers(os.getpid):
        os.kill(process, signal.SIGKILL)


def arrived_snapshot(trainer: TorchTrainer) -> Any:
    for _ in range(600):
        trainer.apply_all_workers(os.getpid)
        if (newest := newest_snapshot(trainer)).data:
            return newest
        time.sleep(0.1)
    raise TimeoutError


def freeze(operator: Any, frozen: bool = True) -> None:
    next(operator.model.parameters()).requires_grad_(not frozen)


def trained(operator: Any) -> list[bool]:
    return [each.requires_grad for each in operator.model.parameters()]


@pytest.mark.parametrize("source", ["a snapshot", "the file", "its bytes"])
def test_if_all_workers_fail_after_a_load_new_ones_start_from_what_was_loaded(
    pair: TorchTrainer, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """If no snapshot of that has arrived yet, they load it again, from the file that was there, or from what was read."""
    path, offer = tmp_path / "file.pt", SnapshotStore.offer
    if source != "a snapshot":
        monkeypatch.setattr(SnapshotStore, "offer", lambda store, each: None if each.data else offer(store, each))
    if source == "its bytes":
        monkeypatch.setattr(loads, "verified_file", lambda *_: (None, True))
    path.write_bytes(Path(saved.path).read_bytes())
    pair.train()
    pair.apply_all_operators(freeze)
    pair.load(path)
    path.unlink()
    if source == "a snapshot":
        arrived_snapshot(pair)
    before = len(pair.recoveries)
    kill_all(pair)
    assert torch.equal(weights(pair), saved.weights)
    assert pair.apply_all_operators(trained) == [[False, *[True] * 3]] * pair.world_size
    pair.apply_all_operators(partial(freeze, frozen=False))
    failure = pair.recoveries[before]
    assert (failure.in_place, failure.batches_redone) == (False, 0)
    pair.resize(2)
    rest = pair.train()
    assert (rest["epoch"], rest["num_samples"]) == (saved.rest["epoch"], saved.rest["num_samples"])


def test_a_file_that_was_changed_since_it_was_loaded_is_not_loaded_again(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, offer = tmp_path / "file.pt", SnapshotStore.offer
    path.write_bytes(Path(saved.path).read_bytes())
    monkeypatch.setattr(SnapshotStore, "offer", lambda store, each: None if each.data else offer(store, each))
    with on(2) as trainer:
        trainer.load(path)
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        kill_all(trainer)
        with pytest.raises(CheckpointError, match=r"file.pt was changed since it was loaded"):
            weights(trainer)


def test_a_load_that_fails_changes_nothing_and_keeps_the_snapshot_from_before(
    pair: TorchTrainer, saved: Saved, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pt"
    pair.load(saved.path)
    before = arrived_snapshot(pair)
    state = torch.load(saved.path, weights_only=True)
    state["models"][0]["layers.0.weight"] = torch.zeros(4, 4)
    torch.save(state, broken)
    with pytest.raises(CheckpointError, match=r"layers.0.weight has shape"):
        pair.load(broken)
    assert torch.equal(weights(pair), saved.weights)
    assert newest_snapshot(pair) is before
    kill_all(pair)
    assert torch.equal(weights(pair), saved.weights)
    pair.resize(2)
