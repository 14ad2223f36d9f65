"""End the loop over epochs when a metric has stopped improving. Driver."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.writers import row_of
from raysgd.config import at_least, one_of
from raysgd.core.measures.metrics import cost, plain, unmeasured
from raysgd.errors import ConfigError, counted

logger = logging.getLogger("raysgd")

# Words in the names of metrics of which more is better.
HIGHER_IS_BETTER = {
    "acc",
    "accuracy",
    "auc",
    "auroc",
    "bleu",
    "f1",
    "hits",
    "iou",
    "map",
    "precision",
    "recall",
    "score",
}


LOWER_IS_BETTER = {"loss", "losses", "error", "mae", "mse", "rmse", "perplexity", "ppl", "wer", "cer"}


def warn_of_mode(what: str, metric: str, mode: str, argument: str = "mode") -> None:
    """Warn if the lowest value of a metric is the best one, although its name says that more is
    better, or the highest one of a loss. `what` says what happens to that value."""
    words = set(re.split(r"[^a-z0-9]+|_", metric.lower()))
    lowest = mode == "min" and HIGHER_IS_BETTER & words
    if lowest or (mode == "max" and LOWER_IS_BETTER & words and not {"neg", "negative"} & words):
        now, other, value = ("lowest", "highest", "max") if lowest else ("highest", "lowest", "min")
        logger.warning("%s the %s value: pass %s=%r for the %s", what, now, argument, value, other)


class EarlyStopping(Callback):
    """Ends `trainer.fit()`, or a loop over `trainer.epochs()`, after `patience` results in a row
    whose `metric` did not improve the best one by more than `min_delta`. `mode` is "min" or "max":
    which values are better.

        trainer = TorchTrainer(..., callbacks=[EarlyStopping("val_loss", patience=3)])
        trainer.fit(100)

    `best` is the best value so far. Results without the metric do not count, and NaN is never
    better. A resumed trainer continues to count where the killed script was, another one begins
    from the start.
    """

    stops_training: ClassVar[bool] = True  # its only errors are mistakes of the user

    def __init__(
        self, metric: str, *, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if not isinstance(metric, str):
            raise ConfigError(f"metric must be the name of a metric such as 'val_loss', got {metric!r}")
        at_least("patience", patience, 1, whole=True)
        one_of("mode", mode, "min", "max")
        at_least("min_delta", min_delta, 0)
        warn_of_mode(f"EarlyStopping({metric!r}) waits for", metric, mode)
        self._metric, self._patience, self._mode, self._delta = metric, patience, mode, min_delta
        self._forget()

    def _forget(self) -> None:
        self.best: float | None = None
        self._waited, self.wants_stop = 0, False
        self._measured: bool | None = None  # None before the first result

    def on_start(self, run: Run) -> None:
        self._forget()

    def on_resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._see(row)

    def on_result(self, result: CallResult) -> None:
        if result.kind == "report":
            raise ConfigError(
                "EarlyStopping ends loops over trainer.epochs() and trainer.fit() of a TorchTrainer or TFTrainer; a training "
                "function ends its own loop"
            )
        row, self._measured = row_of(result), bool(self._measured)
        if result.kind == "validate" and self._metric.startswith("val") and self._metric not in row:
            raise unmeasured(f"EarlyStopping({self._metric!r})", self._metric, result.metrics)
        self._see(row)

    def on_end(self, failed: bool) -> None:
        if not failed and self._measured is False:
            logger.warning("EarlyStopping(%r) had no effect, because no result had this metric", self._metric)

    def _see(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") == "test" and not self._metric.startswith("test_"):
            return  # an operator's own metrics have the same name in both, and a test must not choose the model
        value = plain(row.get(self._metric))
        if not isinstance(value, (int, float)):
            return
        self._measured = True
        self.wants_stop = False
        if cost(value, self._mode) < cost(self.best, self._mode) - self._delta:
            self.best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self.wants_stop, self._waited = True, 0
            best = "none" if self.best is None else f"{self.best:.4g}"
            results = counted(self._patience, "result")
            by = f" by more than {self._delta:g}" if self._delta else ""
            self.stop_reason = (
                f"{self._metric} has not improved{by} for {results} (mode={self._mode!r}, best value {best})"
            )
