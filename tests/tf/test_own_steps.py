"""Keras models with a train_step or test_step of their own: the weights and the results are those of Keras' fit and evaluate."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.tf.own_models import data_creator, model_creator  # noqa: E402
from tests.tf.small import ROWS, arrays  # noqa: E402


def trainer_of(model: str, **given: Any) -> TFTrainer:
    config = {"model": model, **given.pop("config", {})}
    return TFTrainer(model_creator, data_creator, config, **given)


@pytest.mark.parametrize("model", ["tracked", "gan", "eager", "penalized"])
def test_one_worker_does_what_fit_does(model: str) -> None:
    config = {"model": model}
    train, test = data_creator(config)
    theirs = model_creator(config)
    history = theirs.fit(train, epochs=2, verbose=0).history
    with trainer_of(model) as trainer:
        first, second = trainer.train(), trainer.train()
        mine = trainer.get_model()
        for expected, got in zip(theirs.get_weights(), mine.get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
        for name, (one, other) in history.items():
            assert first[f"train_{name}"] == pytest.approx(one, rel=1e-3, abs=1e-5)
            assert second[f"train_{name}"] == pytest.approx(other, rel=1e-3, abs=1e-5)
        assert {name for name in first if name.startswith("train_")} == {f"train_{name}" for name in history}
        assert (first["num_samples"], first["batch_count"]) == (ROWS, 6)
        if model != "gan":  # Keras has no test step for a model without a call
            expected = theirs.evaluate(test, verbose=0, return_dict=True)
            result = trainer.validate()
            for name, value in expected.items():
                assert result[f"validation_{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5)


def test_a_checkpoint_has_all_optimizers(tmp_path: Path) -> None:
    with trainer_of("gan") as trainer:
        trainer.train()
        path = trainer.save(tmp_path / "gan.ckpt")
        trainer.train()
        expected = trainer.state_dict()
    with trainer_of("gan") as trainer:
        trainer.load(path)
        trainer.train()
        state = trainer.state_dict()
    assert len(state["optimizers"]) == 3, "the one that Keras compiles by default is among them"
    for got, wanted in zip(arrays(state), arrays(expected), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_class_weights_reach_the_models_own_step() -> None:
    weights = {0: 0.5, 1: 1.0, 2: 4.0}
    config = {"model": "penalized"}
    theirs = model_creator(config)
    theirs.fit(data_creator(config)[0], epochs=1, verbose=0, class_weight=weights)
    with trainer_of("penalized", config={"fit_config": {"class_weight": weights}}) as trainer:
        trainer.train()
        for expected, got in zip(theirs.get_weights(), trainer.get_model().get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("model", ["tracked", "gan"])
def test_two_workers_train_as_one(ray_cluster: None, model: str) -> None:
    with trainer_of(model) as trainer:
        expected = [trainer.train(), trainer.train()]
        if model == "tracked":
            expected.append(trainer.validate())
        weights = copy.deepcopy(trainer.get_model().get_weights())
    with trainer_of(model, num_replicas=2) as trainer:
        results = [trainer.train(), trainer.train()]
        if model == "tracked":
            results.append(trainer.validate())
        mine = trainer.get_model().get_weights()
    for got, wanted in zip(mine, weights, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)
    for result, wanted in zip(results, expected, strict=True):
        assert result["num_samples"] == wanted["num_samples"] == ROWS
        names = [name for name in wanted if name.startswith(("train_", "validation_"))]
        assert {name for name in result if name.startswith(("train_", "validation_"))} == set(names) != set()
        for name in names:
            assert result[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.slow
def test_gradients_that_cannot_be_averaged_are_refused(ray_cluster: None) -> None:
    with (
        trainer_of("hidden", num_replicas=2) as trainer,
        pytest.raises(ConfigError, match=r"Hidden.train_step changes the weights differently on each worker"),
    ):
        trainer.train()
