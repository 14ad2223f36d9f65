"""The class API for PyTorch: a trainer that drives operators on its workers. Driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import torch

from raysgd.callbacks.base import Callback
from raysgd.callbacks.callback_list import check_callbacks
from raysgd.config import ORPHAN_S, ElasticConfig, check_flags
from raysgd.core import offers
from raysgd.core.protocols import Call
from raysgd.core.snapshot import Snapshot
from raysgd.errors import CheckpointError, ConfigError, suggesting
from raysgd.replica.internals import internals_of
from raysgd.torch import replica_calls, setup
from raysgd.torch.foreign import content_version
from raysgd.torch.group.strategies import choose_strategy
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.options import TrainingOptions
from raysgd.torch.settings import TorchSettings
from raysgd.torch.state import states
from raysgd.torch.state.hyperparameters import plain
from raysgd.torch.state.models import unpacked_models
from raysgd.torch.state.sharded import ShardedLoads, save_shards
from raysgd.trainer.arguments import check_call, check_common, refuse_unknown
from raysgd.trainer.auto_checkpoint import AutoCheckpoint
from raysgd.trainer.call_runner import exclusive
from raysgd.trainer.description import RunDescription
from raysgd.trainer.loads import DrawnAnew
from raysgd.trainer.loops import opened_folder
from raysgd.trainer.named import checked_name
from raysgd.trainer.trainer_base import TrainerBase

logger = logging.getLogger("raysgd")

CHANGED_COPY = (
    "the script has changed what %s returned. That is a copy, so training continues without the change. Make the change with "
    "trainer.apply_all_operators(fn). Ignore this if only the copy should change"
)


class TorchTrainer(TrainerBase):
    """Trains a `TrainingOperator` on workers that can fail, leave and join.

        with TorchTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1}) as trainer:
            for _ in range(3):
                print(trainer.train(), trainer.validate())
            trainer.save("digits.pt")

    What `train()` does:

        every worker runs operator.train_epoch on its part of the epoch
        a worker fails          -> the others form a new process group and continue the epoch
        machines become free    -> new workers join at a batch boundary
        average what the workers measured, weighted by samples; return one dict

    Arguments, all by keyword:

        training_operator_cls    your subclass of `TrainingOperator`
        initialization_hook      a function without arguments, called first in every worker process
        config                   passed to the operator's `setup`; config["*batch_size"] is the batch of all workers together
        options                  a `TrainingOptions`: precision, accumulation, clipping, compiling, DDP and FSDP
        elastic                  an `ElasticConfig`: how training continues when workers fail, leave and join

        num_workers              the largest number of workers; one runs in this process, without Ray
        parts                    into how many parts a batch is divided, at least `num_workers`, which is the default
        num_cpus_per_worker      CPUs that each worker reserves
        resources_per_worker     Ray resources of each worker, such as {"CPU": 2, "GPU": 1}; overrides the other arguments
        use_gpu                  "auto": if the cluster has a GPU, or, for one worker in this process, this machine
        use_ray                  True: run a single worker in a process of its own, too
        timeout_s                limit in seconds for setting up workers, and for a single collective call
        backend                  "auto": "nccl" on GPUs, else "gloo"; or "horovod"
        horovod_args             arguments of Horovod, for backend="horovod"

        scheduler_step_freq      when the default loop steps the schedulers: after each "batch", "step" or "epoch", or "manual" (never)
        add_dist_sampler         divide the registered data among the workers
        seed                     seeds the random generators of every worker, for runs that can be repeated exactly
        wrap_ddp                 RaySGD's name for `options.parallel`: True is "ddp", False is None
        use_fp16                 RaySGD's name for `options.precision`: True is "fp16", "apex" is "apex"

        use_tqdm                 show a progress bar
        callbacks                `raysgd.callbacks.Callback` objects
        logdir                   the folder of callbacks that write, relative to ~/ray_results; by default a new one there
        checkpoints              an `AutoCheckpoint`: makes checkpoints in the loop over `epochs()`, and in `fit()`
        resume                   "auto": load the newest of them, and continue the loop where the script was killed

        name                     lets the workers outlive this script, so that the next one with this name takes them over
        orphan_s                 how many seconds they wait for it
    """

    _loads: ShardedLoads
    _lent: Mapping[Any, Any] = MappingProxyType({})  # copies since the last call of `train`, with their states, weak
    _newest: TrainingOperator | None = None  # of these
    _in_parts = True

    @suggesting
    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator] | None = None,
        initialization_hook: Callable[[], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        options: TrainingOptions | None = None,
        elastic: ElasticConfig | None = None,
        num_workers: int = 1,
        parts: int | None = None,
        num_cpus_per_worker: float = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool | Literal["auto"] = "auto",
        use_ray: bool | None = None,
        timeout_s: float = 1800,
        backend: Literal["auto", "gloo", "nccl", "horovod"] = "auto",
        horovod_args: Mapping[str, Any] | None = None,
        scheduler_step_freq: Literal["batch", "step", "epoch", "manual"] | None = None,
        add_dist_sampler: bool = True,
        seed: int | None = None,
        wrap_ddp: bool | None = None,
        use_fp16: bool | Literal["apex"] | None = None,
        use_tqdm: bool = False,
        callbacks: Sequence[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
        checkpoints: AutoCheckpoint | None = None,
        resume: Literal["auto"] | None = None,
        name: str | None = None,
        orphan_s: float = ORPHAN_S,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(TorchTrainer, unknown, setup.GROUPS, setup.REMOVED, setup.WITHOUT_EFFECT)
        elastic, config, is_distributed = check_common(
            training_operator_cls, TrainingOperator, num_workers, initialization_hook, timeout_s, elastic, config
        )
        options = TrainingOptions.checked(options).resolved(wrap_ddp=wrap_ddp, use_fp16=use_fp16)
        workers = setup.plan_workers(is_distributed, name, use_ray, num_cpus_per_worker, use_gpu, resources_per_worker)
        folder, callbacks = opened_folder(checkpoints, resume, ".pt"), check_callbacks(callbacks)
        strategy = choose_strategy(backend, options, horovod_args, gpus=workers.resources.gpus)
        settings = TorchSettings(
            num_workers=num_workers,
            parts=parts,
            use_tqdm=use_tqdm,
            options=options,
            add_dist_sampler=add_dist_sampler,
            seed=seed,
            scheduler_step_freq=scheduler_step_freq,
            elastic=elastic,
            **workers.process_settings,
            **strategy.replica_settings(is_distributed, options),
            **setup.wanted_by(callbacks, checkpoints),
        )
        settings.check(name, backend)
        super().__init__(
            RunDescription(
                trainer="TorchTrainer",
                factory=setup.replica_factory(training_operator_cls, config, settings),
                config=config,
                resources=workers.resources,
                timeout_s=timeout_s,
                make_backend=strategy.make_backend,
                hook=initialization_hook,
                saved=self._newest_saved if settings.is_sharded else None,
                callbacks=callbacks,
                logdir=logdir,
                folder=folder,
                named=checked_name(name, orphan_s),
            )
        )
        self.use_gpu = workers.use_gpu

    # -- training -------------------------------------------------------------------------------------

    @exclusive
    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
        dataset: Any = None,
    ) -> Any:
        """Train to the end of the epoch, or `num_steps` batches on each worker. Return what was
        measured.

        `dataset`, a Ray Dataset, is used by this call instead of the registered data, from its
        first row on. `max_retries` is how many worker failures this call may have (-1: any number).
        The operator's methods get `info`. With `profile=True`, the result has the seconds of each
        part of a batch. With `reduce_results=False`, return a list with each worker's own results,
        or with what the operator's `train_epoch` returned there if it is no dict.
        """
        check_call(num_steps, max_retries, info)
        check_flags(profile=profile, reduce_results=reduce_results)
        if self._factory.settings.is_sharded and self._folder is None and self._loads.is_empty:
            raise ConfigError(setup.NO_CHECKPOINT)
        changed = [each for each, before in self._lent.items() if _summary(each) != before]
        for name in {f"get_{'local_operator' if each is self._newest else 'model'}()" for each in changed}:
            logger.warning(CHANGED_COPY, name)
        self._lent, self._newest = {}, None
        data = self._packed(setup.opened(dataset, self._engine.group))
        job = self._train_job(num_steps, profile, info, max_retries, dataset=data, reduced=reduce_results)
        if self._factory.settings.compares:
            job = replace(job, compare=Call(replica_calls.weight_sums))
        try:
            result, each = self._calls.measure(self._engine, "train", job)
        finally:
            self._loops.end_call()
        return result if reduce_results else each

    @exclusive
    def predict(self, data: Any, batch_size: int = 32) -> Any:
        """Compute the model's outputs for `data`, a data set or a DataLoader, in the order of the
        data, on the CPU.

        The workers divide the data, and call `operator.predict_batch` in eval mode without
        gradients; its outputs are concatenated. After a failure, the other workers repeat the call.
        `batch_size` is that of a data set; a loader has its own.
        """
        setup.check_predicted(data, batch_size)
        self._saves.raise_failed()
        outputs = self._predicted(replica_calls.predict, data=self._packed(data), batch_size=batch_size)
        if not outputs:
            raise ConfigError(f"predict() got data without a sample: {data!r}")
        return replica_calls.joined(outputs)

    @exclusive
    def update_scheduler(self, metric: Any) -> None:
        """Call `step(metric)` on every registered scheduler of every worker."""
        self._change("update_scheduler()", Call(replica_calls.update_scheduler, {"metric": metric}))

    def _make_loads(self, drawn_anew: DrawnAnew) -> ShardedLoads:
        return ShardedLoads(self._engine, drawn_anew, self._folder, is_sharded=self._factory.settings.is_sharded)

    def _newest_saved(self, wait: bool) -> Snapshot | None:
        if wait:  # no worker writes any more what none has begun to write
            self._loops.end_part()
        return self._loads.newest(wait)

    @exclusive
    def _not_finite(self) -> str:
        names: list[str] = self._values(replica_calls.not_finite)
        return max(names)

    def _load_automatic(self, path: str) -> None:
        assert self._folder is not None
        self._loads.load(path, trusted=self._folder.settings.trusted)
        if differs := self._other_rows():
            raise CheckpointError(f"{path}: {differs}")

    def _other_rows(self) -> str:
        """Say which loaders have other rows than in the loaded checkpoint, if any have."""
        names = sorted({name for each in self._values(replica_calls.rows_that_differ) for name in each})
        return setup.OTHER_ROWS.format(" and the ".join(names)) if names else ""

    def _warn_of_other_rows(self) -> None:
        if differs := self._other_rows():
            logger.warning("%s. Ignore this if the data should differ", differs)

    # -- models and state -----------------------------------------------------------------------------

    @exclusive
    def get_model(self, to_cpu: bool = False) -> Any:
        """Make a copy of the trained model, unwrapped and in eval mode; a list if there are
        several. It is on the GPU if the workers use GPUs and this process has one, unless
        `to_cpu`."""
        models: list[Any] = unpacked_models(self._first(replica_calls.get_model))
        if self.use_gpu and not to_cpu and torch.cuda.is_available():
            models = [model.cuda() for model in models]
        self._lent = WeakKeyDictionary({**self._lent, **{model: _summary(model) for model in models}})
        return models[0] if len(models) == 1 else models

    @exclusive
    def get_local_operator(self) -> TrainingOperator:
        """Get an operator here with the current state; that of an inline worker itself."""
        operator: TrainingOperator | None = self._inline_operator()
        if operator is None:
            original = self._factory.settings
            settings = TorchSettings(  # what an operator's setup can see
                scheduler_step_freq=original.scheduler_step_freq,
                num_workers=original.num_workers,
                alone=True,
                options=TrainingOptions(accumulate=original.options.accumulate),
            )
            operator = self._factory.operator_cls(dict(self._factory.config), settings=settings)
            states.restore(operator, internals_of(operator).registered, self.state_dict())
            self._lent, self._newest = WeakKeyDictionary({**self._lent, operator: _summary(operator)}), operator
        return operator

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint as one dictionary, with tensors on the CPU."""
        return states.parse(self._saves.content(), trusted=True)

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Load what `state_dict` returned, for any number of workers. Every worker checks the state
        first: one that does not fit raises CheckpointError, and nothing changes. After an error in
        a `load_state_dict` of yours, the state is undefined: only `load`, `load_state_dict` and
        `shutdown` are accepted. (`blocking` has no effect; RaySGD had it.)"""
        state = states.dump_given(state_dict)
        self._load("load_state_dict()", lambda: self._loads.restore(state, trusted=True))
        self._warn_of_other_rows()

    @exclusive
    def save(self, checkpoint: str | os.PathLike[str], *, blocking: bool = True, sharded: bool = False) -> Any:
        """Save to `checkpoint`, a path or a URI, completely or not at all. Return its absolute
        path, or the URI.

        With `blocking=False`, training can continue as soon as the state was copied in memory, and
        a handle is returned. With `sharded=True`, the checkpoint is a directory to which every
        worker writes its part.
        """
        self._saves.raise_failed()
        check_flags(sharded=sharded)
        if sharded:
            path_or_handle = save_shards(self._saves, self._engine, checkpoint, blocking=blocking)
        else:
            path_or_handle = self._saves.save(checkpoint, blocking=blocking)
        if blocking:
            self._loads.note_replaced(path_or_handle)
        return path_or_handle

    @exclusive
    def load(self, checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Load `checkpoint`, a path or a URI, for any number of workers. No code in it is run,
        unless it is `trusted` (for operator state of your own types, and for what was saved with
        `sharded=True`). What is refused, or fails, is as in `load_state_dict`."""
        self._load("load()", lambda: self._loads.load(checkpoint, trusted=trusted))
        self._warn_of_other_rows()

    def restore(self, *args: Any) -> None:
        """Raise a DeprecationWarning: the method is called `load`."""
        raise DeprecationWarning("TorchTrainer has no restore(): call load()")

    # -- the group ------------------------------------------------------------------------------------

    @property
    def max_replicas(self) -> int:
        """The argument `num_workers`, under RaySGD's name."""
        workers: int = self._factory.settings.num_workers
        return workers

    @classmethod
    def as_trainable(
        cls, *, override_tune_step: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None, **arguments: Any
    ) -> Any:
        """Make a Tune Trainable class (extra: tune). It takes the arguments of the trainer, which
        each trial creates.

        `override_tune_step(trainer, info)` replaces a trial's step, which trains and validates
        once.
        """
        if cls.__init__ is TorchTrainer.__init__:  # a subclass may have arguments of its own
            others = {name: value for name, value in arguments.items() if name != "use_local"}  # it has an effect here
            refuse_unknown(TorchTrainer, others, setup.GROUPS, setup.REMOVED, setup.WITHOUT_EFFECT)
        return offers.torch_trainable(cls, override_tune_step=override_tune_step, **arguments)


def _summary(copy: Any) -> list[Any]:
    """How often the parameters of a model, or of those of an operator, have been changed; with the
    settings of an operator's optimizers."""
    if not isinstance(copy, TrainingOperator):
        return [content_version(each) for each in copy.parameters()]
    registered = internals_of(copy).registered
    groups = [group for optimizer in registered.optimizers for group in optimizer.param_groups]
    settings = [plain(value) for group in groups for name, value in group.items() if name != "params"]
    return [*settings, *(version for model in registered.models for version in _summary(model))]
