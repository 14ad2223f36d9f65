"""TFTrainer on several workers: the weights equal those of one worker, also after worker failures."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd import ElasticConfig  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.tf.small import ROWS, Small, arrays, data_creator, make_data, model_creator  # noqa: E402

pytestmark = [pytest.mark.more, pytest.mark.slow]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for got, expected in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)


@functools.cache
def undisturbed(epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with one worker in its own process. Return its state and its last result."""
    with TFTrainer(training_operator_cls=Small, config={}, use_ray=True) as trainer:
        for _ in range(epochs):
            result = trainer.train()
        return trainer.state_dict(), result


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_compiled_models_on_several_workers(ray_cluster: None, workers: int) -> None:
    with TFTrainer(model_creator, data_creator, {}) as trainer:
        expected = [trainer.train(), trainer.train(), trainer.validate()]
        state = trainer.state_dict()
    with TFTrainer(model_creator, data_creator, {}, num_replicas=workers) as trainer:
        results = [trainer.train(), trainer.train(), trainer.validate()]
        same(trainer.state_dict(), state)
        ranks = trainer.train(reduce_results=False)
    for got, wanted in zip(results, expected, strict=True):
        assert got["num_samples"] == wanted["num_samples"] == ROWS
        metrics = [name for name in wanted if name.startswith(("train_", "validation_"))]
        assert {name: got[name] for name in metrics} == pytest.approx(
            {name: wanted[name] for name in metrics}, rel=1e-4
        )
    assert len(ranks) == workers and sum(rank["num_samples"] for rank in ranks) == ROWS


@pytest.mark.elastic
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_worker_fails_in_the_middle_of_an_epoch(ray_cluster: None, tmp_path: Path, rank: int) -> None:
    config = {"fault": (rank, 15, "kill"), "marks": str(tmp_path), "normalized": rank == 1}
    both = ElasticConfig(min_workers=2)  # on a busy machine, one of the new processes can start much later
    with TFTrainer(training_operator_cls=Small, config=config, num_workers=2, elastic=both) as trainer:
        trainer.train()
        result = trainer.train()
        (recovery,) = trainer.recoveries
        state = trainer.state_dict()
    assert (recovery.reason, recovery.removed_ranks, recovery.in_place) == ("worker death", (rank,), False)
    assert recovery.world_size_after == 2 and recovery.batches_redone <= 1
    assert (recovery.epoch, recovery.batch) == (2, 4)
    expected, whole = undisturbed(2) if rank == 0 else (None, None)
    assert (result["epoch"], result["batch_count"], result["num_samples"]) == (2, 11, ROWS)
    if expected is not None and whole is not None:
        same(state, expected)
        assert result["train_loss"] == pytest.approx(whole["train_loss"], rel=0.2)


def weights(operator: Any) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in operator.model.weights]


def test_an_evaluation_is_that_of_the_model_that_is_saved(ray_cluster: None) -> None:
    """Each rank normalizes batches of its own. The moving averages are exchanged in each step."""
    features, targets = make_data()
    with TFTrainer(training_operator_cls=Small, config={"normalized": True}, num_workers=2) as trainer:
        trainer.train()
        first, second = trainer.apply_all_operators(weights)
        assert len(first) == 8 and all(map(np.array_equal, first, second))
        expected = trainer.get_model()(features, training=False)
        np.testing.assert_allclose(trainer.predict(features), expected, atol=1e-6)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)(targets, expected)
        assert trainer.validate()["val_loss"] == pytest.approx(float(loss), abs=1e-6)


@pytest.mark.elastic
@pytest.mark.nightly
def test_a_hang_and_a_resize(ray_cluster: None, tmp_path: Path) -> None:
    config = {"fault": (1, 5, "stop"), "marks": str(tmp_path)}
    elastic = ElasticConfig(hang_timeout_s=15)
    with TFTrainer(training_operator_cls=Small, config=config, num_workers=2, elastic=elastic) as trainer:
        hung = trainer.train()
        trainer.resize(3)
        grown = trainer.train()
        same(trainer.state_dict(), undisturbed(2)[0])
        for _ in range(3):  # on a busy machine a process may take longer to start than the group waits for it
            if trainer.world_size < 3:
                trainer.train()
        reasons = [recovery.reason for recovery in trainer.recoveries]
        assert trainer.world_size > 1
    assert hung["num_samples"] == grown["num_samples"] == ROWS
    # On a busy machine the replacement of the worker that hung may join later, as growth.
    assert reasons[0] == "hang" and set(reasons[1:]) == {"growth"}
