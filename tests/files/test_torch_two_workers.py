"""Files that two workers cannot load: if one rank refuses a file, no rank changes, and training continues on both."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.torch import TorchTrainer
from tests.files.test_torch_contents import WRONG
from tests.files.torch_cases import (
    Bench,
    Rich,
    bench,
    complete,
    replaced,
    rich,
    same,
    seed_all,
    stored,
    weights,
)
from tests.peek import models_of
from tests.tiers import NIGHTLY

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Picky(Rich):
    """Rank 1 refuses a state that says so, or ends its process when it loads such a state for the first time."""

    def load_state_dict(self, state: Any) -> None:
        notes = state["notes"]
        if notes[0] == "dies" and self.world_rank == 1 and not os.path.exists(notes[1]):
            Path(notes[1]).touch()
            os._exit(1)
        if notes[0] == "not on rank 1":
            self.best = -1.0
            with torch.no_grad():
                self.models[0].module.weight.fill_(7.0)
            self.optimizers[0].param_groups[0]["lr"] = 7.0
            random.random()
            if self.world_rank == 1:
                raise KeyError("no")
        super().load_state_dict({**state, "notes": ["a"] if notes[0] != "b" else notes})


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("pair"), num_workers=2, operator=Picky)


def test_a_good_file_loads(pair: Bench) -> None:
    assert pair.try_path(pair.folder / "good.pt") == "identical"
    pair.next_steps_are_right()


SOME = ["weight: another shape", "exp_avg: another shape", "order: samples that are not here", "operator: half"]


def test_wrong_contents_change_no_rank(pair: Bench) -> None:
    for name in WRONG if NIGHTLY else SOME:
        pair.refuses(stored(WRONG[name](pair.start)))
    pair.next_steps_are_right()


def test_a_load_that_fails_on_one_rank_is_undone_on_all(pair: Bench) -> None:
    message = pair.try_file(stored(replaced(pair.start, ("operator", "notes"), ["not on rank 1"])))
    assert "rank 1" in message and "KeyError" in message and "load_state_dict" in message
    pair.next_steps_are_right()


@pytest.mark.elastic
def test_after_a_worker_failure_in_a_load_all_ranks_have_the_same_state(ray_cluster: None, tmp_path: Path) -> None:
    """The load is repeated, and at the end every rank has the state of the file."""
    seed_all(5)
    with rich(num_workers=2, operator=Picky) as trainer:
        trainer.train(num_steps=3)
        saved = weights(trainer)
        content = trainer.state_dict()
        trainer.train(num_steps=2)
        (tmp_path / "x.pt").write_bytes(
            stored(replaced(content, ("operator", "notes"), ["dies", str(tmp_path / "died")]))
        )
        trainer.load(tmp_path / "x.pt")
        assert (tmp_path / "died").exists() and len(trainer.recoveries) >= 1
        assert torch.equal(weights(trainer), saved)
        views = trainer.apply_all_operators(lambda op: [m.state_dict() for m in models_of(op)])
        assert all(same(view, views[0]) for view in views)
        assert trainer.train(num_steps=1)["batch_count"] == 1


def test_a_load_that_fails_keeps_the_snapshot(ray_cluster: None, tmp_path: Path) -> None:
    """If all workers fail right after the load, training continues from the state before it."""
    seed_all(5)
    with rich(num_workers=2, operator=Picky) as trainer:
        trainer.train()
        before = weights(trainer)
        content = trainer.state_dict()
        (tmp_path / "x.pt").write_bytes(stored(replaced(content, ("operator", "notes"), ["not on rank 1"])))
        with pytest.raises(CheckpointError):
            trainer.load(tmp_path / "x.pt")
        assert torch.equal(weights(trainer), before)
        mark = tmp_path / "all died"
        all_die_once(trainer, mark)
        assert torch.equal(weights(trainer), before)


def all_die_once(trainer: TorchTrainer, mark: Path) -> None:
    def die(operator: Any) -> None:
        if not os.path.exists(f"{mark}{operator.world_rank}"):
            Path(f"{mark}{operator.world_rank}").touch()
            os._exit(1)

    trainer.apply_all_operators(die)
    assert complete(trainer)
