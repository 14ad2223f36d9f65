"""Results in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, Result, Run
from raysgd.callbacks.extra import needs
from raysgd.callbacks.figures import for_json, numbers
from raysgd.callbacks.folder import chosen_worker

__all__ = ["WandbCallback"]


class WandbCallback(Callback):
    """Makes one W&B run (of a training function, one for each run): its config, and each number as `train/...` or
    `validate/...` over `step`, the batches trained so far; what a function reports under its own names.

    mode     "online", "offline" (files in the log folder, sent later with `wandb sync`) or "disabled"; without it,
             what WANDB_MODE says
    dir      where the files go; without it, the log folder
    init     further arguments of `wandb.init`
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
    ) -> None:
        self._project, self._name, self._mode, self._init = project, name, mode, dict(init or {})
        self._given = None if dir is None else Path(dir).expanduser()
        self._worker = chosen_worker(worker_to_log)
        self.run: Any = None

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        folder = self._given or run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.run = needs("wandb", who="WandbCallback").init(
            project=self._project or run.name or None,
            name=self._name,
            mode=self._mode,
            dir=str(folder),
            config=for_json(run.config),
            reinit="create_new",  # a run that the script has begun is left alone
            **self._init,
        )
        self.run.define_metric("*", step_metric="step")

    def on_result(self, result: Result) -> None:
        if self.run is None:
            return
        if result.kind == "report":
            values = numbers(result.by_worker[self._worker]) if self._worker < len(result.by_worker) else {}
            shown = {name: value for name, value in values.items() if not name.startswith("_")}
        else:
            values = {**numbers(result.metrics), "world_size": result.world_size, "seconds": result.seconds}
            shown = {f"{result.kind}/{name}": value for name, value in values.items()}
        self.run.log({**shown, "step": result.step})

    def on_end(self, failed: bool) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=int(failed))
