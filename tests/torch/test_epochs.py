"""Epochs and `num_steps`: each call continues where the previous one stopped."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import ConfigError
from raysgd.torch import TorchTrainer
from tests.torch.small import Line, Numbers, Recording, flat, inline, operator_of

Call = tuple[int | None, int, int]


def seen(trainer: TorchTrainer) -> list[float]:
    numbers = list(flat(operator_of(trainer).seen))
    operator_of(trainer).seen.clear()
    return numbers


@pytest.mark.parametrize(
    "calls",
    [
        # (num_steps, batches done, epoch in which the call ends); an epoch has 3 batches
        [(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 2)],
        [(2, 2, 1), (None, 1, 1), (None, 3, 2)],
        [(3, 3, 1), (None, 3, 2)],
        [(8, 8, 3), (1, 1, 3), (1, 1, 4)],
        [(0, 0, 0), (None, 3, 1)],
    ],
)
def test_num_steps(calls: list[Call]) -> None:
    with inline(Recording) as trainer:
        numbers: list[float] = []
        for num_steps, batches, epoch in calls:
            result = trainer.train(num_steps=num_steps)
            numbers += seen(trainer)
            assert (result["batch_count"], result["epoch"]) == (batches, epoch)
            assert result["num_samples"] == 4 * batches
    assert numbers == [position % 12 for position in range(len(numbers))]


def test_each_validation_begins_with_the_first_batch() -> None:
    with inline(Recording) as trainer:
        for _ in range(2):
            assert trainer.validate(num_steps=2)["val_sum"] == (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7) / 2
            trainer.train(num_steps=1)
            result = trainer.validate()
            assert (result["batch_count"], result["num_samples"], result["val_sum"]) == (3, 12, 66 / 3)
            assert "epoch" not in result
        assert seen(trainer) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert trainer.train()["batch_count"] == 1


@pytest.mark.parametrize("calls", [1, 4])
def test_validations_of_some_batches_continue(calls: int) -> None:
    class Generated:
        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor([number]) for number in range(3))

    def used() -> Iterator[Any]:
        return (torch.tensor([number % 3]) for number in range(12))

    for made in (lambda: DataLoader(Numbers(3)), Generated, lambda: [*Generated()], used):
        with inline(Recording, config={"validation": made}) as trainer:
            found = [trainer.validate(num_steps=4 // calls)["val_sum"] for _ in range(calls)]
            assert found == ([0, 1, 2, 0] if calls == 4 else [3 / 4])
            assert trainer.validate(num_steps=0)["batch_count"] == 0
            assert trainer.validate(num_steps=2)["val_sum"] == (1 + 2) / 2


class Mean(Line):
    """A validation of its own, as in RaySGD's tests."""

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"validation_loader": DataLoader([0, 0, 1, 1])}  # type: ignore[arg-type]

    def validate(self, val_iterator: Iterable[Any], info: Any = None) -> dict[str, Any]:
        numbers = [int(each) for each in val_iterator]
        return {"average": sum(numbers) / len(numbers)}


def test_a_validation_of_ones_own_continues() -> None:
    with inline(Mean) as trainer:
        assert trainer.validate()["average"] == 0.5
        assert [trainer.validate(num_steps=2)["average"] for _ in range(4)] == [0, 1, 0, 1]


def test_any_iterable_is_a_loader() -> None:
    class Generated:
        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor([number]) for number in range(3))

    with inline(Recording, config={"loader": Generated}) as trainer:
        results = [trainer.train(), trainer.train(num_steps=2), trainer.train(num_steps=2)]
        assert [result["epoch"] for result in results] == [1, 2, 3]
        assert seen(trainer) == [0, 1, 2, 0, 1, 2, 0]


def test_an_empty_loader_is_an_error() -> None:
    with inline(Recording, config={"loader": lambda: DataLoader(Numbers(0))}) as trainer:
        for steps in (None, 5):
            with pytest.raises(ConfigError, match=r"train_loader returned no batch.*drop_last"):
                trainer.train(num_steps=steps)
            with pytest.raises(ConfigError, match="validation_loader returned no batch"):
                trainer.validate(num_steps=steps)


def test_a_used_up_generator_is_an_error_in_its_second_epoch() -> None:
    with inline(Recording, config={"loader": lambda: iter([torch.tensor([1])])}) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match="an earlier epoch used up"):
            trainer.train(num_steps=5)


class Stumbling(Recording):
    """Raises an error in its second batch, once: before or after the optimizer's step."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        wrong = self.config["when"] if self.global_step == 1 and not hasattr(self, "stumbled") else ""
        result = super().train_batch(batch, batch_info) if wrong != "before" else {}
        if wrong:
            self.stumbled = True
            raise KeyError("first time")
        return result


@pytest.mark.parametrize(("when", "rest"), [("before", [*range(4, 12)]), ("after", [*range(8, 12)])])
def test_after_an_error_applied_batches_count_and_the_rest_follows(when: str, rest: list[int]) -> None:
    with inline(Stumbling, config={"when": when}) as trainer:
        with pytest.raises(KeyError, match="first time"):
            trainer.train()
        seen(trainer)
        result = trainer.train()
        assert seen(trainer) == rest
        assert result["epoch"] == 1
        assert operator_of(trainer).global_step == 3
        assert trainer.train()["epoch"] == 2


class Leaving(Recording):
    """A custom loop that ends after two batches."""

    def train_epoch(self, iterator: Iterable[Any], info: Any) -> dict[str, Any]:
        done = 0
        for batch in iterator:
            self.train_batch(batch, batch_info={})
            done += 1
            if done == 2:
                break
        return {"done": done}


def test_the_last_batch_of_a_custom_loop_that_ends_early_counts() -> None:
    with inline(Leaving) as trainer:
        results = [trainer.train() for _ in range(3)]
        assert [(result["done"], result["epoch"]) for result in results] == [(2, 1), (1, 1), (2, 2)]
        assert seen(trainer) == [*range(12), *range(8)]


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_training_continues_from_a_checkpoint_of_any_call(calls: int, tmp_path: Any) -> None:
    """Each trainer counts its own calls: the number in a checkpoint must not be mistaken for one of this trainer's."""
    with inline(Recording) as trainer:
        for _ in range(calls):
            trainer.train()
        path = trainer.save(tmp_path / "saved.pt")
    with inline(Recording) as trainer:
        trainer.load(path)
        result = trainer.train()
        assert (result["epoch"], result["num_samples"] > 0) == (calls + 1, True)


def test_leaving_a_with_block_calls_the_shutdown_of_a_subclass() -> None:
    forced: list[bool] = []

    class Own(TorchTrainer):
        def shutdown(self, force: bool = False) -> None:
            forced.append(force)
            super().shutdown(force)

    with Own(training_operator_cls=Line, use_gpu=False):
        pass
    with pytest.raises(KeyError), Own(training_operator_cls=Line, use_gpu=False):
        raise KeyError
    assert forced == [False, True]
