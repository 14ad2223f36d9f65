"""`trainer.test()` measures on data of its own, and a loader with batch_size=None works or is refused."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd import ConfigError
from raysgd.callbacks import Callback
from tests.replicas import torch_rank
from tests.torch.small import Line, inline, rows, weights


class HeldOut(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**super().loaders(config), "test_loader": DataLoader(TensorDataset(*rows(10)), batch_size=4)}


class OwnBatches(HeldOut):
    def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        assert not self.model.training and not torch.is_grad_enabled() and batch_info["note"] == "last"
        return {"num_samples": len(batch[0]), "first": float(batch[0][0, 0]), "val_of_test": 1.0}


class OwnLoop(HeldOut):
    def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
        return {"val_batches": len([batch for batch in val_iterator]), "num_samples": 3}


def test_a_test_measures_what_a_validation_does_on_its_own_data() -> None:
    kinds: list[str] = []

    class Kinds(Callback):
        def on_result(self, result: Any) -> None:
            kinds.append(result.kind)

    with inline(HeldOut, config={"rows": 12}, callbacks=[Kinds()]) as trainer:
        trainer.train(num_steps=1)
        before, validated = weights(trainer), trainer.validate()
        tested = trainer.test()
        assert tested["num_samples"] == 10 and validated["num_samples"] == 12
        assert {name.replace("test_", "val_") for name in tested} == set(validated)
        x, y = rows(10)
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(trainer.get_model()(x), y)
        assert tested["test_loss"] == pytest.approx(float(loss)) and not any("val" in name for name in tested)
        assert torch.equal(weights(trainer), before)
        assert trainer.test(num_steps=1)["num_samples"] == 4 == trainer.test(num_steps=1)["num_samples"]
        assert trainer.test(reduce_results=False)[0]["test_loss"] == pytest.approx(float(loss))
        assert trainer.validate() == validated and trainer.train()["batch_count"] == 2, "the places are kept"
    assert kinds == ["train", "validate", *["test"] * 4, "validate", "train"]
    assert [row["kind"] for row in trainer.history] == kinds


def test_an_operator_can_have_its_own_test_batch_or_loop() -> None:
    with inline(OwnBatches) as trainer:
        measured = trainer.test(info={"note": "last"})
        assert measured["first"] == pytest.approx((4 * 0.0 + 4 * 0.4 + 2 * 0.8) / 10)
        assert measured["test_of_test"] == 1.0 and "test_loss" not in measured
    with inline(OwnLoop) as trainer:
        assert trainer.test()["test_batches"] == 3 == trainer.validate()["val_batches"]


def test_a_test_without_data_says_what_to_register() -> None:
    with inline() as trainer:
        with pytest.raises(ConfigError, match=r"test\(\) needs data: .*register_data\(test_loader=...\) in Line"):
            trainer.test()
        assert trainer.validate()["num_samples"] == 12


def test_registered_metrics_are_those_of_the_validation_unless_a_test_has_its_own() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(HeldOut):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            names = config["metrics"]
            made = self.register_metrics(**{name: torchmetrics.MeanMetric() for name in names})
            self.means = dict(zip(names, [made] if len(names) == 1 else made, strict=True))

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.means["validation"].update(batch[0][:, 0])
            return {"num_samples": len(batch[0])}

    class Own(Measured):
        def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.means["test"].update(batch[0][:, 0] + 1)
            return {"num_samples": len(batch[0])}

    with inline(Measured, config={"metrics": ["validation"]}) as trainer:
        for _ in range(2):
            assert trainer.test()["test_mean_metric"] == pytest.approx(0.45)
            assert trainer.validate()["val_mean_metric"] == pytest.approx(0.55)
    with inline(Own, config={"metrics": ["validation", "test"]}) as trainer:
        assert trainer.test()["test_mean_metric"] == pytest.approx(1.45)


class Noted(Dataset[int]):
    def __init__(self, epochs: list[int]) -> None:
        self.set_epoch = epochs.append

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return tuple(part[index] for part in rows(4))


class Noting(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        test = DataLoader(Noted(config["epochs"]), batch_size=2)
        return {**super().loaders(config), "test_loader": test}


def test_tests_continue_with_the_next_pass_after_a_load() -> None:
    epochs: list[int] = []
    with inline(Noting, config={"epochs": epochs}) as trainer:
        trainer.test()
        trainer.test(num_steps=1)
        state = trainer.state_dict()
    with inline(Noting, config={"epochs": epochs}) as trainer:
        trainer.test()
        trainer.load_state_dict(state)
        trainer.test()
        trainer.test()
    assert epochs == [0, 1, 0, 2, 3]


def test_a_test_that_is_repeated_is_the_same_pass() -> None:
    epochs: list[int] = []
    rank, new = (torch_rank(Noting, {"epochs": epochs}) for _ in range(2))
    rank.test(1)
    rank.test(2)
    rank.test(2)  # a peer had failed
    new.load(rank.state())
    new.test(2)
    new.test(3)
    assert epochs == [0, 1, 1, 1, 1, 2]  # twice in the pass that is repeated


# -- batch_size=None ----------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Any]):
    """Item i is a batch of three rows."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return tuple(part[3 * index : 3 * index + 3] for part in rows(12))


class Unbatched(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        x, y = rows(12)
        data = Batches() if config.get("batches") else TensorDataset(x, y[:, 0])
        return {
            "train_loader": DataLoader(data, batch_size=None),
            "validation_loader": DataLoader(data, batch_size=None),
        }


def test_a_data_set_of_batches_trains_as_one_of_samples_does() -> None:
    with inline(Unbatched, config={"batches": True}) as trainer, inline(Line, config={"batch": 3}) as plain:
        for each in (trainer, plain):
            result = each.train()
            assert (result["num_samples"], result["batch_count"]) == (12, 4)
        assert torch.equal(weights(trainer), weights(plain))
        data = DataLoader(Batches(), batch_size=None)
        assert torch.equal(trainer.predict(data), plain.predict(TensorDataset(*rows(12)), batch_size=3))


def test_single_samples_are_refused_with_what_to_do() -> None:
    with inline(Unbatched) as trainer:
        for call in (trainer.train, trainer.validate):
            with pytest.raises(ConfigError, match=r"target of this one is a single number.*pass batch_size=n, or"):
                call()
