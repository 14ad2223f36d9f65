"""A Keras operator with its data, counters and state, in one worker. It does not use Ray.
Worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.core.batch_mode import GLOBAL, PER_WORKER
from raysgd.core.metrics import Measured
from raysgd.core.outcomes import Interrupted
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import shown
from raysgd.storage.seen import SeenFile
from raysgd.tf import states
from raysgd.tf.channel import Channel
from raysgd.tf.data import OwnSource, SharedSource, make_source
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.parts import assign, rows_in, seed_states
from raysgd.tf.process_group import prepare_runtime
from raysgd.training.feed import Source
from raysgd.training.position import Position
from raysgd.training.replica_base import Phase, ReplicaBase
from raysgd.training.seeding import Places, derived_seed, seed_python_and_numpy
from raysgd.training.settings import ReplicaSettings

# TensorFlow's own default for operations that have a seed, if no global seed is set. So such operations do what they do
# without raysgd, and those without a seed do the same on all workers.
USUAL_SEED = 87654321

OWN_DATA = (
    "%d of %d workers train now, and each keeps its batch size, so steps have another number of samples, and the run will have other "
    "results than one without this change: the data set's auto_shard_policy gives each worker data of its own. To keep the batch of all "
    "workers, use AUTO or DATA"
)


class TFReplica(ReplicaBase):
    """Adds what only TensorFlow needs: each rank's fraction of a batch, Keras metrics, and state as
    arrays."""

    operator_class = TrainingOperator
    data_names = {"train": "train_dataset", "validation": "validation_dataset", "test": "test_dataset"}  # noqa: RUF012

    how_to_step = "call self.step(tape, loss)"

    operator: TrainingOperator

    def __init__(
        self, operator: TrainingOperator, settings: ReplicaSettings, rank_info: RankInfo, control: Control
    ) -> None:
        super().__init__(operator, settings, rank_info, control)
        self._prefix = "train_"

    @classmethod
    def prepare_process(cls, settings: ReplicaSettings) -> None:
        if settings.threads is not None and not settings.distributed:  # otherwise, joining the process group does it
            prepare_runtime(settings.threads, use_gpu=settings.use_gpu)
        if settings.seed is not None:
            seed_python_and_numpy(settings.seed)
        if settings.seed is not None or settings.threads is not None:  # all processes of workers shuffle alike
            tf.random.set_seed(USUAL_SEED if settings.seed is None else settings.seed)

    # -- data -----------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        source = super()._train_source(dataset)
        workers = self._rank_info.world_size
        if isinstance(source, OwnSource) and workers != self.num_workers:
            self.operator._warn_once(OWN_DATA, workers, self.num_workers)
        return source

    def _batch_mode(self) -> str:
        return PER_WORKER if isinstance(self._sources.get("train"), OwnSource) else GLOBAL

    def _open_source(self, data: Any, phase: str) -> Source:
        position, channel, training = self._position_in(phase), self.operator._channel, phase == "train"
        return make_source(data, position, self._rank_info, channel, training=training, places=self.places(phase))

    def _steps_made(self) -> int | None:
        """Loss scaling leaves out steps, and does not count them."""
        scaled = any("LossScale" in type(each).__name__ for each in self.operator._parts.optimizers)
        return None if scaled else self.operator._steps_made()

    def _was_made(self) -> bool:
        return self.operator._part.was_made()

    def _seeding(self, phase: str) -> Callable[..., None] | None:
        """Return what seeds the layers for a place. Python's and NumPy's generators are seeded when
        a pass over the data begins: TensorFlow reads it in threads of its own.
        (`tf.random.set_seed` would let the operations of graph functions repeat their numbers.)"""
        places = self.places(phase)
        return None if places is None else partial(self._seed_layers, places)

    def _seed_layers(self, places: Places, **place: Any) -> None:
        for number, state in enumerate(seed_states(self.operator._parts.models)):
            drawn = derived_seed(places.number(**place), number)
            state.assign(tf.cast([drawn >> 32, drawn & 0xFFFFFFFF], state.dtype))

    # -- results --------------------------------------------------------------------------------------

    def partial(self, result: dict[str, Any] | None = None) -> Measured:
        """Return what the running call has measured so far; Keras metrics are those of this
        rank."""
        found = metric_results(self.operator._metrics(), Channel())
        partial = super().partial(result)
        return replace(partial, metrics={self._prefix + name: found[name] for name in found} | partial.metrics)

    def _partial_to_report(self) -> Measured | None:
        return super().partial()

    def _begin_measuring(self, phase: Phase, profile: bool, *, new_call: bool) -> None:
        super()._begin_measuring(phase, profile, new_call=new_call)
        self._prefix = "train_" if phase == "train" else self.operator._validation_prefix
        for metric in self.operator._metrics():
            metric.reset_state()

    def _add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        for name, value in metric_results(self.operator._metrics(), self.operator._channel).items():
            report.setdefault(self._prefix + name, value)
        return {"stop": self.operator._on_report(self._prefix, report)}

    # -- calls ----------------------------------------------------------------------------------------

    def checkpoint_writer(self, *, later: bool) -> Callable[[Any], None] | None:
        """Return what writes the checkpoint to a file, on rank 0. Training may continue before
        that."""
        if self.rank != 0:
            return None
        content = states.dump(self.full_state())
        return lambda file: file.write(content)

    def predict(self, batches: list[Any]) -> Any:
        """Return this rank's outputs, each with the place of its batch in the data."""
        control, outputs = self._control, []
        source, seed = SharedSource(batches, Position(epoch=1), pad=False), self._seeding("predict")
        for number, drawn in enumerate(source.batches(self._rank_info, 0)):
            if control.interrupted:
                return Interrupted(None, "a peer failed", self.progress)
            if seed is not None:
                seed(epoch=1, offset=drawn.offset, part=self.rank)
            batch = tf.nest.map_structure(tf.convert_to_tensor, drawn.batch)
            output = self.operator.predict_batch(batch, {"batch_idx": number})
            found = tf.nest.map_structure(np.asarray, output)
            if any(leaf.shape[:1] != (rows_in(batch),) for leaf in tf.nest.flatten(found)):
                raise TypeError(
                    "predict_batch must return a tensor with a row for each sample, or a list, tuple or dict of such "
                    f"tensors, got {shown(output)} for {rows_in(batch)} samples"
                )
            outputs.append((drawn.offset, found))
            if control.due():
                control.report(replace(self.progress, batches=number + 1))
        return outputs

    # -- state ----------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any]:
        """Return the operator's state and the position, as a copy."""
        return {**states.gather(self.operator), **self._positions()}

    def _dump(self, state: dict[str, Any]) -> memoryview:
        return states.dump(state)

    def load(self, data: Any, *, other_code: bool = False) -> None:
        """Load the state of another replica of this trainer, in a new process of a group that may
        have another size."""
        state, self.undefined = states.parse(data), True  # until all of it is loaded
        self.adopt(state)
        self.undefined = state.get("undefined", False)
        if state["world_size"] != self._rank_info.world_size:
            self.operator.resized(state["world_size"], self._rank_info.world_size)

    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        if not isinstance(source, SeenFile):
            return states.parse(source.data)
        with source.opened() as file:
            return states.parse(file.read())

    def check(self, state: dict[str, Any]) -> None:
        states.check(self.operator, state)

    def adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, state)
        self._adopt_positions(state)

    def all_succeeded(self, here: bool) -> bool:
        return not int(self.operator._channel.sum([tf.constant(int(not here))])[0])

    def joined(self, rank_info: RankInfo) -> None:
        """Begin a new generation in this process, which is possible only for a group of one."""
        self._cut_short()
        self._rank_info = self.operator._rank_info = rank_info

    def close(self) -> None:
        self.operator._close()
        super().close()


def metric_results(metrics: Sequence[Any], channel: Channel) -> dict[str, Any]:
    """Return each Keras metric's result by its name. Their variables are sums, so summing these
    over the ranks is exact. All ranks must call this at the same time."""
    variables = [variable for metric in metrics for variable in metric.variables]
    if channel.size > 1:
        assign(variables, channel.sum(variables))
    results: dict[str, Any] = {}
    for metric in metrics:
        if not getattr(metric, "built", True):
            continue  # it has not seen a batch yet
        value = metric.result()
        named = value if isinstance(value, dict) else {metric.name: value}
        results |= {
            name: float(number) if getattr(number, "shape", ()) == () else number.numpy()
            for name, number in named.items()
        }
    return results
