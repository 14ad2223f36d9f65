"""Loaders with `state_dict` and `load_state_dict` continue where a checkpoint or a snapshot was made."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd import CheckpointError, ElasticConfig, TrainingOptions
from tests.local.group import Cluster
from tests.peek import parts_of
from tests.torch.small import Recording, flat, inline, operator_of


class Counting:
    """A loader whose batches say which pass, which rank and which batch they are. It counts what it reads."""

    def __init__(self, operator: Any, length: int) -> None:
        self.operator, self.length = operator, length
        self.passes, self.place, self.read, self.resumes = 0, 0, 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.resumes:
            self.passes, self.place = self.passes + 1, 0
        self.resumes = False
        rank = self.operator.world_rank
        while self.place < self.length + 2 * rank:
            self.place, self.read = self.place + 1, self.read + 1
            yield torch.tensor([self.passes * 10_000 + rank * 1000 + self.place])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.place, self.resumes = state["passes"], state["place"], True


class Reading(Recording):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": Counting(self, config.get("length", 40))}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(batch.tolist())
        self.zero_grad()
        self.backward(self.model(torch.ones(1, 2)).sum())
        self.step()
        return {"num_samples": len(batch)}


def numbers(passes: int, first: int, last: int, rank: int = 0) -> list[int]:
    return [passes * 10_000 + rank * 1000 + place for place in range(first, last + 1)]


def seen(operator: Any) -> list[int]:
    found = list(flat(operator.seen))
    operator.seen.clear()
    return found


@pytest.mark.parametrize(("steps", "skipped", "accumulate"), [(1, 0, 4), (32, 31, 1), (40, 7, 4), (39, 6, 1)])
def test_a_loader_continues_from_its_newest_state(steps: int, skipped: int, accumulate: int) -> None:
    options = {"options": TrainingOptions(accumulate=accumulate)}
    with inline(Reading, config={"length": 50}, **options) as trainer:
        trainer.train(num_steps=steps)
        state = trainer.state_dict()
        trainer.train()
        rest = seen(operator_of(trainer))[steps:]
    assert rest == numbers(1, steps + 1, 50)
    with inline(Reading, config={"length": 50}, **options) as trainer:
        trainer.load_state_dict(state)
        trainer.train()
        operator = operator_of(trainer)
        assert seen(operator) == rest
        assert parts_of(operator).train_loader.read == len(rest) + skipped
        trainer.train()
        assert seen(operator) == numbers(2, 1, 50)


def test_between_two_epochs_the_loaders_own_epoch_is_kept() -> None:
    with inline(Reading) as trainer:
        trainer.fit(2, validate_every=0)
        state = trainer.state_dict()
    with inline(Reading) as trainer:
        trainer.load_state_dict(state)
        trainer.train()
        assert seen(operator_of(trainer)) == numbers(3, 1, 40)


def test_a_load_of_a_position_that_is_none_changes_nothing() -> None:
    with inline(Reading) as trainer:
        trainer.train(num_steps=2)
        state = trainer.state_dict()
        state["loader"]["marks"] = [(1, 7)]
        with pytest.raises(CheckpointError, match="Nothing was changed on any rank"):
            trainer.load_state_dict(state)


def test_each_of_two_workers_continues(caplog: pytest.LogCaptureFixture) -> None:
    """The second worker has two batches more, which are not used: the epoch ends for both."""
    both = ElasticConfig(min_workers=2)
    with Cluster() as cluster, inline(Reading, num_workers=2, elastic=both) as trainer:
        trainer.train(num_steps=35)
        cluster.world.run(1.0, lambda: False)  # meanwhile, the snapshot arrives
        state = trainer.state_dict()
        for worker in cluster.workers:
            worker.die("SIGKILL")
        trainer.train()  # in new processes, from the snapshot
        assert trainer.apply_all_operators(seen) == [numbers(1, 36, 40), numbers(1, 36, 40, rank=1)]
        ended = trainer.state_dict()
        for saved, expected in ((state, (1, 36, 40)), (ended, (2, 1, 40))):
            trainer.apply_all_operators(lambda operator: operator.register_data(**operator.loaders(operator.config)))
            trainer.load_state_dict(saved)
            trainer.train()
            assert trainer.apply_all_operators(seen) == [numbers(*expected), numbers(*expected, rank=1)]
    with inline(Reading) as alone:
        alone.load_state_dict(state)
        alone.train()
        assert seen(operator_of(alone)) == numbers(1, 1, 40)
        assert "that of 2 workers, and there are 1 now" in caplog.text
