"""The class that users of TensorFlow extend: parts of training, and what a batch does. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from raysgd.constants import NUM_SAMPLES
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.internals import Internals
from raysgd.replica.operator_base import OperatorBase, each_loader
from raysgd.replica.settings import ReplicaSettings
from raysgd.replica.steps.step import Policies, Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.tf import foreign
from raysgd.tf.channel import Channel
from raysgd.tf.data import batches_per_epoch
from raysgd.tf.registered import (
    KerasRegistered,
    as_tensor,
    assign,
    build_unbuilt,
    graph_function,
    refuse_arrays,
    refuse_own_steps,
    refuse_sum,
    rows_in,
    running_statistics,
)

NOT_AVERAGED = (
    "train_batch has made a step with the gradients of this worker alone, so the workers would train different models. In place of "
    "optimizer.apply_gradients(...) or minimize(...), call self.step(tape, loss), or self.gradients(tape, loss) and then "
    "self.apply_gradients(gradients, variables, optimizer=...)"
)
OWN_DIVISOR = (
    "the loss divides by the number of positions that are not masked, or by the sum of the sample weights, and each worker does so for "
    "its own rows. Workers are weighed by their rows, so %d workers train other weights than one. For the same weights, use "
    "reduction='sum_over_batch_size', and in place of a mask a sample_weight of 0"
)


class TrainingOperator(OperatorBase):
    """Defines Keras models and their data, and what to do with a batch, in an epoch and in a
    validation.

        class Digits(TrainingOperator):
            def setup(self, config):
                model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=keras.optimizers.Adam(config["lr"]),
                    criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                self.register_data(train_dataset=..., validation_dataset=...)

    A data set's batch is the batch of all workers together; each worker gets its part. Override any
    of its methods; `OperatorBase` shows the loop that calls them. It never deals with processes,
    checkpoints or worker failures.
    """

    model: Any
    optimizer: Any
    criterion: Any
    _registered: KerasRegistered
    _internals: KerasInternals
    _validation_prefix = "val_"  # of metrics that the operator does not name itself

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        settings: ReplicaSettings | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        internals = KerasInternals(
            settings or ReplicaSettings(), rank_info, KerasRegistered(), prefix=self._validation_prefix
        )
        super().__init__(config, internals)
        internals.use(Policies([internals.part]))
        self._set_up()
        if self._registered.is_complete:
            self._complete()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train one step on one `batch`, `(x, y)` or `(x, y, sample_weight)`, as one graph
        function. `batch_info` has `batch_idx`, `global_step`, and what was passed as `info`."""
        x, y, weight = self._unpack(batch, "train_batch")
        with self.timers.record("step"):
            loss = self._train_graph(x, y, weight, self._counts)
        return {"train_loss": loss, NUM_SAMPLES: rows_in(y)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Compute the loss of one `batch`, `(x, y)`, and an accuracy. `batch_info`: as above."""
        x, y, weight = self._unpack(batch, "validate_batch")
        with self.timers.record("eval"):
            loss, accuracy = self._validate_graph(x, y, weight)
        return {"val_loss": loss, "val_accuracy": accuracy, NUM_SAMPLES: rows_in(y)}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Compute the model's output for one `batch` of `trainer.predict()`: a tensor with a row
        for each sample, or a list, tuple or dict of such tensors. A batch is x alone, or `(x, y)`
        or `(x, y, sample_weight)`, of which only x is used. `batch_info` has its `batch_idx`."""
        self._need("predict_batch", "model")
        return self._predict_graph(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def _predict_step(self, x: Any) -> Any:
        return self.model(x, training=False)

    def _train_step(self, x: Any, y: Any, weight: Any, counts: bool) -> Any:
        with tf.GradientTape() as tape:
            output = self.model(x, training=True)
            self._warn_of_divisor([self.criterion], output, weight)
            loss = self._loss(y, output, weight)
            total = tf.add_n([loss, *(tf.cast(extra, loss.dtype) for extra in self.model.losses)])
        self.step(tape, total, model=self.model, optimizer=self.optimizer)
        if counts:
            self._update_metrics(y, output, weight)
        return loss

    def _validate_step(self, x: Any, y: Any, weight: Any) -> Any:
        output = self.model(x, training=False)
        self._update_metrics(y, output, weight)
        return self._loss(y, output, weight), self._accuracy(y, output)

    def _warn_of_divisor(self, losses: Sequence[Any], output: Any, weight: Any) -> None:
        """Warn, once, if a mean on this rank is not over all of its rows."""
        weighs = any(getattr(loss, "reduction", None) == "mean_with_sample_weight" for loss in losses)
        if self._internals.channel.size > 1 and (foreign.has_mask(output) or (weighs and weight is not None)):
            self._internals.warn_once(OWN_DIVISOR, self._internals.channel.size)

    def _accuracy(self, y: Any, output: Any) -> Any:
        """The fraction of right classes; 0 where this has no meaning, as in a regression and for
        several outputs."""
        metrics, losses, criterion = tf.keras.metrics, tf.keras.losses, self.criterion
        if not isinstance(output, tf.Tensor) or not hasattr(y, "shape"):
            return 0.0
        if isinstance(criterion, losses.BinaryCrossentropy):
            threshold = 0.0 if criterion.from_logits else 0.5
            return tf.reduce_mean(metrics.binary_accuracy(y, output, threshold=threshold))
        if isinstance(criterion, losses.CategoricalCrossentropy):
            return tf.reduce_mean(metrics.categorical_accuracy(y, output))
        axes = len(output.shape)
        as_column = isinstance(criterion, losses.SparseCategoricalCrossentropy) and y.shape[-1] == 1
        if axes > 1 and output.shape[-1] != 1 and (len(y.shape) == axes - 1 or (len(y.shape) == axes and as_column)):
            return tf.reduce_mean(metrics.sparse_categorical_accuracy(y, output))
        return 0.0

    def _loss(self, y: Any, output: Any, weight: Any) -> Any:
        loss = self.criterion(y, output) if weight is None else self.criterion(y, output, sample_weight=weight)
        return tf.reduce_mean(loss)

    def _update_metrics(self, y: Any, output: Any, weight: Any) -> None:
        for metric in self._registered.metrics:
            metric.update_state(y, output, sample_weight=weight)

    # -- helpers for custom batches -------------------------------------------------------------------

    def step(self, tape: Any, loss: Any, *, model: Any = None, optimizer: Any = None) -> None:
        """Apply one optimizer step on a `loss`, computed under `tape`, that is a mean over this
        worker's batch, averaged over the workers.

            with tf.GradientTape() as tape:
                loss = self.criterion(y, self.model(x, training=True))
            self.step(tape, loss)

        Works inside a `tf.function` (which is faster) and outside. With several models and
        optimizers, pass the `model` and the `optimizer` to use. Nothing is applied anywhere unless
        every rank's gradients have arrived.
        """
        unconverted = tf.autograph.experimental.do_not_convert  # nothing needs converting, and trying takes seconds
        optimizer = self._chosen(optimizer)
        pairs = unconverted(self.gradients)(tape, loss, model=model, optimizer=optimizer)
        unconverted(self.apply_gradients)(*pairs, optimizer=optimizer)

    def gradients(
        self, tape: Any, loss: Any, *, model: Any = None, optimizer: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of the batch of all workers, which are the same on each of them, and their
        variables. `tape`, `loss`, `model` and `optimizer` are those of `step`. This is the first
        half of `step`, if you want to clip or count gradients. Under mixed_float16 they are still
        scaled."""
        optimizer = self._chosen(optimizer)
        trained = self._registered.trained_by(optimizer) if model is None else list(model.trainable_variables)
        scale = optimizer.scale_loss(tf.ones_like(loss))
        gradients = tape.gradient(
            loss, trained, output_gradients=tf.cast(self._internals.fraction, scale.dtype) * scale
        )
        pairs = [(g, v) for g, v in zip(gradients, trained, strict=True) if g is not None]
        if not pairs:
            raise ConfigError(
                "there are no gradients: the loss depends on none of the trainable variables of the model. Compute it inside "
                "the tape from the model's output"
            )
        return self._sum([tf.convert_to_tensor(gradient) for gradient, _ in pairs]), [variable for _, variable in pairs]

    def _sum(self, gradients: list[Any]) -> list[Any]:
        """Sum the workers' parts of the gradients; average running statistics with them."""
        if self._internals.channel.size == 1:
            return gradients
        parts = [as_tensor(v) * tf.cast(self._internals.fraction, v.dtype) for v in self._internals.statistics]
        arrived = self._internals.channel.sum([*gradients, *parts])
        self._internals.exchanges.assign_add(1)
        with tf.control_dependencies(arrived):
            for variable, mean in zip(self._internals.statistics, arrived[len(gradients) :], strict=True):
                variable.assign(mean)
            return [tf.identity(gradient) for gradient in arrived[: len(gradients)]]

    def apply_gradients(self, gradients: Sequence[Any], variables: Sequence[Any], *, optimizer: Any) -> None:
        """Apply `gradients` to `variables` with this `optimizer`: the second half of `step`."""
        # The optimizer counts its steps without reading the gradients: it must not do so before they have arrived.
        with tf.control_dependencies([tf.convert_to_tensor(gradient) for gradient in gradients]):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @property
    def _counts(self) -> bool:
        """Whether the running batch counts, and is not a repetition."""
        return self._internals.feed.step.current.fresh

    def _chosen(self, optimizer: Any) -> Any:
        registered = self._registered.optimizers
        if optimizer is None and len(registered) != 1:
            raise ConfigError(
                f"{len(registered)} optimizers are registered: pass one of them, step(tape, loss, optimizer=...)"
            )
        return registered[0] if optimizer is None else optimizer

    # -- registration ---------------------------------------------------------------------------------

    def register(self, *, models: Any, optimizers: Any, criterion: Any = None, metrics: Any = None) -> Any:
        """Register the parts of training. Return them, each in the container it came in. A
        criterion or metrics that are not passed are not returned.

        models      a Keras model, or a list or dict of them
        optimizers  one optimizer for all models, or one for each model
        criterion   the loss: a function of the target and the output
        metrics     Keras metrics"""
        registered = self._registered
        registered.models, registered.optimizers = registered.as_list(models), registered.as_list(optimizers)
        if not registered.models or not all(isinstance(model, keras.layers.Layer) for model in registered.models):
            raise ConfigError(
                f"models must be a model of Keras 3, or a list or tuple of them, got {models!r}. In place of Keras 2 "
                "(tf_keras, or tf.keras where TF_USE_LEGACY_KERAS is set), `import keras`"
            )
        if len(registered.optimizers) not in (1, len(registered.models)) or not all(
            hasattr(optimizer, "apply_gradients") for optimizer in registered.optimizers
        ):
            raise ConfigError(
                f"optimizers must be one Keras optimizer, or one for each of the {len(registered.models)} models, "
                f"got {optimizers!r}"
            )
        registered.optimizers = [
            _scaling(optimizer, model)
            for optimizer, model in zip(registered.optimizers, registered.models, strict=False)
        ]
        refuse_own_steps(registered.models, type(self))
        refuse_sum(criterion, "the criterion")
        registered.metrics, registered.criterion = registered.as_list(metrics), criterion
        registered.is_complete = True
        optional = [criterion, None if metrics is None else registered.like(metrics, registered.metrics)]
        ready = [registered.like(models, registered.models), registered.like(optimizers, registered.optimizers)]
        return (*ready, *(each for each in optional if each is not None))

    def register_data(
        self,
        *,
        train_dataset: Any = None,
        validation_dataset: Any = None,
        test_dataset: Any = None,
    ) -> None:
        """Register the data. For validations and tests also a dict of data by name: `val_loss` is
        then `val_NAME_loss`, over the rows of that data.

        train_dataset       a `tf.data.Dataset` of batches, or anything else that can be iterated
                            repeatedly
        validation_dataset  the same, for validations
        test_dataset        the same, for tests"""
        datasets = {
            "train_dataset": train_dataset,
            "validation_dataset": validation_dataset,
            "test_dataset": test_dataset,
        }
        for name, data in datasets.items():
            for called, each in each_loader(name, data):
                refuse_arrays(each, called)
                if each is not None and not hasattr(each, "__iter__") and not hasattr(each, "__getitem__"):
                    raise ConfigError(
                        f"{called} must be a tf.data.Dataset or another iterable of batches, got {each!r}"
                    )
            setattr(self._registered, name, data)

    # -- for the default methods ----------------------------------------------------------------------

    def _batches_per_epoch(self, workers: int) -> int | None:
        return batches_per_epoch(self._train_data("train_dataset"), workers)

    def _samples_in(self, batch: Any) -> float:
        return rows_in(batch)

    _train_graph: Any
    _validate_graph: Any
    _predict_graph: Any

    def _complete(self) -> None:
        """Create all variables that do not exist yet, and give all ranks rank 0's values."""
        self._build()
        self._internals.statistics = running_statistics(self._registered.models)
        weights = [variable for model in self._registered.models for variable in model.weights]
        assign(weights, self._internals.channel.broadcast(weights, source=self.world_rank == 0))

    def _build(self) -> None:
        """Create all variables that do not exist yet, and the graph functions."""
        registered = self._registered
        build_unbuilt(registered)
        for optimizer in registered.optimizers:
            if not getattr(optimizer, "built", False):
                optimizer.build(registered.trained_by(optimizer))
        self._train_graph = graph_function(self._train_step)
        self._validate_graph = graph_function(self._validate_step)
        self._predict_graph = graph_function(self._predict_step)

    def _metrics(self) -> list[Any]:
        return self._registered.metrics

    def _on_report(self, prefix: str, report: dict[str, Any]) -> bool:
        """Called when a call has ended on this rank; `report` is what it returns. Return whether
        the loop over epochs is to end."""
        return False

    def _end_fit(self) -> None:
        """Called when a call of `train` has trained all of the `epochs` in `fit_config`."""

    def _close(self) -> None:
        """Called when the worker ends without an error."""

    def _unpack(self, batch: Any, method: str) -> tuple[Any, Any, Any]:
        self._need(method, "model", "optimizer", "criterion")
        if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
            x, y, *weight = batch
            return x, y, weight[0] if weight else None
        raise TypeError(
            f"the default batch methods take (x, y) or (x, y, sample_weight), got a {type(batch).__name__}: override "
            "train_batch and validate_batch for other kinds of batches"
        )


class KerasInternals(Internals):
    """Adds what only TensorFlow needs.

    channel     connects the ranks
    fraction    this rank's part of the batch: a variable, so that graph functions are not traced
                again when it changes
    exchanges   how often gradients were summed over the ranks: a variable, as graph functions do it
    statistics  variables that training changes besides the weights
    part        sets the fraction
    """

    registered: KerasRegistered

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.channel = Channel(self.rank_info.world_size)
        self.fraction = tf.Variable(1.0, trainable=False)
        self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.statistics: list[Any] = []
        self.part = Part(self)

    def step_was_made(self) -> bool:
        return self.part.step_was_made()


class Part(Policy):
    """Sets this rank's part of a batch. Restores what a step that is undone has changed too
    early."""

    def __init__(self, internals: KerasInternals) -> None:
        self._internals, self._fraction = internals, 1.0
        self._steps = self._exchanges = 0

    def kept(self, step: Step) -> list[Any]:
        several = self._internals.rank_info.world_size > 1
        return [tf.identity(as_tensor(v)) for v in self._internals.statistics] if several else []

    def put_back(self, step: Step, value: list[Any]) -> None:
        if value:
            assign(self._internals.statistics, value)

    def begin_part(self, step: Step) -> None:
        internals = self._internals
        fraction = step.current.weight / internals.rank_info.world_size
        if fraction != self._fraction:
            self._fraction = fraction
            internals.fraction.assign(fraction)
        self._steps = internals.registered.steps_made()
        if internals.rank_info.world_size > 1:
            self._exchanges = int(internals.exchanges)

    def step_was_made(self) -> bool:
        """Whether an optimizer has stepped since the begin: Keras' have no hooks."""
        return self._internals.registered.steps_made() > self._steps

    def before_commit(self, step: Step) -> None:
        """Refuse a step with the gradients of this rank alone."""
        internals = self._internals
        if internals.rank_info.world_size > 1 and self.step_was_made() and int(internals.exchanges) == self._exchanges:
            raise ConfigError(NOT_AVERAGED)


def _scaling(optimizer: Any, model: Any) -> Any:
    """Wrap the optimizer in Keras' loss scaling if the policy is mixed_float16."""
    policy = getattr(getattr(model, "dtype_policy", None), "name", "")
    if policy != "mixed_float16" or "LossScale" in type(optimizer).__name__:
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer)
