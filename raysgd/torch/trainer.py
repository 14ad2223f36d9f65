"""The class face for PyTorch: a trainer in the user's own script that drives operators on any number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from raysgd.callbacks.base import Callback
from raysgd.callbacks.history import History
from raysgd.config import ElasticConfig, check_call
from raysgd.core.policy import Recovery
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.engine.engine import Job
from raysgd.errors import ConfigError
from raysgd.torch import replica_calls, setup
from raysgd.torch.arguments import check_num_workers
from raysgd.torch.checkpoint import states
from raysgd.torch.checkpoint.save_load import Checkpoints, SaveHandle
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.replica import TorchReplica
from raysgd.torch.settings import ReplicaSettings
from raysgd.torch.setup import TrainerArguments, opened
from raysgd.training.call_runner import exclusive
from raysgd.workers.inline_group import InlineGroup

__all__ = ["TorchTrainer"]


class TorchTrainer:
    """Trains a `TrainingOperator` on workers that may come and go.

        with TorchTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1}) as trainer:
            for _ in range(3):
                print(trainer.train(), trainer.validate())
            trainer.save("digits.pt")

    What `train()` does:

        every worker runs operator.train_epoch on its share of the epoch
        a worker fails          -> the others form a new process group and continue the epoch
        machines become free    -> new workers join at a batch boundary
        average what the workers measured, weighted by samples; return one dict
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator] | None = None,
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
        callbacks: Sequence[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "more")}
        plan = setup.plan(TrainerArguments(**given, more=more))
        self.config, self.use_gpu, self.max_replicas = plan.config, plan.use_gpu, num_workers
        self._factory, self._calls = plan.factory, plan.calls
        self._engine = setup.engine(plan)
        self._checkpoints = Checkpoints(self._engine)
        self._validations = 0
        self._calls.start(self._engine)

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
        """Trains to the end of the epoch, or `num_steps` batches on each worker; returns what was measured.

        `dataset` is what this call trains on instead: a `raysgd.data.Dataset`, or a Ray Dataset (from its first row on).
        `max_retries` bounds the losses of workers that this call survives (-1: no bound). With
        `reduce_results=False` the answer is a list of each worker's own results.
        """
        check_call(num_steps, max_retries, info)
        arguments = {
            "num_steps": num_steps,
            "profile": profile,
            "info": self._engine.pack(dict(info) if info is not None else None),
            "dataset": self._engine.pack(opened(dataset, self._engine.group)),
        }
        self._checkpoints.raise_failed()
        job = Job(Call(TorchReplica.train, arguments), again="resume", max_failures=max_retries)
        result, each = self._calls.measure(self._engine, "train", job)
        return result if reduce_results else each

    @exclusive
    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """One pass over the validation data, every row once; returns what was measured."""
        check_call(num_steps, 0, info)
        self._validations += 1
        arguments = {
            "num_steps": num_steps,
            "profile": profile,
            "info": self._engine.pack(dict(info) if info is not None else None),
            "call": self._validations,
        }
        self._checkpoints.raise_failed()
        job = Job(Call(TorchReplica.validate, arguments))
        result, each = self._calls.measure(self._engine, "validate", job)
        return result if reduce_results else each

    @exclusive
    def update_scheduler(self, metric: Any) -> None:
        """Call `step(metric)` on every registered scheduler of every worker."""
        self._engine.run(Job(Call(replica_calls.update_scheduler, {"metric": metric}), again="keep"))
        self._engine.state_changed_by_hand()

    @exclusive
    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Runs a function without arguments in every worker process; the answers in rank order."""
        return self._apply(replica_calls.apply, fn)

    @exclusive
    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Runs `fn(operator)` in every worker; the answers in rank order."""
        return self._apply(replica_calls.apply_operator, fn)

    def _apply(self, method: Callable[..., Any], fn: Callable[..., Any]) -> list[Any]:
        if not callable(fn):
            raise ConfigError(f"fn must be a function, got {fn!r}")
        self._checkpoints.raise_failed()
        call = Call(method, {"function": self._engine.pack(fn)})
        parts = self._engine.run(Job(call, again="keep"))
        self._engine.state_changed_by_hand()
        return [outcome.value for outcome in parts[-1].outcomes if hasattr(outcome, "value")]

    # -- models and state -----------------------------------------------------------------------------

    @exclusive
    def get_model(self, to_cpu: bool = False) -> Any:
        """The trained model (a list of several), bare, as a copy of your own. On the GPU where this process has one
        and the workers use them, unless `to_cpu`."""
        models: list[Any] = self._first(replica_calls.get_model)
        if self.use_gpu and not to_cpu and torch.cuda.is_available():
            models = [model.cuda() for model in models]
        return models[0] if len(models) == 1 else models

    @exclusive
    def get_local_operator(self) -> TrainingOperator:
        """An operator in this process with the current state; with one inline worker, the very one that trains."""
        if isinstance(self._engine.group, InlineGroup):
            operator: TrainingOperator = self._first(replica_calls.apply_operator, function=lambda operator: operator)
            return operator
        settings = ReplicaSettings(
            scheduler_step_freq=self._factory.settings.scheduler_step_freq, num_workers=1, precision="fp32"
        )
        operator = self._factory.operator_cls(dict(self._factory.config), settings=settings, rank_info=RankInfo())
        states.restore(operator, self.state_dict())
        return operator

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds, as one dictionary with tensors on the CPU."""
        self._checkpoints.raise_failed()
        return states.parse(self._checkpoints.content(), trusted=True)

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any], blocking: bool = True) -> None:
        """Takes what `state_dict` gave, of any number of workers. Checked on every worker first: a state that does
        not fit raises, and changes nothing. (It always blocks; `blocking` is there for v1's sake.)"""
        self._checkpoints.raise_failed()
        self._checkpoints.restore(states.dump_given(state_dict), trusted=True)

    @exclusive
    def save(
        self, checkpoint: str | os.PathLike[str], *, blocking: bool = True, sharded: bool = False
    ) -> str | SaveHandle:
        """Writes a checkpoint to a path or a URI, whole or not at all; returns where it is. With `blocking=False` training can go on after
        one copy in memory, and the answer is a handle. `sharded`: a directory that every worker writes its part of."""
        self._checkpoints.raise_failed()
        saved: str | SaveHandle = self._checkpoints.save(checkpoint, blocking=blocking, sharded=sharded)
        return saved

    @exclusive
    def load(self, checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> None:
        """Takes a checkpoint from a path or a URI, of any number of workers. Runs no code from it, unless it is `trusted`
        (for operator state of your own types, and for what was saved `sharded`)."""
        self._checkpoints.raise_failed()
        self._checkpoints.load(checkpoint, trusted=trusted)

    def restore(self, *args: Any) -> None:
        raise DeprecationWarning("restore() is called load() for TorchTrainer")

    def _first(self, method: Callable[..., Any], **given: Any) -> Any:
        self._checkpoints.raise_failed()
        return self._engine.run(Job(Call(method, given)))[-1].values[0]

    # -- the group ------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """How many workers there are now."""
        return self._engine.world_size

    @property
    def recoveries(self) -> list[Recovery]:
        """Every change of the membership so far: losses, growth, preemptions."""
        return self._engine.recoveries

    @property
    def history(self) -> History:
        """Every result of `train` and `validate` so far, as a table."""
        return self._calls.history

    @property
    def logdir(self) -> Path:
        """Where callbacks write. It is made when one of them does."""
        return self._calls.run.folder

    def __repr__(self) -> str:
        return self._calls.describe(self._engine)

    @exclusive
    def resize(self, num_workers: int) -> None:
        """Sets the number of workers, in the middle of an epoch too; waits until missing ones have joined."""
        check_num_workers(num_workers)
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
        try:
            if not force:
                self._checkpoints.finish()
        finally:  # Ctrl-C may end the wait for the saves
            try:
                self._engine.stop(force=force)
                self._checkpoints.abandon()
            finally:
                self._calls.end()
        if not force:
            self._checkpoints.raise_failed()

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.exited(error)
        self.shutdown(force=kind is not None)

    @classmethod
    def as_trainable(cls, *args: Any, override_tune_step: Any = None, **kwargs: Any) -> Any:
        """A Tune Trainable class that trains with these arguments (extra: tune)."""
        from importlib import import_module

        return import_module("raysgd.tune").torch_trainable(cls, *args, override_tune_step=override_tune_step, **kwargs)
