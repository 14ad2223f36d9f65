"""The directory of a run of `fit()`, and the files in it beside the checkpoints, with which the run
can be read back and resumed. Driver.

    trainer.zip    the trainer's settings, each pickled separately: those that `restore` overrides are never read
    results.jsonl  one line for each report of rank 0: the metrics, and the number of the newest checkpoint
    state.json     the run's status, its trainer and its ids
"""

from __future__ import annotations

import io
import json
import logging
import time
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raysgd.core.measures.metrics import plain
from raysgd.errors import CheckpointError, described, shown
from raysgd.storage import checksums, folders, locations
from raysgd.storage.locations import Place
from raysgd.storage.log_folders import RESULTS, create_new_folder, numbered, timestamp
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri
from raysgd.train.callbacks import autofill
from raysgd.train.settings import RunConfig

logger = logging.getLogger("raysgd")

SETTINGS, ROWS, STATE, OWNER = "trainer.zip", "results.jsonl", "state.json", ".stored-at"
IDS = ("trial_id", "experiment_id")


@dataclass(frozen=True)
class StoredRun:
    """What a run has written so far. `settings` are pickles, by name."""

    trainer: str
    status: Literal["running", "finished", "failed"]
    error: str
    settings: Mapping[str, bytes] = field(repr=False)
    ids: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    checkpoints: tuple[int | None, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, where: Any) -> StoredRun:
        if not can_restore(where):
            raise CheckpointError(
                f"there is no run to resume at {where}: pass the directory of a run of fit() (its result's `path`), which has "
                f"a file {SETTINGS}"
            )
        state = _read_state(where / STATE)
        lines = _read_lines(where / ROWS)
        if lines and state["status"] != "running":
            lines[-1]["metrics"]["done"] = True
        return cls(
            state["trainer"],
            state["status"],
            state["error"],
            _read_settings(where),
            {name: str(state[name]) for name in IDS if name in state},
            tuple(line["metrics"] for line in lines),
            tuple(line["checkpoint"] for line in lines),
        )

    def metrics_by_checkpoint(self) -> dict[int, dict[str, Any]]:
        """Return the metrics reported with each checkpoint, or with the next report."""
        metrics: dict[int, dict[str, Any]] = {}
        for row, number in zip(self.rows, self.checkpoints, strict=True):
            if number is not None:
                metrics.setdefault(number, row)
        return metrics


def _read_state(place: Any) -> dict[str, Any]:
    state = folders.parse_json(locations.read(place), place)
    texts = [state.get(name) for name in ("trainer", "status", "error")]
    if not all(isinstance(text, str) for text in texts) or state["status"] not in ("running", "finished", "failed"):
        raise CheckpointError(f"{place} is damaged: it has no valid status, but {texts!r:.200}")
    return state


def _read_lines(place: Any) -> list[dict[str, Any]]:
    """Read the reports, each with the number of the newest checkpoint at that time. The last line
    may be truncated."""
    reports = []
    for number, line in enumerate(locations.read(place).split(b"\n")[:-1] if place.is_file() else (), 1):
        report = folders.parse_json(line, f"line {number} of {place}")
        metrics, newest = report.get("metrics"), report.get("checkpoint", "")
        if not isinstance(metrics, dict) or not isinstance(newest, (int, type(None))):
            raise CheckpointError(f"{place} is damaged: line {number} is not a report")
        reports.append(report)
    return reports


def _read_settings(where: Any) -> dict[str, bytes]:
    """Read the pickles of the settings by name, without loading one: this runs no code."""
    data = locations.read(where / SETTINGS)
    try:
        checksums.verify(data)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except Exception as error:  # zipfile raises various errors for damaged archives
        raise CheckpointError(
            f"{where / SETTINGS} does not hold the settings of a trainer, or is damaged ({error})"
        ) from error


def can_restore(where: Any) -> bool:
    """Whether there is a run that can be resumed."""
    return bool((where / SETTINGS).is_file() and (where / STATE).is_file())


