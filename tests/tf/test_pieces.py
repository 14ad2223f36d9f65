"""With `ElasticConfig(batch="global")`, a worker of fewer computes no more rows at once, and the weights stay the same."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import ConfigError, ElasticConfig  # noqa: E402
from raysgd.tf import TFTrainer, TrainingOperator  # noqa: E402
from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import Small, data_creator, model_creator  # noqa: E402


class Noting(Small):
    """Notes the size of each batch that it gets. With `direct`, its step is in a graph function of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        keras.utils.set_random_seed(3)
        super().setup(config)
        self.sizes: list[int] = []
        self.graph = tf.function(self.one_step, autograph=False)

    def one_step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.criterion(y, self.model(x, training=True))
        self.step(tape, loss)
        return loss

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.sizes.append(len(batch[1]))
        if self.config.get("direct"):
            return {"train_loss": self.graph(*batch), "num_samples": len(batch[1])}
        return super().train_batch(batch, batch_info)


def replica_of(operator: Any, *, in_pieces: bool, **config: Any) -> Any:
    elastic = ElasticConfig(batch="global" if in_pieces else "auto")
    return tf_rank(operator, config, seed=7, num_workers=3, distributed=True, elastic=elastic)


def weights_of(model: Any) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in model.get_weights()])


@pytest.mark.parametrize("direct", [False, True])
def test_one_worker_of_three(direct: bool) -> None:
    results, found = [], []
    for in_pieces in (False, True):
        replica = replica_of(Noting, in_pieces=in_pieces, direct=direct)
        results.append(replica.train())
        found.append(weights_of(replica.operator.model))
        assert max(replica.operator.sizes) == (4 if in_pieces else 10)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    for name in ("batch_count", "num_samples", "train_loss"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5)
    assert int(replica.operator.optimizer.iterations) == replica.progress.step == 11


def test_a_compiled_model() -> None:
    found, batches = [], []

    class Counts(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            batches.append(batch)

    for in_pieces in (False, True):
        creators = (model_creator, data_creator)
        replica = replica_of(creators, in_pieces=in_pieces, fit_config={"callbacks": [Counts()]})
        report = replica.train()
        found.append([*weights_of(replica.operator.model), report["train_accuracy"]])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert batches == [*range(6), *range(6)]


class Twice(Noting):
    def one_step(self, x: Any, y: Any) -> Any:
        super().one_step(x, y)
        return super().one_step(x, y)


class Halves(Noting):
    def one_step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.criterion(y, self.model(x, training=True))
        gradients, variables = self.gradients(tape, loss)
        self.apply_gradients(gradients, variables, optimizer=self.optimizer)
        return loss


@pytest.mark.parametrize(("operator", "says"), [(Twice, "several steps in a batch"), (Halves, r"call self.step\(tape")])
def test_what_cannot_be_divided_is_refused_in_the_first_batch(operator: type[TrainingOperator], says: str) -> None:
    replica = replica_of(operator, in_pieces=True, direct=True)
    with pytest.raises(ConfigError, match=f"batch='global'.*{says}"):
        replica.train()


class Own(Noting):
    """Each worker has data of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self.register_data(train_dataset=self._parts.train_dataset.with_options(options))


def test_by_default_the_log_says_once_that_the_batch_follows_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    for operator, mode, lines in ((Noting, "global", 0), (Own, "per_worker", 1)):
        caplog.clear()
        rank = replica_of(operator, in_pieces=False)
        for call in (1, 2):
            rank.train(call)
            assert rank.measured.batch_mode == mode
        said = [each for each in caplog.messages if "keeps its batch size" in each]
        assert len(said) == lines and all("1 worker of 3 trains" in each and "AUTO or DATA" in each for each in said)


def test_a_data_set_whose_workers_have_their_own_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot divide a data set whose auto_shard_policy is OFF"):
        replica_of(Own, in_pieces=True).train()


@pytest.mark.slow
@pytest.mark.elastic
def test_two_workers_and_then_one(ray_cluster: None) -> None:
    elastic = ElasticConfig(batch="global", hang_timeout_s=120)
    with TFTrainer(training_operator_cls=Noting, num_workers=2, seed=7, elastic=elastic) as trainer:
        trainer.train()
        trainer.resize(1)
        trainer.train()
        assert max(trainer.apply_all_operators(lambda operator: max(operator.sizes))) == 5
        mine = weights_of(trainer.get_model())
    with TFTrainer(training_operator_cls=Noting, seed=7) as alone:
        for _ in range(2):
            alone.train()
        np.testing.assert_allclose(mine, weights_of(alone.get_model()), rtol=1e-4, atol=1e-5)
