"""The class face for PyTorch: a trainer in the user's own script that drives operators on any number of workers."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from raysgd import metrics
from raysgd.callbacks.progress_bar import make_bar
from raysgd.config import ElasticConfig, Limits, WorkerResources
from raysgd.elastic import Recovery
from raysgd.engine.crew import Member
from raysgd.engine.engine import Engine, Job, Piece
from raysgd.errors import ConfigError
from raysgd.protocols import Backend
from raysgd.rendezvous import Alone, Seat
from raysgd.torch import arguments, states
from raysgd.torch.backend import TorchBackend
from raysgd.torch.checkpoints import Checkpoints, SaveHandle
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.options import TrainingOptions
from raysgd.torch.replica import TorchReplicaFactory
from raysgd.torch.settings import ReplicaSettings
from raysgd.workers.inline import InlineGroup

__all__ = ["TorchTrainer"]

logger = logging.getLogger("raysgd")


class TorchTrainer:
    """Trains a `TrainingOperator` on workers that may come and go.

        with TorchTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1}) as trainer:
            for _ in range(3):
                print(trainer.train(), trainer.validate())
            trainer.save("digits.pt")

    What `train()` does:

        every worker runs operator.train_epoch on its share of the epoch
        a worker is lost        -> the others meet anew and go on with the rest of the epoch
        machines become free    -> new workers join at a batch border
        average what the workers measured, weighted by samples; return one dict
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator],
        initialization_hook: Callable[[], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool | str = "auto",
        backend: str = "auto",
        wrap_ddp: bool = True,
        timeout_s: float = 1800,
        use_fp16: bool | str = False,
        precision: str | None = None,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        scheduler_step_freq: str | None = None,
        use_local: bool = False,
        use_ray: bool | None = None,
        elastic: ElasticConfig | None = None,
        **more: Any,
    ) -> None:
        options, removed = TrainingOptions.taken_from(more, wrap_ddp=wrap_ddp)
        arguments.refuse_removed(removed)
        arguments.check_operator(training_operator_cls, TrainingOperator)
        self.max_replicas = num_workers = arguments.check_num_workers(num_workers)
        arguments.check_scheduler_step(scheduler_step_freq)
        if initialization_hook is not None and not callable(initialization_hook):
            raise ConfigError(f"initialization_hook must be a function without arguments, got {initialization_hook!r}")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or timeout_s <= 0:
            raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
        if elastic is not None and not isinstance(elastic, ElasticConfig):
            raise ConfigError(f"elastic must be a raysgd.ElasticConfig, got {elastic!r}")
        self.config, worker_config = arguments.per_worker_config(config, num_workers)
        self.use_gpu = _wants_gpu(use_gpu)
        resources = WorkerResources.parse(
            num_cpus_per_worker,
            self.use_gpu,
            resources_per_worker,
            gpu_asked=None if use_gpu == "auto" else bool(use_gpu),
        )
        self.use_gpu = self.use_gpu or resources.gpus > 0
        process_group = arguments.check_backend(backend, self.use_gpu)
        elastic = elastic or ElasticConfig()
        limits = Limits.derive(
            timeout_s=timeout_s,
            hang_timeout_s=elastic.hang_timeout_s,
            start_s=float(os.environ.get("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100)),
        )
        remote = _needs_ray(use_ray, num_workers, resources)
        settings = ReplicaSettings(
            distributed=num_workers > 1,
            use_gpu=self.use_gpu,
            wrap_ddp=options.parallel == "ddp",
            add_dist_sampler=add_dist_sampler,
            scheduler_step_freq=scheduler_step_freq,
            use_tqdm=use_tqdm,
            precision=arguments.resolve_precision(precision, use_fp16),
            use_fp16=use_fp16 or precision in ("fp16", "apex"),
            num_workers=num_workers,
            threads=max(1, int(resources.cpus)) if remote else None,
            batch=elastic.batch,
            snapshot_every=elastic.snapshot_every,
            options=options,
        )
        options.check_with(
            num_workers=num_workers, use_gpu=self.use_gpu, precision=settings.precision, elastic=elastic
        )
        if use_local and num_workers > 1:
            warnings.warn(
                "use_local=True with several workers: no rank lives in the driver any more; get_local_operator() gives "
                "an operator made here that holds the current state",
                stacklevel=2,
            )
        self._bar = make_bar(use_tqdm)
        self._factory = TorchReplicaFactory(training_operator_cls, worker_config, settings)
        rejoins = options.parallel != "fsdp"  # a shard that is lost is nowhere else: only a snapshot has it
        elastic = elastic if rejoins else replace(elastic, grow=False)
        meeting: Backend = _backend(process_group, limits, rejoins) if num_workers > 1 else Alone()
        group = _ray_group(meeting, resources) if remote else InlineGroup(meeting)
        self._engine = Engine(
            group,
            meeting,
            self._factory,
            hook=initialization_hook,
            target=num_workers,
            elastic=elastic,
            limits=limits,
            on_progress=self._on_progress,
        )
        self._checkpoints = Checkpoints(self._engine)
        self._engine.start()

    # -- training -------------------------------------------------------------------------------------

    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
        dataset: Any = None,
    ) -> Any:
        """Trains to the end of the epoch, or `num_steps` batches on each worker; returns what was measured.

        `max_retries` bounds the losses of workers that this call survives (-1: no bound). With
        `reduce_results=False` the answer is a list of each worker's own results.
        """
        _check_call(num_steps, max_retries, info)
        job = Job(
            "train",
            {
                "num_steps": num_steps,
                "profile": profile,
                "info": dict(info) if info is not None else None,
                "dataset": self._engine.pack(dataset),
            },
            again="resume",
            max_losses=max_retries,
        )
        return self._shown("train", job, reduce_results)

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """One pass over the validation data, every row once; returns what was measured."""
        _check_call(num_steps, 0, info)
        job = Job("validate", {"num_steps": num_steps, "profile": profile, "info": dict(info) if info is not None else None})
        return self._shown("validate", job, reduce_results)

    def _shown(self, label: str, job: Job, reduce_results: bool) -> Any:
        self._checkpoints.raise_failed()
        self._bar.open(label)
        result: dict[str, Any] | None = None
        try:
            pieces = self._engine.run(job)
            merged = [metrics.over_workers(piece.values) for piece in pieces]
            result = metrics.completed(metrics.over_pieces(merged), merged)
        finally:
            self._bar.close(result)
        return result if reduce_results else _by_worker(pieces)

    def _on_progress(self, member: Member) -> None:
        self._bar.update(member.worker, member.progress, member.partial)

    def update_scheduler(self, metric: Any) -> None:
        """Calls `step(metric)` on every registered scheduler of every worker."""
        self._engine.run(Job("update_scheduler", {"metric": metric}, again="keep"))
        self._engine.state_changed_by_hand()

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Runs a function without arguments in every worker process; the answers in rank order."""
        return self._apply("apply", fn)

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Runs `fn(operator)` in every worker; the answers in rank order."""
        return self._apply("apply_operator", fn)

    def _apply(self, method: str, fn: Callable[..., Any]) -> list[Any]:
        if not callable(fn):
            raise ConfigError(f"fn must be a function, got {fn!r}")
        self._checkpoints.raise_failed()
        pieces = self._engine.run(Job(method, {"function": self._engine.pack(fn)}, again="keep"))
        self._engine.state_changed_by_hand()
        return [outcome.value for outcome in pieces[-1].outcomes if hasattr(outcome, "value")]

    # -- models and state -----------------------------------------------------------------------------

    def get_model(self, to_cpu: bool = False) -> Any:
        """The trained model (a list of several), bare, as a copy of your own. On the GPU where this process has one
        and the workers use them, unless `to_cpu`."""
        models: list[Any] = self._first("get_model")
        if self.use_gpu and not to_cpu and torch.cuda.is_available():
            models = [model.cuda() for model in models]
        return models[0] if len(models) == 1 else models

    def get_local_operator(self) -> TrainingOperator:
        """An operator in this process with the current state; with one inline worker, the very one that trains."""
        if isinstance(self._engine.group, InlineGroup):
            operator: TrainingOperator = self._first("apply_operator", function=lambda operator: operator)
            return operator
        settings = ReplicaSettings(
            scheduler_step_freq=self._factory.settings.scheduler_step_freq, num_workers=1, precision="fp32"
        )
        operator = self._factory.operator_cls(dict(self._factory.config), settings=settings, seat=Seat())
        states.restore(operator, self.state_dict())
        return operator

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds, as one dictionary with tensors on the CPU."""
        self._checkpoints.raise_failed()
        return states.parse(self._checkpoints.content(), trusted=True)

    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Takes what `state_dict` gave, of any number of workers. Checked on every worker first: a state that does
        not fit raises, and changes nothing. (It always blocks; `blocking` is there for v1's sake.)"""
        self._checkpoints.raise_failed()
        self._checkpoints.restore(states.dump(states.shaped(dict(state_dict))), trusted=True)

    def save(
        self, checkpoint: str | os.PathLike[str], *, blocking: bool = True, sharded: bool = False
    ) -> str | SaveHandle:
        """Writes a checkpoint file, whole or not at all; returns its path. With `blocking=False` training can go on after
        one copy in memory, and the answer is a handle. `sharded`: a directory that every worker writes its part of."""
        self._checkpoints.raise_failed()
        saved: str | SaveHandle = self._checkpoints.save(checkpoint, blocking=blocking, sharded=sharded)
        return saved

    def load(self, checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Takes a checkpoint, of any number of workers. Runs no code from it, unless it is `trusted` (for operator state
        of your own types, and for what was saved `sharded`)."""
        self._checkpoints.raise_failed()
        self._checkpoints.load(checkpoint, trusted=trusted)

    def restore(self, *args: Any) -> None:
        raise DeprecationWarning("restore() is called load() for TorchTrainer")

    def _first(self, method: str, **given: Any) -> Any:
        self._checkpoints.raise_failed()
        return self._engine.run(Job(method, given))[-1].values[0]

    # -- the group ------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """How many workers there are now."""
        return self._engine.world_size

    @property
    def recoveries(self) -> list[Recovery]:
        """Every change of the membership so far: losses, growth, preemptions."""
        return self._engine.recoveries

    def resize(self, num_workers: int) -> None:
        """Sets the number of workers, in the middle of an epoch too; waits until missing ones have joined."""
        arguments.check_num_workers(num_workers)
        if not self._factory.settings.distributed and num_workers > 1:
            raise ConfigError(
                "a trainer made with num_workers=1 has no process group and cannot grow: make it with num_workers=2 or "
                "more (ElasticConfig(min_workers=1) lets it shrink to one)"
            )
        if self._factory.settings.options.parallel == "fsdp":
            raise ConfigError(
                "with parallel='fsdp' each worker holds a part of the model: save, and load into a trainer with "
                f"num_workers={num_workers}"
            )
        self._engine.resize(num_workers)

    def shutdown(self, force: bool = False) -> None:
        """Ends the workers, after saves in the background. A second call is fine; any other call afterwards is an error."""
        if not force:
            self._checkpoints.finish()
        self._engine.stop(force=force)
        if not force:
            self._checkpoints.raise_failed()

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=kind is not None)

    @classmethod
    def as_trainable(cls, *args: Any, override_tune_step: Any = None, **kwargs: Any) -> Any:
        """A Tune Trainable class that trains with these arguments (extra: tune)."""
        from importlib import import_module

        return import_module("raysgd.tune").torch_trainable(cls, *args, override_tune_step=override_tune_step, **kwargs)


def _by_worker(pieces: list[Piece]) -> list[dict[str, Any]]:
    """Each rank's own results. After a change of members: those of every generation, one after the other."""
    return [
        {name: metrics.plain(value) for name, value in own.items() if name != metrics.COMMITTED}
        for piece in pieces
        for own in piece.values
    ]


def _check_call(num_steps: Any, max_retries: Any, info: Any) -> None:
    if num_steps is not None and (not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 0):
        raise ConfigError(f"num_steps must be a whole number of at least 0, or None for the whole epoch, got {num_steps!r}")
    if not isinstance(max_retries, int) or max_retries < -1:
        raise ConfigError(f"max_retries must be a whole number: losses allowed in this call, -1 for no bound; got {max_retries!r}")
    if info is not None and not isinstance(info, Mapping):
        raise ConfigError(f"info must be a dict, got {info!r}")


def _wants_gpu(use_gpu: Any) -> bool:
    if use_gpu == "auto":
        return torch.cuda.is_available()
    if not isinstance(use_gpu, bool):
        raise ConfigError(f"use_gpu must be True, False or 'auto', got {use_gpu!r}")
    if not use_gpu and torch.cuda.is_available():
        logger.info("this machine has a GPU that will not be used: pass use_gpu=True to use it")
    return use_gpu


def _needs_ray(use_ray: bool | None, num_workers: int, resources: WorkerResources) -> bool:
    """One worker runs in this process, unless Ray is asked for or must find what the worker needs elsewhere."""
    if num_workers > 1 or resources.custom or (resources.gpus and not torch.cuda.is_available()):
        if use_ray is False:
            raise ConfigError("use_ray=False is possible with num_workers=1 and without custom resources only")
        return True
    return bool(use_ray)


def _backend(name: str, limits: Limits, in_place: bool) -> TorchBackend:
    from raysgd.workers.cluster import driver_address, ensure_cluster

    ensure_cluster()
    return TorchBackend(
        name,
        host=driver_address(),
        join_s=limits.join_s,
        collective_s=limits.collective_s,
        in_place=in_place,
    )


def _ray_group(backend: Backend, resources: WorkerResources) -> Any:
    from raysgd.workers.ray_group import RayGroup

    return RayGroup(backend, resources)

