"""What callbacks that write need: rows, scalars, JSON values, ranks, optional packages. Driver."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Underway
from raysgd.config import at_least
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.metrics import plain
from raysgd.errors import ConfigError, counted, ranked, text_of

ROW_FIELDS = ("kind", "epoch", "step", "world_size", "seconds")
# Numbers that measure the amount of work and not its quality. They are plotted only on request.
COUNTS = ("epoch", "step", "world_size", "seconds", "batch_count", "num_samples", "skipped_steps")


class Writer(Callback):
    """Writes each result, and with `log_every=n` also points within calls of `train`, as results of
    the kind "batch": one worker's values of its last batch, at most every n batches, as its
    progress messages come."""

    def __init__(self, log_every: int | None) -> None:
        if log_every is not None:
            at_least("log_every", log_every, 1, whole=True)
        self._every, self._written, self._began = log_every, 0, 0.0

    def on_progress(self, now: Underway) -> None:
        batches = now.progress.batches
        if not now.worker:  # a call begins
            self._written, self._began = 0, time.monotonic()
        last = {name.removeprefix("last_"): value for name, value in now.metrics.items() if name.startswith("last_")}
        if self._every is None or now.kind != "train" or batches // self._every <= self._written // self._every:
            return
        if last:
            self._written = batches
            at: dict[str, Any] = {"epoch": now.progress.epoch, "step": now.progress.step, "world_size": now.world_size}
            took = time.monotonic() - self._began
            self.on_result(CallResult(kind="batch", metrics=last, by_worker=[], seconds=took, **at))


def for_json(value: Any, *, strict: bool = True) -> Any:
    """Convert a value for JSON. NaN and infinity, which `strict` JSON lacks, become the strings
    "NaN", "Infinity" and "-Infinity". Arrays become lists, and other objects their `str`."""
    value = plain(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        finite = not strict or math.isfinite(value)
        return value if finite else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): for_json(inner, strict=strict) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(inner, strict=strict) for inner in value]
    if hasattr(value, "tolist"):
        return for_json(value.tolist(), strict=strict)
    return text_of(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}/")
        else:
            result[f"{prefix}{key}"] = value
    return result


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Collect the numbers among the flattened values, NaN included."""
    leaves = {key: plain(value) for key, value in flat(values).items()}
    return {key: float(value) for key, value in leaves.items() if isinstance(value, (int, float))}


def measured_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Collect the names in these scalars, without counts and what only matters for debugging."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name not in COUNTS and not name.startswith(("last_", "_", "profile/"))]


def scalars_of_report(result: CallResult, rank: int) -> dict[str, float]:
    """The scalars that one rank of a function reported, without raysgd's own."""
    reported = scalars(result.by_worker[rank]) if rank < len(result.by_worker) else {}
    return {name: value for name, value in reported.items() if not name.startswith("_")}


def tagged_scalars(result: CallResult, rank: int) -> dict[str, float]:
    """What dashboards plot: `train/...`, `validate/...`, or one rank's report."""
    if result.kind == "report":
        return scalars_of_report(result, rank)
    values = {**scalars(result.metrics), "world_size": result.world_size, "seconds": result.seconds}
    return {f"{result.kind}/{name}": value for name, value in values.items()}


def row_of(result: CallResult) -> dict[str, Any]:
    """Convert a result to a row: its own fields, then the metrics. A metric with the name of a
    field is renamed to `reported_...`, unless it is the same epoch."""
    metrics = {
        f"reported_{name}" if name in ROW_FIELDS else name: value
        for name, value in result.metrics.items()
        if name != "epoch" or value != result.epoch
    }
    return {**{name: getattr(result, name) for name in ROW_FIELDS}, **metrics}


def recovery_scalars(recovery: Recovery) -> dict[str, float]:
    """The numbers of a recovery that dashboards plot."""
    phases = {f"{name}_seconds": took for name, took in recovery.phases.items()}
    values = {"world_size": recovery.world_size_after, "batches_redone": recovery.batches_redone}
    return {"seconds": recovery.seconds, **phases, **{name: float(value) for name, value in values.items()}}


def recovery_text(recovery: Recovery) -> str:
    """Describe a recovery in one line, without its detail."""
    ranks = f"{ranked(recovery.removed_ranks)} removed, " if recovery.removed_ranks else ""
    phases = ", ".join(f"{name} {took:.3g}" for name, took in recovery.phases.items())
    return (
        f"{recovery.reason}: {recovery.world_size_before} -> {counted(recovery.world_size_after, 'worker')}, {ranks}"
        f"epoch {recovery.epoch}, batch {recovery.batch}, {'in place' if recovery.in_place else 'not in place'}, "
        f"{counted(recovery.batches_redone, 'batch', 'batches')} redone, {recovery.seconds:.3g} s{f' ({phases})' if phases else ''}"
    )


def check_rank(rank: int) -> int:
    """Check the rank that a callback logs. Raise `ConfigError` if it is not a rank."""
    if not _is_rank(rank):
        raise ConfigError(f"worker_to_log must be one rank (0, 1, ...), got {rank!r}")
    return rank


def check_ranks(choice: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Check the ranks that a callback logs, None for all. Raise `ConfigError` for others."""
    if choice is None:
        return None
    ranks = (choice,) if isinstance(choice, int) else tuple(choice)
    if not ranks or not all(map(_is_rank, ranks)):
        raise ConfigError(f"workers_to_log must be a rank, a list of ranks, or None for all ranks, got {choice!r}")
    return ranks


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 0


def import_extra(module: str, *, user: str) -> Any:
    """Import an optional package, or raise an ImportError that says who needs which extra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = {"pandas": "history", "matplotlib": "history"}.get(package, package)
        raise ImportError(f"{user} needs {package}: pip install 'raysgd[{extra}]'") from error
