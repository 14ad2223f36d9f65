"""Ray Datasets in the class API, on real workers: every row is used once, whichever worker fails."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.data import RayData
from raysgd.errors import ConfigError
from tests.faults import Fault, Ground, LedgerOperator
from tests.torch.small import Line

ray_data = pytest.importorskip("ray.data")

ROWS = 122


@pytest.fixture(autouse=True)
def quiet(ray_cluster: None) -> None:
    ray_data.DataContext.get_current().enable_progress_bars = False


def numbered(rows: int = ROWS, blocks: int = 7) -> Any:
    def widened(batch: dict[str, Any]) -> dict[str, Any]:
        x = torch.randn(len(batch["id"]), 8).numpy()
        return {"index": batch["id"], "x": x, "y": x.sum(axis=1, keepdims=True)}

    # One task at a time, because each process of a task imports for seconds.
    return ray_data.range(rows, override_num_blocks=blocks, concurrency=1).map_batches(widened, concurrency=1)


class RayLedger(LedgerOperator):
    """The `LedgerOperator` of `tests.faults` with rows of a Ray Dataset: batches are (index, x, y)."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        columns: dict[str, Any] = {"batch_size": 4, "features": ["index", ["x"]], "target": "y"}
        self.register_data(
            train_loader=RayData(numbered(), **columns), validation_loader=RayData(numbered(50), **columns)
        )


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Any]:
    made: list[Ground] = []

    def make(**arguments: Any) -> Ground:
        config = {"samples": ROWS, **arguments.pop("config", {})}
        made.append(Ground(tmp_path / str(len(made)), operator=RayLedger, config=config, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.trainer.shutdown()


@pytest.mark.more
def test_every_row_is_used_once_whichever_worker_fails(ground: Any, tmp_path: Path) -> None:
    """Ranks 0 and 1 of three fail before and after a step. Then the group grows in the middle of an epoch. Ray chooses the
    order of rows, which need not be repeatable, because the stream continues. A new trainer begins the stream again, here
    in order, and skips by their numbers the rows that the checkpoint has counted."""
    field = ground(num_workers=3, elastic=ElasticConfig(grow=False))
    trainer = field.trainer
    assert trainer.train()["num_samples"] == ROWS
    field.assert_epoch_exact()
    field.arm(Fault(0, 3), Fault(1, 6, where="after"))
    result = trainer.train()
    assert field.fired() == 2 and trainer.world_size == 1
    assert result["num_samples"] == ROWS
    field.assert_epoch_exact()
    assert trainer.train(num_steps=5)["num_samples"] == 20
    path = trainer.save(tmp_path / "half.pt")
    field.whole_again(3)
    trainer.train()
    field.assert_epoch_exact()
    assert trainer.validate()["num_samples"] == 50
    assert trainer.train(num_steps=13)["num_samples"] == ROWS + 2 * 12, "eleven steps make an epoch"
    assert [r.reason for r in trainer.recoveries] == ["worker death", "worker death", "growth"]

    alone = ground(num_workers=1)
    alone.trainer.load(path)
    alone.trainer.train()
    assert alone.trained() == Counter({row: 3 for row in range(ROWS)})


def table(rows: int = 64) -> Any:
    items = [{"a": float(i % 5), "b": float(i % 3), "y": float(i % 5 + i % 3)} for i in range(rows)]
    return ray_data.from_items(items, override_num_blocks=4)


class Plain(Line):
    """Has no data of its own, unless the config has. Its outputs have the shape of the target, a column of numbers."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": config["data"]} if "data" in config else {}


def test_a_data_set_for_one_call() -> None:
    """Uses the default batch methods. Each call is a separate pass. An error in the user's data reaches the user, and leaves the
    trainer usable."""
    data = RayData(table(), features=["a", "b"], target="y")
    with TorchTrainer(training_operator_cls=Plain, config={"*batch_size": 8, "lr": 0.02}, num_workers=2) as trainer:
        first = trainer.train(dataset=data)
        assert first["num_samples"] == 64
        assert trainer.train(dataset=table(40), num_steps=0)["num_samples"] == 0

        def broken(batch: dict[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError("planned in the data")

        with pytest.raises(Exception, match="planned in the data"):
            trainer.train(dataset=RayData(table().map_batches(broken, concurrency=1), features=["a", "b"], target="y"))
        second = trainer.train(dataset=data, num_steps=3)
        assert second["num_samples"] == 24 and second["train_loss"] < first["train_loss"]


class FailsOnce(Plain):
    """Its third batch fails, but only once."""

    has_failed = False

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["batch_idx"] == 2 and not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("planned")
        return super().train_batch(batch, batch_info)


def test_a_data_set_after_one_that_failed_begins_with_its_first_row() -> None:
    data = RayData(table(), batch_size=8, features=["a", "b"], target="y")
    with TorchTrainer(training_operator_cls=FailsOnce) as trainer:
        with pytest.raises(Exception, match="planned"):
            trainer.train(dataset=data)
        result = trainer.train(dataset=data)
        assert (result["num_samples"], result["epoch"]) == (64, 2)


def test_the_registered_loader_keeps_its_position() -> None:
    """After a call on another data set, and after one that ended in an error."""
    loader = DataLoader(TensorDataset(torch.ones(12, 2), torch.ones(12)), batch_size=4)
    with TorchTrainer(training_operator_cls=Plain, config={"data": loader}) as trainer:
        trainer.train(num_steps=1)
        assert (
            trainer.train(dataset=RayData(table(), batch_size=8, features=["a", "b"], target="y"))["batch_count"] == 8
        )
        with pytest.raises(ConfigError, match="no column z"):
            trainer.train(dataset=RayData(table(), batch_size=4, features="z", target="y"))
        assert trainer.train()["batch_count"] == 2


def test_invalid_data_is_named() -> None:
    with TorchTrainer(training_operator_cls=Plain, config={"data": table()}) as trainer:
        with pytest.raises(ConfigError, match="the Ray Dataset has no batch size"):
            trainer.train()
        with pytest.raises(ConfigError, match="no column z: its columns are a, b, y"):
            trainer.train(dataset=RayData(table(), batch_size=4, features="z", target="y"))
        with pytest.raises(TypeError, match="got a dict"):
            trainer.train(dataset=RayData(table(), batch_size=4))
