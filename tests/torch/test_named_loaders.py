"""Several validation loaders, each with a name: a metric has one value for each loader, over that loader's own samples."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, ElasticConfig, TorchTrainer
from tests.local.group import Cluster, Fault
from tests.replicas import torch_rank
from tests.torch.small import Line, inline, rows
from tests.torch.test_testing import Noted

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
SIZES = {"short": 3, "long": 11}


def held_out(name: str) -> TensorDataset:
    """Other targets than those of the training, so that each loader has another loss."""
    x, y = rows(SIZES[name])
    return TensorDataset(x, y + len(name))


class Both(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        both = {name: DataLoader(held_out(name), batch_size=2) for name in SIZES}
        return {**super().loaders(config), "validation_loader": both, "test_loader": {"long": both["long"]}}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().validate_batch(batch, batch_info) | {"rows": len(batch[0]), "letters": len(batch_info["loader"])}


def losses(trainer: Any) -> dict[str, Any]:
    with torch.no_grad():
        return {
            name: pytest.approx(nn.functional.mse_loss(trainer.get_model()(x), y).item(), rel=1e-6)
            for name in SIZES
            for x, y in [held_out(name).tensors]
        }


def test_of_one_worker() -> None:
    with inline(Both) as trainer:
        trainer.train()
        found = trainer.validate()
        assert (found["num_samples"], found["batch_count"]) == (14, 8)
        for name, loss in losses(trainer).items():
            assert found[f"val_{name}_loss"] == loss and found[f"val_{name}_letters"] == len(name)
        assert found["val_short_rows"] == pytest.approx(5 / 3) and found["val_long_rows"] == pytest.approx(21 / 11)
        assert found["last_val_short_rows"] == found["last_val_long_rows"] == 1
        own = ("loss", "accuracy", "rows", "letters")
        names = {f"{last}val_{loader}_{name}" for loader in SIZES for name in own for last in ("", "last_")}
        assert set(found) == {"num_samples", "batch_count", *names}
        assert trainer.history[-1]["val_long_loss"] == found["val_long_loss"]
        assert trainer.validate(reduce_results=False) == [found]
        tested = trainer.test()
        assert tested["test_long_loss"] == losses(trainer)["long"] and tested["num_samples"] == 11
        assert not any("val" in name for name in tested)
    assert [row["kind"] for row in trainer.history] == ["train", "validate", "validate", "test"]


def test_each_call_begins_with_the_first_batches_of_each() -> None:
    with inline(Both) as trainer:
        for _ in range(2):
            found = trainer.validate(num_steps=1)
            assert (found["num_samples"], found["batch_count"], found["val_long_rows"]) == (4, 2, 2)
        assert trainer.validate()["num_samples"] == 14


@pytest.mark.parametrize("at", ["short", "long"])
def test_of_several_workers_of_which_one_fails(at: str) -> None:
    class Struck(Both):
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["loader"] == at:
                Cluster.running.point("validating")
            return super().validate_batch(batch, batch_info)

    with (
        Cluster([Fault("kill", "validating", rank=1)]) as cluster,
        TorchTrainer(
            training_operator_cls=Struck, num_workers=3, use_gpu=False, elastic=ElasticConfig(grow=False)
        ) as trainer,
    ):
        trainer.train()
        for workers in (2, 2):
            found = trainer.validate()
            assert not cluster.left and trainer.world_size == workers
            assert found["num_samples"] == 14
            assert {name: found[f"val_{name}_loss"] for name in SIZES} == losses(trainer)
            assert found["val_short_rows"] == 1, "three parts of one row, as with all workers"


def test_registered_metrics_are_those_of_each_loader() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Scored(Both):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.scores = self.register_metrics(validation=torchmetrics.SumMetric())

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.scores.update(len(batch[0]))
            return {}

    with inline(Scored) as trainer:
        for _ in range(2):
            found = trainer.validate()
            assert (found["val_short_sum_metric"], found["val_long_sum_metric"]) == (3, 11)
        assert trainer.test()["test_long_sum_metric"] == 11


def test_a_loop_of_the_users_gets_each_loader() -> None:
    class Looping(Both):
        def validate(self, val_iterator: Any, info: Any = None) -> Any:
            counted = sum(len(batch[0]) for batch in val_iterator)
            return {"counted": counted, "num_samples": counted} if info["reduced"] else (info["loader"], counted)

    with inline(Looping) as trainer:
        found = trainer.validate(info={"reduced": True})
        assert found == {"num_samples": 14, "val_short_counted": 3, "val_long_counted": 11}
        each = trainer.validate(info={"reduced": False}, reduce_results=False)
        assert each == [("short", 3), ("long", 11)]


class Noting(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        noted = {name: DataLoader(Noted(config[name]), batch_size=2) for name in ("one", "two")}
        return {**super().loaders(config), "validation_loader": noted}


def test_the_passes_continue_after_a_load_and_a_repetition() -> None:
    config: dict[str, Any] = {"one": [], "two": []}
    with inline(Noting, config=config) as trainer:
        trainer.validate()
        trainer.validate(num_steps=1)
        state = trainer.state_dict()
    with inline(Noting, config=config) as trainer:
        trainer.load_state_dict(state)
        trainer.validate()
    assert config == {"one": [0, 1, 2], "two": [0, 1, 2]}

    for each in config.values():
        each.clear()
    rank, new = (torch_rank(Noting, config) for _ in range(2))
    rank.validate(1)
    rank.validate(2)
    rank.validate(2)  # a peer had failed
    new.load(rank.state())
    new.validate(2)
    new.validate(3)
    assert config == {"one": [0, 1, 1, 1, 1, 2], "two": [0, 1, 1, 1, 1, 2]}  # twice in the pass that is repeated


def test_what_is_no_loader_is_refused_with_its_name() -> None:
    good = DataLoader(held_out("short"))
    for given, says in (
        ({}, "must be data, or a dict from names to data, got {}"),
        ({"": good}, "a dict from names to data"),
        ({1: good}, "a dict from names to data"),
        ({"a": None}, "a dict from names to data"),
        ({"a": held_out("short")}, r"validation_loader\['a'\] must be a DataLoader .* got the data set"),
        ({"a": {"b": good}}, r"validation_loader\['a'\] must be a DataLoader"),
    ):
        with pytest.raises(ConfigError, match=says):
            operator = type(
                "Wrong", (Line,), {"loaders": lambda self, config, given=given: {"validation_loader": given}}
            )
            inline(operator).validate()
    operator = type("Wrong", (Line,), {"loaders": lambda self, config: {"train_loader": {"a": good}}})
    with pytest.raises(ConfigError, match="train_loader must be a DataLoader"):
        inline(operator).train()


def test_an_empty_loader_is_named() -> None:
    empty = {"full": DataLoader(held_out("short")), "none": []}
    operator = type("Empty", (Line,), {"loaders": lambda self, config: {"validation_loader": empty}})
    with (
        inline(operator) as trainer,
        pytest.raises(ConfigError, match=r"validation_loader\['none'\] returned no batch"),
    ):
        trainer.validate()
