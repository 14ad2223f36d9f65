"""Log results to Weights & Biases. Driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd.callbacks import writers
from raysgd.callbacks.base import CallResult, Run
from raysgd.core.decisions.policy import Recovery


class WandbCallback(writers.Writer):
    """Creates one W&B run per trainer (for functions, per run). Logs the config, and each scalar as
    `train/...` or `validate/...` over `step`, the batches trained so far. A function's scalars keep
    their own names. Recoveries and planned changes of the workers are `recovery/...`.

    project  the project of the run; by default W&B's
    name     the name of the run; by default the operator's
    worker_to_log  of functions, the rank whose scalars are logged
    mode     "online", "offline" (files in the log folder, for `wandb sync`) or "disabled"; by
             default, WANDB_MODE
    dir      where W&B writes its files; by default, the log folder
    init     further arguments of `wandb.init`
    log_every  also log a point `batch/...` about every so many batches of a call of `train`
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        *,
        mode: str | None = None,
        dir: str | Path | None = None,
        worker_to_log: int = 0,
        init: Mapping[str, Any] | None = None,
        log_every: int | None = None,
    ) -> None:
        super().__init__(log_every)
        self._project, self._name, self._mode, self._init = project, name, mode, dict(init or {})
        self._user_folder = None if dir is None else Path(dir).expanduser()
        self._worker = writers.check_rank(worker_to_log)
        self.run: Any = None

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        folder = self._user_folder or run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.run = writers.import_extra("wandb", user="WandbCallback").init(
            project=self._project or run.name or None,
            name=self._name,
            mode=self._mode,
            dir=str(folder),
            config=writers.for_json(run.config),
            reinit="create_new",  # so that a run that the script has started is left alone
            **self._init,
        )
        self.run.define_metric("*", step_metric="step")

    def on_result(self, result: CallResult) -> None:
        if self.run is not None:
            self.run.log({**writers.tagged_scalars(result, self._worker), "step": result.step})

    def on_recovery(self, recovery: Recovery) -> None:
        if self.run is not None:
            values = {
                "text": writers.recovery_text(recovery),
                "detail": recovery.detail,
                **writers.recovery_scalars(recovery),
            }
            self.run.log({**{f"recovery/{name}": value for name, value in values.items()}, "step": recovery.step})

    def on_end(self, failed: bool) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=int(failed))
