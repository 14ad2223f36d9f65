"""`self.total_steps()` is the number of steps that the optimizer makes, for any number of workers."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from raysgd import ConfigError, TrainingOptions
from tests.replicas import torch_rank
from tests.torch.small import Line, inline, operator_of, rows

DATA = TensorDataset(*rows(26))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def loader(kind: str) -> Any:
    if kind == "own batches":
        return DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=False))
    return DataLoader(DATA, batch_size=4, shuffle=True, drop_last=kind == "drop last")


class Planned(Line):
    """Asks in `setup`, after it has registered the data."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.planned = self.total_steps(config.get("epochs"), config.get("num_steps"))
        self.during: list[int] = []

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": config.get("loader", lambda: loader("plain"))()}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if "ask" in self.config:
            self.during.append(self.total_steps())
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("kind", ["plain", "drop last", "own batches"])
@pytest.mark.parametrize(("workers", "accumulate"), [(1, 3), (2, 1), (3, 3)])
def test_the_optimizer_makes_this_many_steps(kind: str, workers: int, accumulate: int) -> None:
    for num_steps in (None, 2, 5, 20):
        config = {"epochs": 4, "num_steps": num_steps, "loader": lambda: loader(kind)}
        options = TrainingOptions(precision="fp32", accumulate=accumulate)
        rank = torch_rank(Planned, config, ranks=workers, options=options)
        for call in range(4):
            rank.train(call, num_steps)
        assert rank.operator.planned == rank.progress.applied, f"with num_steps={num_steps}"


def test_a_schedule_made_in_setup_ends_with_fit() -> None:
    class Scheduled(Planned):
        def setup(self, config: dict[str, Any]) -> None:
            def schedule(optimizer: Any) -> Any:
                return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, self.total_steps(config["epochs"]))

            super().setup({**config, "scheduler": schedule})

    arguments: dict[str, Any] = {"scheduler_step_freq": "batch", "config": {"epochs": 3, "lr": 0.4, "ask": True}}
    with inline(Scheduled, **arguments) as trainer:
        trainer.fit(3, validate_every=0)
        operator = operator_of(trainer)
        assert operator.optimizer.param_groups[0]["lr"] == pytest.approx(0.1) and operator.planned == 21
        assert set(operator.during) == {21}
        with pytest.raises(ConfigError, match="does not know how many epochs"):
            trainer.train()


def test_during_a_loop_its_length_and_the_number_of_steps_are_known() -> None:
    with inline(Planned, config={"epochs": 1, "ask": True}) as trainer:
        for _ in trainer.epochs(5):
            trainer.train(num_steps=2)
        assert set(operator_of(trainer).during) == {10}


def test_data_without_a_length_needs_num_steps() -> None:
    def stream() -> Any:
        return DataLoader(Stream(), batch_size=2)

    with inline(Planned, config={"epochs": 3, "num_steps": 7, "loader": stream}) as trainer:
        assert operator_of(trainer).planned == 21
    with pytest.raises(ConfigError, match=r"no length that is known in advance: pass total_steps\(epochs=..., num_"):
        inline(Planned, config={"epochs": 3, "loader": stream})
    with inline(Planned, config={"epochs": 3, "loader": lambda: [next(iter(loader("plain")))] * 6}) as trainer:
        assert operator_of(trainer).planned == 18


def test_what_cannot_be_counted_is_an_error() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, r"setup\(\) runs before fit\(\) or epochs\(\) is called: pass total_steps\(epochs=...\)"),
        ({"epochs": 2, "loader": lambda: None}, r"call self.register_data\(train_loader=...\) before it, in setup"),
        ({"epochs": 2, "loader": list}, "the training data has no batch"),
        ({"epochs": 1.5}, "epochs must be a whole number of at least 0, got 1.5"),
        ({"epochs": 2, "num_steps": 0}, "num_steps must be a whole number of at least 1, got 0"),
    ]
    for config, message in wrong:
        with pytest.raises(ConfigError, match=message):
            inline(Planned, config=config)
