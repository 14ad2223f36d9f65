"""The class face for TensorFlow: a trainer in the user's own script that drives operators on any number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from raysgd.callbacks.base import Callback, Run
from raysgd.callbacks.folder import folder_to_be
from raysgd.callbacks.history import History
from raysgd.config import ElasticConfig, Limits, WorkerResources, check_call, start_limit_s
from raysgd.core.policy import Recovery
from raysgd.core.protocols import Backend, Call
from raysgd.core.ranks import RankInfo, SingleWorkerBackend
from raysgd.engine.engine import Engine, Job
from raysgd.errors import CheckpointError, ConfigError, RemoteTraceback
from raysgd.storage import locations
from raysgd.tf import arguments, states
from raysgd.tf.compiled import EVALUATE, FIT, checked_fit_config
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.process_group import TensorFlowBackend
from raysgd.tf.replica import TFReplica, TFReplicaFactory
from raysgd.tf.settings import ReplicaSettings
from raysgd.training.call_runner import CallRunner, exclusive
from raysgd.workers.blob import Blob
from raysgd.workers.inline_group import InlineGroup

__all__ = ["TFTrainer"]

# What TensorFlow itself takes for an operation with a seed of its own, where no other was set: so such operations do
# what they do without raysgd, and those without a seed do the same on all workers.
SEED = 87654321
# Travels with a result where a Keras callback wants `train` to end.
STOP = "stop_training"


class TFTrainer:
    """Trains Keras models on workers that may come and go.

        with TFTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1}) as trainer:
            for _ in range(3):
                print(trainer.train(), trainer.validate())
            trainer.save("digits.ckpt")

    Or, as in RaySGD v1, with a compiled model: `TFTrainer(model_creator, data_creator, num_replicas=2)`.

    What `train()` does:

        every worker takes its rows of every batch, computes gradients, averages them, applies them
        a worker is lost        -> the others' state is saved, and fresh processes go on with the rest of the epoch
        average what the workers measured, weighted by samples; return one dict
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
        callbacks: Sequence[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
    ) -> None:
        operator_cls = arguments.operator_class(model_creator, data_creator, training_operator_cls)
        self.num_replicas = number = arguments.workers(num_replicas, num_workers)
        self.config = arguments.checked_config(config, number)
        arguments.check_common(initialization_hook, timeout_s, elastic, use_gpu)
        resources = WorkerResources.parse(num_cpus_per_worker, use_gpu, resources_per_worker, gpu_asked=use_gpu or None)
        elastic = elastic or ElasticConfig()
        limits = _limits(timeout_s, elastic)
        remote = arguments.needs_ray(use_ray, number, resources)
        settings = _settings(number, resources, elastic, remote=remote, use_tqdm=use_tqdm)
        self._calls = self._listeners(callbacks, operator_cls.__name__, logdir, bar=use_tqdm or bool(verbose))
        self._factory = TFReplicaFactory(operator_cls, dict(self.config), settings)
        backend: Backend = _backend(limits, settings) if number > 1 else SingleWorkerBackend()
        group = _ray_group(backend, resources) if remote else InlineGroup(backend)
        given: dict[str, Any] = {"target": number, "elastic": elastic, "limits": limits, "hook": initialization_hook}
        given |= {"on_progress": self._calls.on_progress, "on_recovery": self._calls.on_recovery}
        self._engine = Engine(group, backend, self._factory, **given)
        self._calls.start(self._engine)

    def _listeners(self, callbacks: Any, name: str, logdir: Any, *, bar: bool) -> CallRunner:
        """Follows `fit_config`, too."""
        fit = checked_fit_config(self.config, FIT)
        self._epochs, self._steps = fit.get("epochs", 1), fit.get("steps_per_epoch")
        self._validation_steps = checked_fit_config(self.config, EVALUATE).get("steps")
        folder, number = folder_to_be(logdir, name), self.num_replicas
        run = Run(trainer="TFTrainer", name=name, num_workers=number, config=self.config, folder=folder)
        calls = CallRunner(callbacks, run, bar=bar or bool(fit.get("verbose")), hidden=(STOP,))
        if calls.on_workers:
            raise ConfigError("the Torch profiler sees nothing of TensorFlow: leave its callback to a TorchTrainer")
        return calls

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
        """Trains to the end of the epoch, or `num_steps` batches; returns what was measured.

        `fit_config`'s `epochs` and `steps_per_epoch` say how often, and how far, where nothing is passed here; the
        last epoch's result is returned. `max_retries` bounds the losses of workers that each epoch survives.
        """
        check_call(num_steps, max_retries, info)
        given = {
            "num_steps": self._steps if num_steps is None else num_steps,
            "profile": profile,
            "info": dict(info) if info is not None else None,
        }
        for _ in range(self._epochs if num_steps is None else 1):
            job = Job(Call(TFReplica.train, given), again="resume", max_failures=max_retries)
            result, each = self._calls.measure(self._engine, "train", job)
            if result.pop(STOP, False):
                break
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
        given = {
            "num_steps": self._validation_steps if num_steps is None else num_steps,
            "profile": profile,
            "info": dict(info) if info is not None else None,
        }
        result, each = self._calls.measure(self._engine, "validate", Job(Call(TFReplica.validate, given)))
        return result if reduce_results else each

    @exclusive
    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Runs a function without arguments in every worker process; the answers in rank order."""
        return self._apply(TFReplica.apply, fn)

    @exclusive
    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Runs `fn(operator)` in every worker; the answers in rank order."""
        return self._apply(TFReplica.apply_operator, fn)

    def _apply(self, method: Callable[..., Any], fn: Callable[..., Any]) -> list[Any]:
        if not callable(fn):
            raise ConfigError(f"fn must be a function, got {fn!r}")
        call = Call(method, {"function": self._engine.pack(fn)})
        parts = self._engine.run(Job(call, again="keep"))
        self._engine.state_changed_by_hand()
        return [outcome.value for outcome in parts[-1].outcomes if hasattr(outcome, "value")]

    # -- models and state -----------------------------------------------------------------------------

    @exclusive
    def get_model(self) -> Any:
        """The trained model (a list of several), made here by the creator or by `setup`, with the trained weights."""
        models = self.get_local_operator()._parts.models
        return models[0] if len(models) == 1 else list(models)

    @exclusive
    def get_local_operator(self) -> TrainingOperator:
        """An operator in this process with the current state; with one inline worker, the very one that trains."""
        if isinstance(self._engine.group, InlineGroup):
            operator: TrainingOperator = self._first(TFReplica.apply_operator, function=lambda operator: operator)
            return operator
        operator = self._factory.operator_cls(dict(self.config), settings=ReplicaSettings(), rank_info=RankInfo())
        states.restore(operator, self.state_dict())
        return operator

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint holds, as one dictionary of plain values and arrays."""
        return states.parse(self._checkpoint())

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, of any number of workers. Checked on every worker first: a state that does
        not fit raises, and changes nothing."""
        self._restore(states.dump(states.shaped(dict(state_dict))))

    @exclusive
    def save(self, checkpoint: str | os.PathLike[str]) -> str:
        """Writes a checkpoint to a path or a URI, whole or not at all; returns where it is."""
        where = locations.place(checkpoint)  # what is no place for a file is told before the work
        locations.check_file(where)
        return locations.text_of(locations.write(where, self._checkpoint()))

    @exclusive
    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Takes a checkpoint from a path or a URI, after its digest and all that is in it were checked. No code in it is
        ever run."""
        where = locations.place(checkpoint)
        data = locations.read(where)
        try:
            states.read(data, where)  # what is damaged or foreign never reaches a worker
            self._restore(data)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error

    def restore(self, checkpoint: str | os.PathLike[str]) -> None:
        """v1's name for `load`."""
        self.load(checkpoint)

    def _checkpoint(self) -> Any:
        ranks = self._values(TFReplica.random_state)
        return self._first(TFReplica.checkpoint, ranks=ranks).data

    def _restore(self, data: Any) -> None:
        for problem in self._values(TFReplica.check, data=Blob(data)):
            if problem:
                raise CheckpointError(problem)
        for rank, refused in enumerate(self._values(TFReplica.restore, data=Blob(data))):
            if refused:
                self._take_back(rank, *refused)
        self._engine.state_changed_by_hand(replaced=True)

    def _take_back(self, rank: int, said: str, trace: str) -> None:
        """All ranks are as they were before, as one of them could not take a state."""
        again = [each for each in self._values(TFReplica.take_back) if each]
        after = "The state is as it was before"
        if again:
            after = f"It raised again when it was given its old part back ({again[0]}); all else is as it was before"
        raise CheckpointError(
            f"the operator's load_state_dict raised {said}, on rank {rank}. {after}"
        ) from RemoteTraceback(trace)

    def _values(self, method: Callable[..., Any], **given: Any) -> list[Any]:
        return self._engine.run(Job(Call(method, given)))[-1].values

    def _first(self, method: Callable[..., Any], **given: Any) -> Any:
        return self._values(method, **given)[0]

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
        if arguments.workers(None, num_workers) > 1 and not self._factory.settings.distributed:
            raise ConfigError("a trainer made with num_workers=1 cannot grow: make it with num_workers=2 or more")
        self._engine.resize(num_workers)

    def shutdown(self, force: bool = False) -> None:
        """Ends the workers. A second call is fine; any other call afterwards is an error."""
        try:
            self._engine.stop(force=force)
        finally:
            self._calls.end()

    def __enter__(self) -> TFTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.exited(error)
        self.shutdown(force=kind is not None)


def _limits(timeout_s: float, elastic: ElasticConfig) -> Limits:
    return Limits.derive(timeout_s=timeout_s, hang_timeout_s=elastic.hang_timeout_s, start_s=start_limit_s())


def _settings(
    number: int, resources: WorkerResources, elastic: ElasticConfig, *, remote: bool, use_tqdm: bool
) -> ReplicaSettings:
    return ReplicaSettings(
        distributed=number > 1,
        use_gpu=resources.gpus > 0,
        use_tqdm=use_tqdm,
        num_workers=number,
        threads=max(1, int(resources.cpus)) if remote else None,
        seed=SEED if remote else None,
        snapshot_every=elastic.snapshot_every,
    )


def _backend(limits: Limits, settings: ReplicaSettings) -> TensorFlowBackend:
    from raysgd.workers.cluster import driver_address, ensure_cluster

    ensure_cluster()
    return TensorFlowBackend(
        host=driver_address(), join_s=limits.join_s, threads=settings.threads, use_gpu=settings.use_gpu
    )


def _ray_group(backend: Backend, resources: WorkerResources) -> Any:
    from raysgd.workers.ray_group import RayGroup

    return RayGroup(backend, resources)
