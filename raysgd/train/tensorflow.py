"""Helpers for TensorFlow training functions. Worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from raysgd.train.backends import TensorflowConfig
from raysgd.train.run_session import current

__all__ = ["TensorflowConfig", "prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Return a tf.data.Dataset of one rank's part with automatic sharding turned off, so that TensorFlow does not
    divide it again."""
    current("tensorflow.prepare_dataset_shard")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)


def __getattr__(name: str) -> Any:
    """Support `from raysgd.train.tensorflow import TensorflowTrainer`, as in Ray, without importing Ray on the
    workers."""
    if name == "TensorflowTrainer":
        from raysgd.train.frameworks import TensorflowTrainer

        return TensorflowTrainer
    raise AttributeError(f"module 'raysgd.train.tensorflow' has no attribute {name!r}")
