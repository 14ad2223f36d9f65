"""A data set that gives each worker data of its own: the batch of all workers follows their number, which the log says."""

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import Small  # noqa: E402


class Own(Small):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self.register_data(train_dataset=self._registered.train_dataset.with_options(options))


@pytest.mark.parametrize(("operator", "mode", "lines"), [(Small, "global", 0), (Own, "per_worker", 1)])
def test_the_log_says_once_that_the_batch_follows_the_workers(
    caplog: pytest.LogCaptureFixture, operator: type[Small], mode: str, lines: int
) -> None:
    rank = tf_rank(operator, num_workers=3)
    for call in (1, 2):
        rank.train(call)
        assert rank.measured.batch_mode == mode
    said = [each for each in caplog.messages if "keeps its batch size" in each]
    assert len(said) == lines and all("1 of 3 workers train" in each and "AUTO or DATA" in each for each in said)
