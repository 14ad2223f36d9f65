"""All private names of TensorFlow and Keras that raysgd uses. Worker.

Checked with TensorFlow 2.21 and Keras 3.15. `tests/package/test_foreign.py` calls every function
here, and names the first private name that a new version no longer has. TensorFlow is imported
inside the functions, because a training function may not have loaded it yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

UNAVAILABLE = 14  # the gRPC status that TensorFlow raises as UnavailableError

# -- collectives --------------------------------------------------------------------------------------


def set_coordination_limits(size: int, *, join_s: float, heartbeat_s: float) -> None:
    """Set how long `size` ranks wait for one that does not join, and for one whose heartbeats stop.
    TensorFlow's default is an hour. Call this before TensorFlow's first operation."""
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(join_s * 1000),
        heartbeat_timeout_in_ms=int(heartbeat_s * 1000),
        coordinated_jobs=[context.coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=size)],
    )


def abort_collectives() -> None:
    """Raise UnavailableError in this process's collectives, now and later. Do nothing if TensorFlow
    has not run an operation here. It may be called from any thread."""
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is not None and context.context()._initialized:
        context.context().abort_collective_ops(UNAVAILABLE, "a peer left this generation")


# -- data sets ----------------------------------------------------------------------------------------


def batch_size(data: Any) -> int:
    """A data set's batch size, or -1 if it is not known."""
    from tensorflow.python.data.experimental.ops import distribute

    return int(distribute.compute_batch_size(data))


def shard_by_file(data: Any, num_shards: int, index: int) -> Any:
    """Make a data set that reads each `num_shards`-th of the files, from `index` on."""
    from tensorflow.python.data.experimental.ops import distribute

    return distribute._AutoShardDataset(data, num_workers=num_shards, index=index)


# -- Keras --------------------------------------------------------------------------------------------


def has_mask(output: Any) -> bool:
    """Whether a loss leaves out positions of this output of a model, or of one of these."""
    import tensorflow as tf

    return any(getattr(each, "_keras_mask", None) is not None for each in tf.nest.flatten(output))


def layers_without_inner_ones(model: Any) -> Iterator[Any]:
    """Yield the layers of a model that do not consist of other layers."""
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if next(iter(layer._flatten_layers(include_self=False, recursive=True)), None) is None:
            yield layer


def times_applied(optimizer: Any) -> int:
    """How often gradients were applied. `iterations` counts them only when Keras has accumulated
    those of several batches."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
    return int(inner._iterations)
