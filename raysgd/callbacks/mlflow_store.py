"""Log results to MLflow. Driver."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.writers import check_rank, flat, import_extra, scalars, scalars_of_report

__all__ = ["MLflowCallback"]

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
OWN = (DATABASE, ARTIFACTS, "mlruns")


class MLflowCallback(Callback):
    """Creates one MLflow run per trainer (for functions, per run). Logs the config as parameters, and each scalar as a
    metric over the batches trained so far (for functions, one rank's scalars over its reports).

    tracking_uri     the store; by default MLFLOW_TRACKING_URI, or else a database `mlflow.db` in the log folder
    experiment_name  created if it does not exist (or pass the `experiment_id` of an existing experiment)
    save_artifact    store the content of the log folder with the MLflow run at the end

    Uses its own client, so it does not touch an MLflow run that your script has started.
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
        self._worker = check_rank(worker_to_log)
        self._given = None if logdir is None else Path(logdir).expanduser()
        self._given_uri = tracking_uri
        self._folder = Path()
        self._client: Any = None
        self.run_id: str | None = None

    def on_start(self, run: Run) -> None:
        self._client = None
        tracking = import_extra("mlflow.tracking", user="MLflowCallback")
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

    def on_result(self, result: CallResult) -> None:
        if self._client is None:
            return
        metric = import_extra("mlflow.entities", user="MLflowCallback").Metric
        now = int(time.time() * 1000)
        if result.kind == "report":
            values = scalars_of_report(result, self._worker)
        else:
            values = {**scalars(result.metrics), f"{result.kind}_seconds": result.seconds}
            values["world_size"] = float(result.world_size)
        logged = [metric(name, value, now, result.step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=logged)

    def on_end(self, failed: bool) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._save_artifact and self._folder.exists():
                for path in sorted(self._folder.iterdir()):
                    if path.name not in OWN:  # the store must not be copied into itself
                        client.log_artifact(self.run_id, str(path))
        finally:
            client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    def _experiment(self, client: Any, run: Run) -> str:
        if self._experiment_id is not None:
            return self._experiment_id
        name = self._experiment_name or run.name or run.trainer
        existing = client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        local = self._given_uri is None and "MLFLOW_TRACKING_URI" not in os.environ
        location = (self._folder.absolute() / ARTIFACTS).as_uri() if local else None
        return str(client.create_experiment(name, artifact_location=location))
