"""`predict` returns the outputs in the order of the data, from any number of workers."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raysgd import ConfigError, TrainingOptions
from tests.local.group import Cluster
from tests.torch.small import Line, Numbers, inline, rows, weights


def expected(trainer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = trainer.get_model()(x)
    return output


def test_a_dataset_and_a_loader_with_and_without_targets() -> None:
    x, y = rows(11)
    with inline() as trainer:
        trainer.train(num_steps=2)
        before = torch.get_rng_state()
        for data in (
            TensorDataset(x, y),
            TensorDataset(x),
            [row for row in x],
            DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True),
            DataLoader(TensorDataset(x, y), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8, 9, 10]]),
        ):
            assert torch.allclose(trainer.predict(data, batch_size=3), expected(trainer, x))
        unshuffled = DataLoader(TensorDataset(x), sampler=DistributedSampler(x, 2, 1, shuffle=False))
        assert torch.allclose(trainer.predict(unshuffled), expected(trainer, x))
        order = [3, 1, 2]
        assert torch.allclose(trainer.predict(DataLoader(TensorDataset(x), sampler=order)), expected(trainer, x[order]))
        assert torch.equal(torch.get_rng_state(), before), "training draws the same random numbers afterwards"
        assert len(trainer.history) == 1
        assert trainer.train()["batch_count"] == 1, "the place in the epoch is kept"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_evaluations_return_fp32(precision: str) -> None:
    class Own(Line):
        def validate(self, val_iterator: Any, info: Any = None) -> Any:
            with torch.no_grad(), self.autocast():
                return [self.model(x) for x, _ in val_iterator]

    x, y = rows(5)
    kept = torch.zeros(5, dtype=torch.float64)
    with inline(Own, options=TrainingOptions(precision=precision)) as trainer:
        (seen,) = trainer.validate(reduce_results=False)
        for output in (trainer.predict(TensorDataset(x, y)), *seen):
            assert output.dtype == torch.float32 and output.numpy() is not None

    class Others(Line):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return {"kept": kept, "half": x.to(torch.bfloat16)}

    with inline(Others) as trainer:
        outputs = trainer.predict(TensorDataset(x, y))
        assert (outputs["kept"].dtype, outputs["half"].dtype) == (torch.float64, torch.bfloat16), "the user's own"


def test_outputs_in_containers_are_joined_and_others_are_refused() -> None:
    class Detailed(Line):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            assert not self.model.training and not torch.is_grad_enabled()
            return {"twice": (2 * batch, -batch), "batch": torch.full_like(batch, batch_info["batch_idx"])}

    class Wrong(Line):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return batch.sum()

    with inline(Detailed) as trainer:
        found = trainer.predict(Numbers(5), batch_size=2)
        assert {name: found[name] for name in ("batch",)}["batch"].tolist() == [0, 0, 1, 1, 2]
        assert [column.tolist() for column in found["twice"]] == [[0, 2, 4, 6, 8], [0, -1, -2, -3, -4]]
    with (
        inline(Wrong) as trainer,
        pytest.raises(TypeError, match="predict_batch must return a tensor with a row for each"),
    ):
        trainer.predict(Numbers(5))


def test_data_without_an_order_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    shuffled = [
        SubsetRandomSampler(range(4)),
        WeightedRandomSampler([1.0] * 4, 4),
        DistributedSampler(Numbers(4), 1, 0),
    ]
    cases: list[tuple[Any, str]] = [
        (Stream(), "needs data with an order"),
        (iter([1]), "needs data with an order"),
        (DataLoader(Numbers(4), shuffle=True), "this loader shuffles: pass shuffle=False"),
        *((DataLoader(Numbers(4), sampler=each), "this loader shuffles") for each in shuffled),
        (DataLoader(Numbers(4), batch_sampler=BatchSampler(shuffled[0], 2, False)), "this loader shuffles"),
        (Numbers(0), "data without a sample"),
    ]
    with inline() as trainer:
        for data, message in cases:
            with pytest.raises(ConfigError, match=message):
                trainer.predict(data)
        with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
            trainer.predict(Numbers(4), batch_size=0)
        assert weights(trainer).shape == (3,)


class MonteCarlo(Line):
    """Predicts with dropout, as a loop by hand may."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        self.unwrapped()[0].train()
        return super().predict_batch(batch, batch_info)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_each_prediction_draws_other_numbers_which_a_seed_decides(seed: int | None, workers: int) -> None:
    def predicted(calls: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        with Cluster(), inline(MonteCarlo, num_workers=workers, seed=seed) as trainer:
            trainer.train()
            found = [trainer.predict(TensorDataset(rows(12)[0])) for _ in range(calls)]
            trainer.train()
            return found, weights(trainer)

    (first, trained), (again, as_trained) = predicted(3), predicted(2)
    assert not any(torch.equal(first[a], first[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    if seed is not None:
        assert all(map(torch.equal, first[:2], again)) and torch.equal(trained, as_trained)
