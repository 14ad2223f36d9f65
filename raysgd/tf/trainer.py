"""The class API for TensorFlow: a trainer that drives operators on its workers. Driver."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import tensorflow as tf

from raysgd.callbacks.base import Callback
from raysgd.callbacks.callback_list import check_callbacks, wanted_on_workers
from raysgd.config import (
    ORPHAN_S,
    ElasticConfig,
    WorkerResources,
    at_least,
    check_flags,
    refuse_comparison,
    refuse_shares,
)
from raysgd.core.protocols import Call
from raysgd.errors import ConfigError, shown
from raysgd.replica.internals import internals_of
from raysgd.replica.settings import OperatorReplicaFactory, ReplicaSettings
from raysgd.tf import states
from raysgd.tf.compiled import EVALUATE, FIT, CompiledOperator, checked_fit_config, operator_from_creators
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.process_group import TensorFlowBackend
from raysgd.tf.replica import TFReplica
from raysgd.trainer.arguments import check_call, check_common, needs_ray, refuse_unknown
from raysgd.trainer.auto_checkpoint import AutoCheckpoint
from raysgd.trainer.call_runner import exclusive
from raysgd.trainer.description import RunDescription
from raysgd.trainer.loops import opened_folder
from raysgd.trainer.named import checked_name
from raysgd.trainer.trainer_base import TrainerBase

logger = logging.getLogger("raysgd")

OF_TRAINER = {"epochs", "steps_per_epoch", "steps", "verbose"}  # what is for any operator
OF_ALL_WORKERS = "a batch of a TensorFlow data set is that of all workers together, and does not change with them"


class TFTrainer(TrainerBase):
    """Trains Keras models on workers that can fail, leave and join.

        with TFTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1}) as trainer:
            for _ in range(3):
                print(trainer.train(), trainer.validate())
            trainer.save("digits.ckpt")

    Or, as in RaySGD, with a compiled model:
    `TFTrainer(model_creator, data_creator, num_replicas=2)`.

    What `train()` does:

        every worker takes its rows of every batch, computes gradients, averages them, applies them
        a worker fails          -> the others' state is kept, and new processes continue the epoch
        average what the workers measured, weighted by samples; return one dict

    Arguments:

        training_operator_cls  your subclass of `raysgd.tf.TrainingOperator`; or instead of it, as in RaySGD:
        model_creator          a function of the config that returns a compiled Keras model
        data_creator           a function of the config that returns (train_dataset, validation_dataset)
        config                 passed to `setup` or the creators; config["*batch_size"] is the batch of all workers
                               together, config["fit_config"] and config["evaluate_config"] are arguments of Keras' `fit`
                               and `evaluate`
        initialization_hook    a function without arguments, called first in every worker process

        num_workers            the largest number of workers; one runs in this process, without Ray
        num_replicas           RaySGD's name for `num_workers`
        num_cpus_per_worker    CPUs that each worker reserves
        resources_per_worker   Ray resources of each worker, such as {"CPU": 2, "GPU": 1}; overrides the other arguments
        use_gpu                whether workers train on GPUs
        use_ray                True: run a single worker in a process of its own, too
        elastic                an `ElasticConfig`: how training continues when workers fail, leave and join
        timeout_s              limit in seconds for setting up workers
        seed                   seeds the random generators of every worker, for runs that can be repeated exactly

        verbose, use_tqdm      show a progress bar
        callbacks              `raysgd.callbacks.Callback` objects
        logdir                 the folder of callbacks that write, relative to ~/ray_results; by default a new one there
        checkpoints            an `AutoCheckpoint`: makes checkpoints in the loop over `epochs()`, and in `fit()`
        resume                 "auto": load the newest of them, and continue the loop where the script was killed

        name                   lets the workers outlive this script, so that the next one with this name takes them over
        orphan_s               how many seconds they wait for it

    What `TrainingOptions` sets for a `TorchTrainer` is set in Keras: clipping and accumulation on
    the optimizer, mixed precision by Keras' dtype policy.
    """

    def __init__(
        self,
        model_creator: Callable[[dict[str, Any]], Any] | None = None,
        data_creator: Callable[[dict[str, Any]], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_replicas: int | None = None,
        num_cpus_per_worker: float = 1,
        use_gpu: bool = False,
        verbose: bool = False,
        *,
        training_operator_cls: type[TrainingOperator] | None = None,
        num_workers: int | None = None,
        initialization_hook: Callable[[], Any] | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        timeout_s: float = 1800,
        use_tqdm: bool = False,
        use_ray: bool | None = None,
        elastic: ElasticConfig | None = None,
        seed: int | None = None,
        callbacks: Sequence[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
        checkpoints: AutoCheckpoint | None = None,
        resume: Literal["auto"] | None = None,
        name: str | None = None,
        orphan_s: float = ORPHAN_S,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(TFTrainer, unknown, {"elastic": ElasticConfig})
        operator_cls = _operator_class(model_creator, data_creator, training_operator_cls)
        number = _resolve_num_workers(num_replicas, num_workers)
        # The batch size is that of all workers together, as a data set's is, so it is not divided.
        elastic, shown, is_distributed = check_common(
            operator_cls, TrainingOperator, number, initialization_hook, timeout_s, elastic, config
        )
        folder = opened_folder(checkpoints, resume, ".ckpt")
        check_flags(use_gpu=use_gpu)
        resources = WorkerResources.parse(num_cpus_per_worker, use_gpu, resources_per_worker, gpu_asked=use_gpu or None)
        remote = needs_ray(use_ray, is_distributed, resources, elsewhere=name is not None)
        _check_elastic(elastic)
        self._fit, evaluate = (_arguments_for(operator_cls, shown, name) for name in (FIT, EVALUATE))
        self._validation_steps = evaluate.get("steps")
        callbacks = _check_callbacks(callbacks)
        settings = ReplicaSettings(
            use_gpu=resources.gpus > 0,
            use_tqdm=use_tqdm or bool(verbose or self._fit.get("verbose")),
            num_workers=number,
            threads=max(1, int(resources.cpus)) if remote else None,
            seed=seed,
            elastic=elastic,
        )
        described = RunDescription(
            trainer="TFTrainer",
            factory=OperatorReplicaFactory(TFReplica, operator_cls, dict(shown), settings),
            config=shown,
            resources=resources,
            timeout_s=timeout_s,
            make_backend=lambda *, host, join_s, **_: TensorFlowBackend(
                host=host, join_s=join_s, threads=settings.threads, use_gpu=settings.use_gpu
            ),
            hook=initialization_hook,
            callbacks=callbacks,
            logdir=logdir,
            folder=folder,
            named=checked_name(name, orphan_s),
        )
        super().__init__(described)

    @property
    def num_replicas(self) -> int:
        """The argument `num_workers`, under RaySGD's name."""
        workers: int = self._factory.settings.num_workers
        return workers

    # -- training -------------------------------------------------------------------------------------

    @exclusive
    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Train to the end of the epoch, or `num_steps` batches. Return what was measured.

        If `num_steps` is not passed, `fit_config`'s `epochs` and `steps_per_epoch` apply, and the
        last epoch's result is returned. If it has `epochs`, the call is one of Keras' `fit`, with
        its end: `on_train_end`, and averages that become the weights. As in Keras, an epoch is then
        `steps_per_epoch` batches, from where the last one ended in the data. `max_retries` is how
        many worker failures each epoch may have (-1: any number). With `reduce_results=False`,
        return a list with each worker's own results. `profile` and `info` are those of
        `TorchTrainer.train`.
        """
        check_call(num_steps, max_retries, info)
        steps = self._fit.get("steps_per_epoch") if num_steps is None else num_steps
        for _ in range(self._fit.get("epochs", 1) if num_steps is None else 1):
            counts = num_steps is None and steps is not None
            job = self._train_job(steps, profile, info, max_retries, counts=counts, reduced=reduce_results)
            try:
                result, each = self._calls.measure(self._engine, "train", job)
            finally:
                self._loops.end_call()
            if self._calls.stop:
                break
        if num_steps is None and "epochs" in self._fit:
            self._change("the end of train()", Call(TFReplica.end_fit, {}))
        return result if reduce_results else each

    @exclusive
    def predict(self, data: Any, batch_size: int = 32) -> Any:
        """Compute the model's outputs for arrays, or for a `tf.data.Dataset` of batches, as NumPy
        arrays in the order of the data.

        Each worker takes its rows of every batch, and calls `operator.predict_batch`; its outputs
        are concatenated. After a failure, the call is repeated. A data set has its own batch size,
        not `batch_size`. It is read here, in the driver's process.
        """
        at_least("batch_size", batch_size, 1, whole=True)
        self._saves.raise_failed()
        outputs = self._predicted(TFReplica.predict, batches=self._packed(_batches(data, batch_size)))
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    # -- models and state -----------------------------------------------------------------------------

    @exclusive
    def get_model(self) -> Any:
        """Get the trained model, made here by the creator or `setup`; a list of several."""
        models = internals_of(self.get_local_operator()).registered.models
        return models[0] if len(models) == 1 else list(models)

    @exclusive
    def get_local_operator(self) -> TrainingOperator:
        """Get an operator here with the current state; that of an inline worker itself."""
        local: TrainingOperator | None = self._inline_operator()
        if local is None:
            local = self._factory.operator_cls(dict(self.config))
            states.restore(local, internals_of(local).registered, self.state_dict())
        return local

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint as one dictionary of plain values and arrays."""
        return states.parse(self._saves.content())

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, for any number of workers. Every worker checks the state
        first: one that does not fit raises CheckpointError, and changes nothing. After an error in
        your operator's own, the state is undefined: only `load`, `load_state_dict` and `shutdown`
        are accepted."""
        state = states.dump(states.shaped(dict(state_dict)))
        self._load("load_state_dict()", lambda: self._loads.restore(state))

    @exclusive
    def save(self, checkpoint: str | os.PathLike[str], *, blocking: bool = True) -> Any:
        """Save to `checkpoint`, a path or a URI, completely or not at all. Return its absolute
        path, or the URI.

        With `blocking=False`, training can continue as soon as the state was copied in memory, and
        a handle is returned."""
        self._saves.raise_failed()
        return self._saves.save(checkpoint, blocking=blocking)

    @exclusive
    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Load `checkpoint`, a path or a URI, if its checksums and content fit. It runs no code."""
        self._load("load()", lambda: self._loads.load(checkpoint))

    def _load_automatic(self, path: str | os.PathLike[str]) -> None:
        self._loads.load(path)

    def restore(self, checkpoint: str | os.PathLike[str]) -> None:
        """Load `checkpoint`. RaySGD's name for `load`."""
        self.load(checkpoint)


