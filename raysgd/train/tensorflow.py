"""Helpers for TensorFlow training functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tensorflow as tf

from raysgd.train.backends import TensorflowConfig
from raysgd.train.run_session import current

__all__ = ["TensorflowConfig", "prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """A tf.data.Dataset that holds one rank's own part: TensorFlow is told not to divide it a second time."""
    current("tensorflow.prepare_dataset_shard")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)


def __getattr__(name: str) -> Any:
    """`from raysgd.train.tensorflow import TensorflowTrainer`, as Ray has it. The trainer stands above what functions call."""
    if name == "TensorflowTrainer":
        return getattr(import_module("raysgd.train"), name)
    raise AttributeError(f"module 'raysgd.train.tensorflow' has no attribute {name!r}")