class RunRecord:
    """Owns these files of one run, its ids, and its rows. `where` is where the run is stored, and
    `log_dir` a directory on this machine, where callbacks write. They differ only if the run is
    stored under a URI."""

    def __init__(
        self, where: Any, log_dir: Path, trainer: str, config: Mapping[str, Any], past: StoredRun | None
    ) -> None:
        self.where, self.log_dir, self.trainer = where, log_dir, trainer
        self._ids = {"trial_id": f"{uuid.uuid4().hex[:5]}_00000", "experiment_id": uuid.uuid4().hex}
        self._ids |= {} if past is None else past.ids
        self._config = {"train_loop_config": dict(config)} if config else {}
        self.rows = [] if past is None else [{**row, "done": False} for row in past.rows]
        self._numbers = [] if past is None else list(past.checkpoints)
        self._restored = len(self.rows)
        self._before = float(self.rows[-1].get("time_total_s", 0.0)) if self.rows else 0.0
        self._began = self._last = self._warm = time.time()

    def trial(self) -> dict[str, Any]:
        """What `train.get_context()` says about the run."""
        trial_id = self._ids["trial_id"]
        return {
            "experiment_name": self.where.name,
            "trial_name": f"{self.trainer}_{trial_id}",
            "trial_id": trial_id,
            "trial_dir": str(self.log_dir),
        }

    def begin(self, settings: Mapping[str, bytes]) -> None:
        """Write the files, and an earlier run's rows again: the last may be incomplete."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        lines = map(_make_line, self.rows, self._numbers)
        locations.write(self.log_dir / ROWS, "".join(lines).encode())
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, pickled in settings.items():
                archive.writestr(zipfile.ZipInfo(name), pickled)
        locations.write(self.where / SETTINGS, buffer.getbuffer())
        self._write_status("running")

    def note_start(self) -> None:
        """Note that the workers are ready, and that the function starts."""
        self._last = self._warm = time.time()

    def add(self, row: Mapping[str, Any], newest: int) -> None:
        """Write a report of rank 0. Upload the file whenever there is a new checkpoint; before the
        first one, `newest` is below 0."""
        number = newest if newest >= 0 else None
        is_new = number is not None and number != (self._numbers[-1] if self._numbers else None)
        self.rows.append({**self._autofill(), **row})
        self._numbers.append(number)
        with open(self.log_dir / ROWS, "a", encoding="utf-8") as file:
            file.write(_make_line(self.rows[-1], number))
        if is_new:
            self._upload()

    def end(self, error: BaseException | None) -> None:
        if self.rows:
            self.rows[-1]["done"] = True
        self._upload()
        self._write_status("finished" if error is None else "failed", "" if error is None else described(error))

    def fail(self, error: BaseException) -> None:
        """Write that the run has failed. An error in here must not hide the error that ended it."""
        try:
            self.end(error)
        except Exception:
            logger.exception("could not write the end of the run to %s", self.where)
        text = "%s: the checkpoints and reports of this run are in %s; %s.restore(path) resumes it"
        logger.error(text, type(error).__name__, self.where, self.trainer)

    def _write_status(self, status: str, error: str = "") -> None:
        state = {"trainer": self.trainer, "status": status, "error": error, **self._ids}
        locations.write(self.where / STATE, folders.dump_json(state))

    def _upload(self) -> None:
        if self.where != self.log_dir and (self.log_dir / ROWS).exists():
            locations.write(self.where / ROWS, (self.log_dir / ROWS).read_bytes())

    def _autofill(self) -> dict[str, Any]:
        count, now = len(self.rows) + 1, time.time()
        row = autofill(count, self._began, self._last, now) | {
            "time_total_s": self._before + now - self._began,
            "iterations_since_restore": count - self._restored,
            **self._ids,
            "experiment_tag": "0",
            "config": self._config,
            # raysgd does not count these, but code for Ray reads them.
            "episodes_total": None,
            "timesteps_total": None,
            "timesteps_since_restore": 0,
            "warmup_time": self._warm - self._began,
        }
        self._last = now
        return row


def _make_line(row: dict[str, Any], checkpoint: int | None) -> str:
    """Make the line of a report, which ends with a digest of the rest."""
    report = _with_text_keys({"metrics": row, "checkpoint": checkpoint})
    return folders.dump_json(json.loads(json.dumps(report, default=as_json))).decode() + "\n"


def _with_text_keys(value: Any) -> Any:
    """Convert keys of nested dictionaries to strings, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def as_json(value: Any) -> Any:
    """A number for a single number, and the `repr` of other objects that are not JSON."""
    number = plain(value)
    return shown(value) if number is value else number


def choose_place(trainer: str, config: RunConfig) -> tuple[Place, Path]:
    """Choose where the run is stored, and its directory here: new ones, of no other run."""
    home = Path.home() / RESULTS if config.storage_path is None else locations.place(config.storage_path)
    home = home.absolute() if isinstance(home, Path) else home
    name = config.name or f"{trainer}_{timestamp()}"
    if isinstance(home, Path):
        new: Place = create_new_folder(home, name)
    else:
        new = home / next(candidate for candidate in numbered(name) if not locations.names(home / candidate))
    if new != home / name:
        logger.warning("there is a run at %s already: this run is stored at %s", home / name, new)
    return new, choose_log_dir(new)


def choose_log_dir(where: Place, *, resume: bool = False) -> Path:
    """Choose the directory here where callbacks write. For a URI it is a new one, because another
    run may have used the name, or with `resume` that of this run."""
    if not isinstance(where, Uri):
        return where
    for path in (Path.home() / RESULTS / name for name in numbered(where.name)):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not (resume and path.is_dir() and _owner(path) in (str(where), None)):
                continue
        locations.write(path / OWNER, str(where).encode())
        return path
    raise AssertionError("there is always another number")


def _owner(path: Path) -> str | None:
    """The URI of the run that uses this directory, or None if it is empty."""
    if (path / OWNER).is_file():
        return mask(locations.read(path / OWNER).decode())
    return "another run" if any(path.iterdir()) else None
