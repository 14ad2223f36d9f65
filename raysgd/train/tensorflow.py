"""Helpers for TensorFlow training functions. Worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raysgd.core.lazy import REFUSED, lazy_names
from raysgd.train.backends import TensorflowConfig
from raysgd.train.sessions import current

__all__ = ["TensorflowConfig", "prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Prepare `tf_dataset_shard` so that TensorFlow does not divide it again."""
    current("tensorflow.prepare_dataset_shard")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)


# As in Ray. The module of this name imports Ray, which the workers do not need.
__path__: list[str] = []  # lets Python look for `raysgd.train.tensorflow.config`, which raysgd.compat provides
_HOMES = {
    "TensorflowTrainer": "raysgd.train.fit.frameworks",
    "TensorflowCheckpoint": REFUSED,
    "TensorflowPredictor": REFUSED,
}
__getattr__ = lazy_names("raysgd.train.tensorflow", _HOMES)[0]
