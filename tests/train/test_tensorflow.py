"""Training functions with TensorFlow: its data and addresses, and its own strategy on two workers, one of which fails."""

import json
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest

from raysgd import ConfigError, train
from raysgd.train import RunConfig, ScalingConfig, TensorflowTrainer, Trainer
from raysgd.train.replica import is_keras_3_under_a_strategy
from tests.replicas import FunctionRank

pytest.importorskip("tensorflow")


def read_both() -> tuple[Any, list[int]]:
    """Read the shard as batches in two ways. Return what TensorFlow knows of the workers, and the rows."""
    part = train.get_dataset_shard()
    own = train.tensorflow.prepare_dataset_shard(part.to_tf("id", "id", batch_size=7))
    first = sorted(int(row) for features, _ in own for row in features)
    second = sorted(int(row) for batch in part.iter_tf_batches(batch_size=7) for row in batch["id"])
    assert len(first) == len(second) == 10
    return json.loads(os.environ["TF_CONFIG"]), first


def test_each_worker_has_its_index_in_one_cluster_and_its_part_of_the_data(ray_cluster: None, tmp_path: Path) -> None:
    data = pytest.importorskip("ray.data").range(20, override_num_blocks=4)
    trainer = TensorflowTrainer(
        read_both,
        datasets={"train": data},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path),
    )
    (one, rows), (other, more) = trainer.fit().return_values
    assert sorted(rows + more) == list(range(20))
    assert one["cluster"] == other["cluster"] and len(set(one["cluster"]["worker"])) == 2
    assert [each["task"] for each in (one, other)] == [{"type": "worker", "index": rank} for rank in range(2)]


def descend(config: dict[str, str]) -> tuple[float, int, int]:
    """Make six steps towards 1, with a checkpoint each. Rank 1 is killed once, before the fourth."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    found = train.load_checkpoint() or {"weight": 5.0, "epoch": -1}
    with strategy.scope():
        weight = tf.Variable(found["weight"])

    def one() -> None:
        with tf.GradientTape() as tape:
            loss = (weight - 1.0) ** 2
        gradient = tape.gradient(loss, weight)
        replica = tf.distribute.get_replica_context()
        weight.assign_sub(0.1 * replica.all_reduce(tf.distribute.ReduceOp.MEAN, gradient))

    step = tf.function(lambda: strategy.run(one))
    for epoch in range(found["epoch"] + 1, 6):
        mark = Path(config["marks"], "killed")
        if epoch == 3 and train.world_rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        train.save_checkpoint(epoch=epoch, weight=float(weight.numpy()))
    return float(weight.numpy()), strategy.num_replicas_in_sync, os.getpid()


@pytest.mark.more
@pytest.mark.elastic
@pytest.mark.slow
def test_a_function_with_its_own_strategy(ray_cluster: None, tmp_path: Path) -> None:
    with Trainer("tensorflow", num_workers=2, logdir=tmp_path) as trainer:
        before = trainer.worker_group.execute(os.getpid)
        results: list[Any] = trainer.run(descend, {"marks": str(tmp_path)})
        (failure, *_) = trainer.recoveries
    assert (tmp_path / "killed").exists()
    assert failure.reason == "worker death" and not failure.in_place
    for weight, replicas, pid in results:
        assert weight == pytest.approx(1 + 4 * 0.8**6, rel=1e-5), "no step was lost or repeated"
        assert replicas == len(results)
        assert pid not in before


def fit_with_keras_3() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    ones = np.ones((8, 1), "float32")
    model.fit(tf.data.Dataset.from_tensor_slices((ones, ones)).batch(4), verbose=0)


@pytest.mark.more
@pytest.mark.slow
def test_keras_3_under_a_strategy_is_an_error_that_says_what_to_do(ray_cluster: None, tmp_path: Path) -> None:
    with (
        Trainer("tensorflow", num_workers=2, logdir=tmp_path) as trainer,
        pytest.raises(
            ConfigError, match=r"Keras 3 cannot run `fit` .*examples/function_keras\.py.*or train this model with"
        ) as raised,
    ):
        trainer.run(fit_with_keras_3)
    assert "PerReplica" in "".join(traceback.format_exception(raised.value)), "Keras' own error is its cause"


def test_other_errors_are_not_taken_for_that_of_keras_3() -> None:
    def error_of(modules: str, text: str) -> ValueError:
        try:
            exec("def fail(text):\n    raise ValueError(text)\nfail(text)", {"__name__": modules, "text": text})
        except ValueError as error:
            return error
        raise AssertionError

    assert is_keras_3_under_a_strategy(error_of("keras.src.trainers", "a value (PerReplica:{})"))
    assert not is_keras_3_under_a_strategy(error_of("a_loop.of_its_own", "a value (PerReplica:{})"))
    assert not is_keras_3_under_a_strategy(error_of("keras.src.trainers", "shapes do not match"))


def test_a_shard_is_not_divided_again() -> None:
    import tensorflow as tf

    policies = []

    def function() -> None:
        shard = train.tensorflow.prepare_dataset_shard(tf.data.Dataset.range(4))
        policies.append(shard.options().experimental_distribute.auto_shard_policy)

    FunctionRank().run(function)
    assert policies == [tf.data.experimental.AutoShardPolicy.OFF]
    outside = train.tensorflow.prepare_dataset_shard(tf.data.Dataset.range(4))
    assert [int(each) for each in outside] == [0, 1, 2, 3]
