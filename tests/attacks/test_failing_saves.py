"""A save that fails leaves the old file and nothing else: if the disk is full, or a worker is killed.

The limits on file sizes are those of the processes (RLIMIT_FSIZE), so no test needs root.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import CheckpointError, TorchTrainer
from tests.torch.small import Line, inline, weights

pytestmark = [pytest.mark.more, pytest.mark.skipif(sys.platform != "linux", reason="needs the process limits of Linux")]

ROOM = 1 << 20


class Wide(Line):
    """Has a state of 12 MB. Each epoch changes the weights in the same way on all ranks."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        torch.manual_seed(1)
        model = nn.Linear(1000, 3000)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in self._registered.models[0].parameters():
                parameter.add_(1.0)
        return {}


def limit(room: int, deadly: bool = False) -> None:
    """Limit the files of this process to `room` bytes. A larger write fails or, with `deadly`, the kernel kills the
    process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def limit_rank_0(operator: Any, deadly: bool = False) -> None:
    if operator.world_rank == 0:
        limit(ROOM, deadly)


no_limit = functools.partial(limit, resource.RLIM_INFINITY)


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=Wide, num_workers=2, use_gpu=False) as trainer:
        yield trainer


@pytest.fixture
def saved(pair: TorchTrainer, tmp_path: Path) -> Iterator[torch.Tensor]:
    """Save a checkpoint as a file and as a directory, and train on. Return the saved weights."""
    pair.save(tmp_path / "x.pt")
    pair.save(tmp_path / "parts", sharded=True)
    older = weights(pair)
    pair.train()
    yield older
    no_limit()
    pair.apply_all_workers(no_limit)


def stored(path: Path) -> torch.Tensor:
    """Return the weights in a checkpoint's file or directory, which another trainer reads."""
    with inline(Wide) as reader:
        reader.load(path, trusted=path.is_dir())
        return weights(reader)


def assert_only(folder: Path, expected: torch.Tensor) -> None:
    """Check that only the two checkpoints exist, and that they have these weights."""
    assert sorted(os.listdir(folder)) == ["parts", "x.pt"]
    for name in ("parts", "x.pt"):
        assert torch.equal(stored(folder / name), expected)


def save_again(trainer: TorchTrainer, folder: Path) -> None:
    """Check that the save works when there is room again."""
    for name in ("x.pt", "parts"):
        trainer.save(folder / name, sharded=name == "parts")
    assert_only(folder, weights(trainer))


# -- no room ------------------------------------------------------------------------------------------


def test_no_room_for_the_worker_to_write(pair: TorchTrainer, saved: torch.Tensor, tmp_path: Path) -> None:
    pair.apply_all_workers(functools.partial(limit, ROOM))
    with pytest.raises(OSError, match="File too large") as caught:
        pair.save(tmp_path / "x.pt")
    assert caught.value.errno == errno.EFBIG
    handle = pair.save(tmp_path / "x.pt", blocking=False)
    assert not isinstance(handle, str)
    with pytest.raises(CheckpointError, match="File too large"):
        handle.result(60)
    assert_only(tmp_path, saved)
    pair.apply_all_workers(no_limit)
    save_again(pair, tmp_path)


def test_no_room_for_the_sharded_file_of_one_worker(tmp_path: Path) -> None:
    with inline(Wide) as trainer:
        trainer.save(tmp_path / "parts", sharded=True)
        before = weights(trainer)
        trainer.train()
        limit(ROOM)
        try:
            with pytest.raises(OSError, match="File too large"):
                trainer.save(tmp_path / "parts", sharded=True)
        finally:
            no_limit()
    assert os.listdir(tmp_path) == ["parts"] and torch.equal(stored(tmp_path / "parts"), before)


# -- a worker that is killed while it writes ----------------------------------------------------------


@pytest.mark.elastic
@pytest.mark.parametrize("name", ["x.pt", "parts"])
def test_a_worker_that_is_killed_while_it_writes(
    pair: TorchTrainer, saved: torch.Tensor, tmp_path: Path, name: str
) -> None:
    """The remaining workers complete the save."""
    recoveries = len(pair.recoveries)
    pair.apply_all_operators(functools.partial(limit_rank_0, deadly=True))
    pair.save(tmp_path / name, sharded=name == "parts")
    assert len(pair.recoveries) > recoveries
    assert torch.equal(stored(tmp_path / name), weights(pair))
    assert sorted(os.listdir(tmp_path)) == ["parts", "x.pt"]
    pair.resize(2)


@pytest.mark.elastic
def test_a_worker_that_is_killed_while_it_writes_in_the_background(
    pair: TorchTrainer, saved: torch.Tensor, tmp_path: Path
) -> None:
    pair.apply_all_operators(functools.partial(limit_rank_0, deadly=True))
    handle = pair.save(tmp_path / "x.pt", blocking=False)
    assert not isinstance(handle, str)
    try:
        handle.result(60)
    except CheckpointError as error:
        assert "checkpoint failed" in str(error)
        assert_only(tmp_path, saved)
    else:  # it was killed before its call had ended, so the other worker repeated the save
        assert torch.equal(stored(tmp_path / "x.pt"), weights(pair))
    pair.resize(2)
    save_again(pair, tmp_path)
