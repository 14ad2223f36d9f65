"""What becomes of the batch when there are fewer workers: the rows of a data set's batch are divided, other data follows them."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import ConfigError, ElasticConfig  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import Small  # noqa: E402


class Seeded(Small):
    def setup(self, config: dict[str, Any]) -> None:
        keras.utils.set_random_seed(3)
        super().setup(config)


class Own(Seeded):
    """Each worker has data of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self.register_data(train_dataset=self._parts.train_dataset.with_options(options))


def test_the_log_says_once_that_the_batch_follows_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    for operator, mode, lines in ((Seeded, "global", 0), (Own, "per_worker", 1)):
        caplog.clear()
        rank = tf_rank(operator, {}, seed=7, num_workers=3, distributed=True, elastic=ElasticConfig())
        for call in (1, 2):
            rank.train(call)
            assert rank.measured.batch_mode == mode
        said = [each for each in caplog.messages if "keeps its batch size" in each]
        assert len(said) == lines and all("1 worker of 3 trains" in each and "AUTO or DATA" in each for each in said)


@pytest.mark.parametrize("batch", ["global", "per_worker"])
def test_what_becomes_of_the_batch_cannot_be_chosen(batch: Any) -> None:
    with pytest.raises(ConfigError, match=f"batch='{batch}'.* is for TorchTrainer: .* Leave batch out"):
        TFTrainer(training_operator_cls=Seeded, elastic=ElasticConfig(batch=batch))


@pytest.mark.slow
@pytest.mark.elastic
def test_two_workers_and_then_one(ray_cluster: None) -> None:
    elastic = ElasticConfig(hang_timeout_s=120)
    weights = []
    for workers in (2, 1):
        with TFTrainer(training_operator_cls=Seeded, num_workers=workers, seed=7, elastic=elastic) as trainer:
            trainer.train()
            trainer.resize(1)
            trainer.train()
            weights.append(np.concatenate([np.ravel(array) for array in trainer.get_model().get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)