def _operator_class(model_creator: Any, data_creator: Any, training_operator_cls: Any) -> Any:
    """Choose the operator class that was passed, or one made of RaySGD's two creators."""
    if training_operator_cls is None:
        if model_creator is None or data_creator is None:
            raise ConfigError("pass training_operator_cls, or model_creator and data_creator")
        return operator_from_creators(model_creator, data_creator)
    if model_creator is not None or data_creator is not None:
        raise ConfigError("pass either training_operator_cls or the creators, not both")
    return training_operator_cls


def _arguments_for(operator_cls: type[TrainingOperator], config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read `config[name]`. Warn of arguments that only compiled models use."""
    arguments = checked_fit_config(config, name)
    unused = [key for key, value in arguments.items() if key not in OF_TRAINER and value is not None]
    if unused and not issubclass(operator_cls, CompiledOperator):
        logger.warning(
            "config[%r] has %s, which only compiled models use, so it has no effect, unless %s reads it itself. Leave it out, or pass "
            "model_creator and data_creator",
            *(name, ", ".join(unused), operator_cls.__name__),
        )
    return arguments


def _batches(data: Any, batch_size: int) -> list[Any]:
    """Divide what `predict` got into batches. Raise ConfigError for none, and for no end."""
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ConfigError("predict() got a data set without an end: call .take(n) on it")
        if any(not len(spec.shape) for spec in tf.nest.flatten(data.element_spec) if spec.shape.rank is not None):
            raise ConfigError("predict() needs a data set of batches, got one of single samples: call .batch(n) on it")
        batches = list(data.as_numpy_iterator())
    else:
        arrays = tf.nest.map_structure(np.asarray, data)
        lengths = {len(leaf) if leaf.ndim else -1 for leaf in tf.nest.flatten(arrays)}
        if len(lengths) != 1 or -1 in lengths:
            raise ConfigError(
                "predict() needs arrays with the same number of rows (one array, or a tuple or dict of arrays), or a "
                f"tf.data.Dataset of batches, got {shown(data)}"
            )
        parts = [slice(start, start + batch_size) for start in range(0, max(lengths), batch_size)]
        batches = [tf.nest.map_structure(operator.itemgetter(part), arrays) for part in parts]
    if not batches:
        raise ConfigError(f"predict() got data without a sample: {shown(data)}")
    return batches


def _resolve_num_workers(num_replicas: int | None, num_workers: int | None) -> int:
    """Choose `num_workers`, which RaySGD called `num_replicas`, or 1 if neither was passed."""
    for name, number in {"num_replicas": num_replicas, "num_workers": num_workers}.items():
        if number is not None:
            at_least(name, number, 1, whole=True)
    if None not in (num_replicas, num_workers) and num_replicas != num_workers:
        raise ConfigError(
            f"num_replicas={num_replicas} and num_workers={num_workers} mean the same, and differ: pass one"
        )
    return num_workers or num_replicas or 1


def _check_elastic(elastic: ElasticConfig) -> None:
    """Raise ConfigError for fields that have no effect here."""
    refuse_shares(elastic)
    refuse_comparison(elastic, "a TFTrainer does not compare them")
    if elastic.batch != "auto":
        raise ConfigError(
            f"ElasticConfig(batch={elastic.batch!r}) is for TorchTrainer: {OF_ALL_WORKERS}. Leave batch out"
        )


def _check_callbacks(callbacks: Any) -> list[Callback]:
    """Raise ConfigError for callbacks that need PyTorch on the workers."""
    checked = check_callbacks(callbacks)
    if wanted_on_workers(checked):
        raise ConfigError("TorchProfilerCallback works with PyTorch only: pass it to a TorchTrainer")
    return checked
