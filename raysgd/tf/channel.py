"""Sums over the ranks: one collective for each dtype, in graph functions or outside. Worker."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

GROUP = 1974
CARRIED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)


class Channel:
    """Sums tensors over `size` ranks; with one rank, it returns them unchanged.

    All ranks must call it in the same order and with the same shapes. Gradients are packed, so a
    step has one collective, which either delivers everything or raises an error.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        # Operations that use the token run in program order, also inside one graph function.
        self._token: Any = tf.Variable(0.0, trainable=False) if size > 1 else None

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if self.size == 1 or not inputs:
            return inputs
        answer: list[Any] = list(inputs)
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
            places = [place for place, tensor in enumerate(inputs) if tensor.dtype == dtype]
            for place, tensor in zip(places, self._packed([inputs[place] for place in places]), strict=True):
                answer[place] = tensor
        return answer

    def broadcast(self, tensors: Sequence[Any], *, source: bool) -> list[Any]:
        """Give all ranks the tensors of the one rank that is the source."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        return self.sum(inputs if source else [tf.zeros_like(tensor) for tensor in inputs])

    def _packed(self, tensors: list[Any]) -> list[Any]:
        dtype = tensors[0].dtype
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        carried = flat if dtype in CARRIED else tf.cast(flat, tf.int32)
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        total = tf.raw_ops.CollectiveReduceV2(
            input=carried,
            group_size=self.size,
            group_key=GROUP,
            instance_key=_key(carried.dtype, sum(sizes)),
            ordering_token=[self._token.handle],
            merge_op="Add",
            final_op="Id",
            communication_hint="auto",
        )
        parts = tf.split(tf.cast(total, dtype), sizes)
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _key(dtype: Any, size: int) -> int:
    """A key that is the same on all ranks, which trace graphs at different batches."""
    return zlib.crc32(f"{dtype.name}:{size}".encode()) & 0x7FFFFFFF
