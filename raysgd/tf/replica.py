"""A Keras operator with its data, counters and state, in one worker. It does not use Ray.
Worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.core.outcomes import Interrupted
from raysgd.core.ranks import RankInfo
from raysgd.errors import shown
from raysgd.replica.replica_base import ReplicaBase
from raysgd.replica.seeding import Places, derived_seed, seed_python_and_numpy
from raysgd.replica.settings import ReplicaSettings
from raysgd.replica.snapshots import Copied
from raysgd.replica.steps.feed import Source
from raysgd.replica.steps.position import Position
from raysgd.storage.seen import SeenFile
from raysgd.tf import states
from raysgd.tf.data import OwnSource, SharedSource, make_source
from raysgd.tf.operator import KerasInternals, TrainingOperator
from raysgd.tf.process_group import prepare_runtime
from raysgd.tf.registered import rows_in, seed_states
from raysgd.tf.results import KerasResults

# TensorFlow's own default for operations that have a seed, if no global seed is set. So such operations do what they do
# without raysgd, and those without a seed do the same on all workers.
USUAL_SEED = 87654321

OWN_DATA = (
    "%d of %d workers train now. Each keeps its batch size, because the data set's auto_shard_policy gives each worker data of its own. "
    "Steps have a different number of samples, and results differ from those of an undisturbed run. To keep the batch of all workers, "
    "use AUTO or DATA"
)


class TFReplica(ReplicaBase):
    """Adds what only TensorFlow needs: each rank's fraction of a batch, Keras metrics, and state as
    arrays."""

    operator_class = TrainingOperator
    data_names = {"train": "train_dataset", "validation": "validation_dataset", "test": "test_dataset"}  # noqa: RUF012

    operator: TrainingOperator
    internals: KerasInternals

    def _make_results(self) -> KerasResults:
        return KerasResults(self.operator, self.internals, self.sources)

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
        workers, asked = self.internals.rank_info.world_size, self.internals.settings.num_workers
        if isinstance(source, OwnSource) and workers != asked:
            self.internals.warn_once(OWN_DATA, workers, asked)
        return source

    def _open_source(self, data: Any, phase: str) -> Source:
        position, channel, training = self.position_in(phase), self.internals.channel, phase == "train"
        return make_source(
            data, position, self.internals.rank_info, channel, training=training, places=self.places(phase)
        )

    def seeding(self, phase: str) -> Callable[..., None] | None:
        """What seeds the layers for a place. Python's and NumPy's generators are seeded when a pass
        over the data begins: TensorFlow reads it in threads of its own. (`tf.random.set_seed` would
        let the operations of graph functions repeat their numbers.)"""
        places = self.places(phase)
        return None if places is None else partial(self._seed_layers, places)

    def _seed_layers(self, places: Places, **place: Any) -> None:
        for number, state in enumerate(seed_states(self.internals.registered.models)):
            drawn = derived_seed(places.number(**place), number)
            state.assign(tf.cast([drawn >> 32, drawn & 0xFFFFFFFF], state.dtype))

    # -- calls ----------------------------------------------------------------------------------------

    def checkpoint_writer(self, *, later: bool) -> Callable[[Any], None] | None:
        """What writes the checkpoint to a file, on rank 0. Training may continue before that."""
        if self.rank != 0:
            return None
        state = states.unchanging(self.full_state())
        return lambda file: file.write(states.dump(state))

    def predict(self, batches: list[Any], number: int) -> Any:
        """Compute this rank's outputs, each with the place of its batch in the data. `number` is
        that of the prediction."""
        control, outputs = self.control, []
        source, seed = SharedSource(batches, Position(epoch=1), pad=False), self.seeding("predict")
        for index, drawn in enumerate(source.batches(self.internals.rank_info, 0)):
            if control.interrupted:
                return Interrupted(None, "a peer failed", self.progress)
            if seed is not None:
                seed(epoch=number, offset=drawn.offset, part=self.rank)
            batch = tf.nest.map_structure(tf.convert_to_tensor, drawn.batch)
            output = self.operator.predict_batch(batch, {"batch_idx": index})
            arrays = tf.nest.map_structure(np.asarray, output)
            if any(leaf.shape[:1] != (rows_in(batch),) for leaf in tf.nest.flatten(arrays)):
                raise TypeError(
                    "predict_batch must return a tensor with a row for each sample, or a list, tuple or dict of such "
                    f"tensors, got {shown(output)} for {rows_in(batch)} samples"
                )
            outputs.append((drawn.offset, arrays))
            if control.due():
                control.report(replace(self.progress, batches=index + 1))
        return outputs

    def end_fit(self) -> None:
        self.operator._end_fit()

    # -- state ----------------------------------------------------------------------------------------

    def full_state(self, *, for_peers: bool = False) -> dict[str, Any]:
        """Copy the operator's state and the position."""
        return {**states.gather(self.operator, self.internals.registered), **self.positions()}

    def copy(self, state: dict[str, Any]) -> tuple[Copied, int]:
        arrays = [each for kind in ("models", "optimizers") for group in state[kind] for each in group]
        return states.packed(states.unchanging(state)), sum(each.nbytes for each in arrays)

    def _dump(self, state: dict[str, Any]) -> memoryview:
        return states.dump(state)

    def load(self, data: Any) -> None:
        """Load the state of another replica of this trainer, in a new process of a group that may
        have another size."""
        state, self.undefined = states.parse(data), True  # until all of it is loaded
        self.adopt(state)
        self.undefined = state.get("undefined", False)
        if state["world_size"] != self.internals.rank_info.world_size:
            self.operator.resized(state["world_size"], self.internals.rank_info.world_size)

    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        if not isinstance(source, SeenFile):
            return states.parse(source.data)
        with source.opened() as file:
            return states.parse(file.read())

    def check(self, state: dict[str, Any]) -> None:
        states.check(self.internals.registered, state)

    def adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, self.internals.registered, state)
        self._adopt_positions(state)

    def all_succeeded(self, here: bool) -> bool:
        return not int(self.internals.channel.sum([tf.constant(int(not here))])[0])

    def joined(self, rank_info: RankInfo) -> None:
        """Begin a new generation in this process, which is possible only for a group of one."""
        self.internals.join(rank_info)

    def close(self) -> None:
        self.operator._close()
        super().close()
