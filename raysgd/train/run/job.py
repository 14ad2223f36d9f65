"""A run of a training function that has not started: its workers, what it calls, and what it starts
from. Driver."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.config import ElasticConfig, WorkerResources, at_least, refuse_comparison, refuse_shares
from raysgd.errors import ConfigError
from raysgd.storage.locations import place
from raysgd.storage.remote import Uri
from raysgd.train.backends import BackendConfig
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.splits import DatasetSplits
from raysgd.train.settings import DEFAULT_ELASTIC, CheckpointConfig, check_failure_limit, check_strategy
from raysgd.workers.serialization import pickler_class

BEFORE_FIRST = -1  # fit() and trials count checkpoints from 0


@dataclass(frozen=True)
class FunctionWorkers:
    """The workers of training functions, as a trainer's arguments describe them.

    backend      a `BackendConfig`
    num_workers  the largest number of workers
    resources    what each reserves
    max_retries  how many worker failures a run survives (-1: any number)
    elastic      an `ElasticConfig`
    start_with   how many workers are enough to start; None: all
    """

    backend: BackendConfig
    num_workers: int
    resources: WorkerResources
    max_retries: int = 3
    elastic: ElasticConfig = DEFAULT_ELASTIC
    start_with: int | None = None

    def __post_init__(self) -> None:
        at_least("num_workers", self.num_workers, 1, whole=True)
        check_failure_limit("max_retries", self.max_retries)
        refuse_shares(self.elastic)
        refuse_comparison(self.elastic, "a training function owns its models, so nothing else knows them")

    @property
    def planned(self) -> int | None:
        """How many workers a run has unless some are missing; None if fewer are enough to start."""
        return self.num_workers if self.start_with in (None, self.num_workers) else None


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """A configured run. `Trainer` and `fit()` start it on the driver, and Tune in a trial.

    function           the training function, with its `config`
    checkpoint         what it starts from
    checkpoint_config  which checkpoints stay
    metadata, trial    what `train.get_context()` returns
    shards             creates the parts of the datasets
    hook               what each worker calls when it starts
    record             gets rank 0's metrics of each round, and the number of the newest checkpoint,
                       before the round's reports return; the writer's thread calls it
    """

    function: Callable[..., Any]
    config: Any = field(default_factory=dict)
    checkpoint: Any = None
    checkpoint_config: CheckpointConfig | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] = field(default_factory=dict)
    shards: DatasetSplits | None = None
    hook: Callable[[], Any] | None = None
    record: Callable[[dict[str, Any], int], None] = lambda metrics, newest: None

    def make_manager(self, directory: Any, *, latest_id: int = BEFORE_FIRST) -> CheckpointManager:
        """Return the manager of the run's checkpoints, which are stored in its directory."""
        check_strategy(self.checkpoint_config)
        initial = pack_checkpoint(self.checkpoint)
        return CheckpointManager(directory, self.checkpoint_config, latest_id=latest_id, initial=initial)


def function_name(function: Any) -> str:
    """The name of a training function, which may be any callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def check_function(function: Any, config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Check a function and its arguments (none, or the config). Raise ConfigError for others."""
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"the training function must be a function of no or one argument, got {function!r}. An operator class is for "
            "raysgd.TorchTrainer or raysgd.TFTrainer"
        )
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    unmet = [str(each) for each in parameters if each.kind in named and each.default is each.empty]
    if unmet:
        raise ConfigError(
            f"raysgd calls the training function with the config as its only argument, and this one requires {unmet[0]} by "
            "name: give it one positional parameter, or bind the names with functools.partial"
        )
    count = len([each for each in parameters if each.kind not in named])
    if count > 1:
        raise ConfigError(
            f"the training function must take no argument or one (the config), and this one takes {count}: put the "
            "others into the config, or bind them with functools.partial"
        )
    return function, (dict(config or {}),) * count


def pack_checkpoint(checkpoint: Any) -> bytes | None:
    """Make bytes of the checkpoint that a run starts from. Raise an error here, before any worker
    gets it, if it is damaged, unknown, or would run code."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Mapping):
        checkpoint = Checkpoint.from_dict(checkpoint)
    elif isinstance(checkpoint, (str, Path, Uri)):
        where = place(checkpoint)
        if not where.exists():
            raise ConfigError(f"there is no checkpoint at {where.absolute() if isinstance(where, Path) else where}")
        checkpoint = Checkpoint(where)
    elif not isinstance(checkpoint, Checkpoint) and hasattr(checkpoint, "as_directory"):  # Ray's own, from Tune
        with checkpoint.as_directory() as folder:
            return Checkpoint(folder).checked_bytes(pickler=pickler_class())
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"checkpoint must be a dict, the path or URI of a stored one, or a Checkpoint, got {checkpoint!r}"
        )
    return checkpoint.checked_bytes(pickler=pickler_class())
