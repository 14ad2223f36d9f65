"""Results in an MLflow store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, Result, Run
from raysgd.callbacks.extra import needs
from raysgd.callbacks.figures import flat, numbers
from raysgd.callbacks.folder import chosen_worker

__all__ = ["MLflowCallback"]

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
OWN = (DATABASE, ARTIFACTS, "mlruns")


class MLflowCallback(Callback):
    """Makes one MLflow run (of a training function, one for each run): its config as parameters, each number as a metric
    over the batches trained so far (of a function, over its reports, of one rank).

    tracking_uri     the store; without it MLFLOW_TRACKING_URI, or a database `mlflow.db` in the log folder
    experiment_name  made where there is none of that name (or `experiment_id`, of one that is there)
    save_artifact    at the end, keep everything in the log folder with the MLflow run

    It uses a client of its own: an MLflow run that your script has begun is left alone.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        registry_uri: str | None = None,
        experiment_id: str | None = None,
        experiment_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_artifact: bool = False,
        logdir: str | Path | None = None,
        worker_to_log: int = 0,
    ) -> None:
        self.tracking_uri = tracking_uri
        self._registry_uri, self._experiment_id, self._experiment_name = registry_uri, experiment_id, experiment_name
        self._tags, self._save_artifact = dict(tags or {}), save_artifact
        self._worker = chosen_worker(worker_to_log)
        self._given = None if logdir is None else Path(logdir).expanduser()
        self._given_uri = tracking_uri
        self._folder = Path()
        self._client: Any = None
        self.run_id: str | None = None

    def on_start(self, run: Run) -> None:
        self._client = None
        tracking = needs("mlflow.tracking", who="MLflowCallback")
        self._folder = self._given or run.folder
        self.tracking_uri = self._given_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if self.tracking_uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.tracking_uri = f"sqlite:///{self._folder.absolute()}/{DATABASE}"
        client = tracking.MlflowClient(self.tracking_uri, self._registry_uri)
        self.run_id = client.create_run(self._experiment(client, run), tags=self._tags).info.run_id
        self._client = client
        for name, value in flat(run.config).items():
            client.log_param(self.run_id, name, value)

    def on_result(self, result: Result) -> None:
        if self._client is None:
            return
        metric = needs("mlflow.entities", who="MLflowCallback").Metric
        now = int(time.time() * 1000)
        if result.kind == "report":
            values = numbers(result.by_worker[self._worker]) if self._worker < len(result.by_worker) else {}
            values = {name: value for name, value in values.items() if not name.startswith("_")}
        else:
            values = {**numbers(result.metrics), f"{result.kind}_seconds": result.seconds}
            values["world_size"] = float(result.world_size)
        found = [metric(name, value, now, result.step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=found)

    def on_end(self, failed: bool) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._save_artifact and self._folder.exists():
                for path in sorted(self._folder.iterdir()):
                    if path.name not in OWN:  # a copy of the store would be in the store
                        client.log_artifact(self.run_id, str(path))
        finally:
            client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _experiment(self, client: Any, run: Run) -> str:
        if self._experiment_id is not None:
            return self._experiment_id
        name = self._experiment_name or run.name or run.trainer
        there = client.get_experiment_by_name(name)
        if there is not None:
            return str(there.experiment_id)
        local = self._given_uri is None and "MLFLOW_TRACKING_URI" not in os.environ
        where = (self._folder.absolute() / ARTIFACTS).as_uri() if local else None
        return str(client.create_experiment(name, artifact_location=where))
