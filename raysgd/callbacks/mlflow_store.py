"""Log results to MLflow. Driver."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raysgd.callbacks import writers
from raysgd.callbacks.base import CallResult, Run
from raysgd.core.decisions.policy import Recovery

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow_artifacts"
TAG, RECOVERIES = "raysgd.recoveries", "recoveries.json"
OWN = (DATABASE, ARTIFACTS, "mlruns")


class MLflowCallback(writers.Writer):
    """Creates one MLflow run per trainer (for functions, per run). Logs the config as parameters,
    and each scalar as a metric over the batches trained so far (for functions, one rank's scalars
    over its reports). Recoveries and planned changes of the workers are metrics `recovery_...`, the
    tag `raysgd.recoveries`, and the artifact `recoveries.json`, which are stored with the next
    result, or at the end.

    tracking_uri     the store; by default MLFLOW_TRACKING_URI, or else a database `mlflow.db` in
                     the log folder
    registry_uri     the registry of models; by default the store
    experiment_name  created if it does not exist (or pass the `experiment_id` of an existing
                     experiment)
    tags             tags of the MLflow run
    logdir           the folder whose content `save_artifact` stores; by default the log folder
    worker_to_log    of functions, the rank whose scalars are logged
    log_every        also log a point `batch_...` about every so many batches of a call of train()
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
        *,
        log_every: int | None = None,
    ) -> None:
        super().__init__(log_every)
        self.tracking_uri = tracking_uri
        self._registry_uri, self._experiment_id, self._experiment_name = registry_uri, experiment_id, experiment_name
        self._tags, self._save_artifact = dict(tags or {}), save_artifact
        self._worker = writers.check_rank(worker_to_log)
        self._user_folder = None if logdir is None else Path(logdir).expanduser()
        self._given_uri = tracking_uri
        self._folder = Path()
        self._client: Any = None
        self._recoveries: list[Recovery] = []
        self._stored = 0  # how many of them
        self.run_id: str | None = None

    def on_start(self, run: Run) -> None:
        self._client, self._recoveries, self._stored = None, [], 0
        tracking = writers.import_extra("mlflow.tracking", user="MLflowCallback")
        self._folder = self._user_folder or run.folder
        self.tracking_uri = self._given_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if self.tracking_uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.tracking_uri = f"sqlite:///{self._folder.absolute()}/{DATABASE}"
        client = tracking.MlflowClient(self.tracking_uri, self._registry_uri)
        self.run_id = client.create_run(self._experiment(client, run), tags=self._tags).info.run_id
        self._client = client
        for name, value in writers.flat(run.config).items():
            client.log_param(self.run_id, name, value)

    def on_result(self, result: CallResult) -> None:
        if self._client is None:
            return
        metric = writers.import_extra("mlflow.entities", user="MLflowCallback").Metric
        now = int(time.time() * 1000)
        if result.kind == "report":
            values = writers.scalars_of_report(result, self._worker)
        else:
            values = {**writers.scalars(result.metrics), f"{result.kind}_seconds": result.seconds}
            values["world_size"] = float(result.world_size)
        prefix = "batch_" if result.kind == "batch" else ""
        logged = [metric(prefix + name.removeprefix(prefix), value, now, result.step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=logged)
        self._store_recoveries(self._client)

    def on_recovery(self, recovery: Recovery) -> None:
        self._recoveries.append(recovery)  # the store may be slow, and a call is waiting

    def _store_recoveries(self, client: Any) -> None:
        new, self._stored = self._recoveries[self._stored :], len(self._recoveries)
        if not new:
            return
        metric = writers.import_extra("mlflow.entities", user="MLflowCallback").Metric
        for each in new:
            values = writers.recovery_scalars(each).items()
            logged = [metric(f"recovery_{name}", value, int(each.time * 1000), each.step) for name, value in values]
            client.log_batch(self.run_id, metrics=logged)
        counts = Counter(each.reason for each in self._recoveries)
        client.set_tag(self.run_id, TAG, ", ".join(f"{reason}: {count}" for reason, count in counts.items()))
        records = [writers.for_json(asdict(each)) for each in self._recoveries]
        client.log_text(self.run_id, json.dumps(records, indent=1), RECOVERIES)

    def on_end(self, failed: bool) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            self._store_recoveries(client)
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
