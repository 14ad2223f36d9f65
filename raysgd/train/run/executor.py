"""`BackendExecutor`: runs training functions as in ray.util.sgd.v2. Driver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.storage.locations import Place, place
from raysgd.train.backends import BackendConfig
from raysgd.train.run.driver import FunctionDriver
from raysgd.train.run.job import FunctionJob, FunctionWorkers
from raysgd.train.run.worker_group import check_resources
from raysgd.train.settings import DEFAULT_ELASTIC, CheckpointConfig, check_strategy


class TrainingResultType(Enum):
    """The kinds of results of Ray Train 1.x."""

    REPORT = "report"
    CHECKPOINT = "checkpoint"


class BackendExecutor(FunctionDriver):
    """Runs training functions, one at a time. `Trainer` adds a log directory and callbacks.

    backend_config                   a `BackendConfig`
    num_workers                      the largest number of workers
    num_cpus_per_worker              CPUs that each reserves
    num_gpus_per_worker              GPUs that each reserves
    additional_resources_per_worker  other Ray resources that each reserves
    max_retries                      how many worker failures a run survives (-1: any number)
    elastic                          an `ElasticConfig`
    start_with                       how many workers are enough to start; by default all
    """

    def __init__(
        self,
        backend_config: BackendConfig,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
        start_with: int | None = None,
    ) -> None:
        worker = check_resources(num_workers, num_cpus_per_worker, num_gpus_per_worker, additional_resources_per_worker)
        elastic = elastic or DEFAULT_ELASTIC
        super().__init__(FunctionWorkers(backend_config, num_workers, worker, max_retries, elastic, start_with))

    def start_training(
        self,
        train_func: Callable[..., Any],
        run_dir: str | Place | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        latest_checkpoint_id: int | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the function on every worker, and return at once. Without a `run_dir`, checkpoints
        are only kept in memory."""
        check_strategy(checkpoint_strategy)
        strategy = checkpoint_strategy if run_dir is not None else CheckpointConfig(num_to_keep=0)
        job = FunctionJob(function=train_func, config=config, checkpoint=checkpoint, checkpoint_config=strategy)
        folder = place(run_dir or tempfile.gettempdir()) / "checkpoints"
        self.begin(job, job.make_manager(folder, latest_id=latest_checkpoint_id or 0))

    def run(self, train_func: Callable[..., Any]) -> list[Any]:
        """Run `train_func` to its end, and return what every rank returned."""
        self.start_training(train_func)
        return self.finish_training()

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """Fetch what every rank reported in the next round; None: the function has ended."""
        result = self.fetch_next_round()
        return None if result is None else result.rows

    def get_next_results(self) -> list[SimpleNamespace] | None:
        """Fetch the next round as results with a `type` and `data`, as in Ray Train 1.x."""
        rows = self.fetch_next_result()
        return None if rows is None else [SimpleNamespace(type=TrainingResultType.REPORT, data=row) for row in rows]

    @property
    def latest_checkpoint_id(self) -> int | None:
        """The number of the newest checkpoint. Numbers may begin above 0."""
        return None if self._run is None else self._run.manager.latest_id
