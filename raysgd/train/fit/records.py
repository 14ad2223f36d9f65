"""What a run of a function trainer writes beside its checkpoints, so that it can be looked at later, and gone on with.

trainer.pkl      the trainer's settings, each pickled by itself, so that one that is given anew is never read
results.jsonl    one line for each report of rank 0: the metrics, and the newest checkpoint's number
state.json       how the run stands, and who ran it
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raysgd.errors import CheckpointError, described, shown
from raysgd.storage import digest, folders, locations
from raysgd.train import unpickling
from raysgd.train.run_session import own_address

__all__ = ["Past", "Record", "Who", "can_restore", "plain"]

SETTINGS, RESULTS, STATE = "trainer.pkl", "results.jsonl", "state.json"
IDS = ("trial_id", "experiment_id")


@dataclass(frozen=True)
class Past:
    """What was written by a run so far. `settings` are pickles, by name."""

    trainer: str
    status: Literal["running", "finished", "failed"]
    error: str
    settings: Mapping[str, bytes] = field(repr=False)
    ids: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    checkpoints: tuple[int | None, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, where: Any) -> Past:
        if not can_restore(where):
            raise CheckpointError(
                f"there is no run to go on with at {where}: that takes the directory of a run of fit(), which is "
                f"its result's `path`, with a file {SETTINGS} in it"
            )
        state = _state(where / STATE)
        lines = [_line(where / RESULTS, number, line) for number, line in enumerate(_lines(where / RESULTS), 1)]
        if lines and state["status"] != "running":
            lines[-1]["metrics"]["done"] = True
        return cls(
            state["trainer"],
            state["status"],
            state["error"],
            _settings(where),
            {name: str(state[name]) for name in IDS if name in state},
            tuple(line["metrics"] for line in lines),
            tuple(line["checkpoint"] for line in lines),
        )

    def reported_with(self) -> dict[int, dict[str, Any]]:
        """The metrics of the report that each checkpoint came with, or right before."""
        found: dict[int, dict[str, Any]] = {}
        for row, number in zip(self.rows, self.checkpoints, strict=True):
            if number is not None:
                found.setdefault(number, row)
        return found


def _state(place: Any) -> dict[str, Any]:
    """How the run stands. Older versions wrote no digest."""
    state, _ = folders.parse_json(locations.read(place), place)
    texts = [state.get(name) for name in ("trainer", "status", "error")]
    if not all(isinstance(text, str) for text in texts) or state["status"] not in ("running", "finished", "failed"):
        raise CheckpointError(f"{place} is damaged: it does not say how the run stands, but {texts!r:.200}")
    return state


def _line(place: Any, number: int, line: bytes) -> dict[str, Any]:
    """A report, and the newest checkpoint's number then."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is damaged: line {number} is not JSON ({error})") from error
    right = isinstance(found, dict) and isinstance(found.get("metrics"), dict)
    if not right or not isinstance(found.get("checkpoint", ""), (int, type(None))):
        raise CheckpointError(f"{place} is damaged: line {number} is no report")
    claimed = found.pop("digest", None)
    if claimed not in (None, folders.json_digest(found)):
        raise CheckpointError(f"{place} is damaged: line {number} does not have the digest that was written with it")
    return dict(found)


def _settings(where: Any) -> dict[str, bytes]:
    """Their names, and each one's pickle: that much runs no code from the file."""
    data = locations.read(where / SETTINGS)
    try:
        digest.verify(data)
        found = dict(unpickling.read(data))
        if not all(isinstance(name, str) and isinstance(each, bytes) for name, each in found.items()):
            raise CheckpointError("they are not pickles, by name")
        return found
    except Exception as error:  # whatever a damaged pickle makes of itself
        raise CheckpointError(
            f"{where / SETTINGS} does not hold a trainer's settings, or is damaged ({error})"
        ) from error


def can_restore(where: Any) -> bool:
    """Is there a run that can be gone on with?"""
    return bool((where / SETTINGS).is_file() and (where / STATE).is_file())


@dataclass(frozen=True)
class Who:
    """A run's names."""

    trainer: str
    experiment: str
    trial_id: str = field(default_factory=lambda: f"{uuid.uuid4().hex[:5]}_00000")
    experiment_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def described(self, directory: Any) -> dict[str, Any]:
        """As `train.get_context()` tells it."""
        return {
            "experiment_name": self.experiment,
            "trial_name": f"{self.trainer}_{self.trial_id}",
            "trial_id": self.trial_id,
            "trial_dir": str(directory),
        }


class Record:
    """Owns these files of one run, and the rows. `where` is the run's place, `log_dir` a directory on this machine;
    they are the same unless the run is stored elsewhere."""

    def __init__(self, where: Any, log_dir: Path, who: Who, config: Mapping[str, Any], past: Past | None) -> None:
        self.where, self.log_dir, self.who = where, log_dir, who
        self._config = {"train_loop_config": dict(config)} if config else {}
        self.rows = [] if past is None else [{**row, "done": False} for row in past.rows]
        self._numbers = [] if past is None else list(past.checkpoints)
        self._written = 0
        self._restored = len(self.rows)
        self._before = float(self.rows[-1].get("time_total_s", 0.0)) if self.rows else 0.0
        self._began = self._last = self._warm = time.time()

    def begin(self, settings: Mapping[str, bytes]) -> None:
        """What an earlier run has written is written anew, whole: its last line may be half of one."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        locations.write(self.log_dir / RESULTS, "".join(self._unwritten()).encode())
        locations.write(self.where / SETTINGS, digest.sealed(pickle.dumps(dict(settings))))
        self._say("running")

    def started(self) -> None:
        """The workers stand, and the function runs."""
        self._last = self._warm = time.time()

    def add(self, row: Mapping[str, Any], newest: int | None) -> None:
        """One report of rank 0's. Goes to the file at once; to a store elsewhere, whenever there is a new checkpoint."""
        fresh = newest is not None and newest != (self._numbers[-1] if self._numbers else None)
        self.rows.append({**self._autofilled(), **row})
        self._numbers.append(newest)
        self._append()
        if fresh:
            self._send()

    def end(self, error: BaseException | None) -> None:
        if self.rows:
            self.rows[-1]["done"] = True
        self._send()
        self._say("finished" if error is None else "failed", "" if error is None else described(error))

    def _say(self, status: str, error: str = "") -> None:
        state = {"trainer": self.who.trainer, "status": status, "error": error}
        state |= {name: getattr(self.who, name) for name in IDS}
        locations.write(self.where / STATE, folders.dump_json(state))

    def _append(self) -> None:
        with open(self.log_dir / RESULTS, "a", encoding="utf-8") as file:
            file.writelines(self._unwritten())

    def _unwritten(self) -> list[str]:
        """A line for each row that is in no file yet."""
        new = zip(self.rows[self._written :], self._numbers[self._written :], strict=True)
        self._written = len(self.rows)
        return [_written(_keyed({"metrics": row, "checkpoint": at})) for row, at in new]

    def _send(self) -> None:
        if self.where != self.log_dir and (self.log_dir / RESULTS).exists():
            locations.write(self.where / RESULTS, (self.log_dir / RESULTS).read_bytes())

    def _autofilled(self) -> dict[str, Any]:
        """What Ray gives every report, by the names it has there."""
        now = time.time()
        row = {
            "timestamp": int(now),
            "date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now)),
            "time_this_iter_s": now - self._last,
            "time_total_s": self._before + now - self._began,
            "time_since_restore": now - self._began,
            "training_iteration": len(self.rows) + 1,
            "iterations_since_restore": len(self.rows) + 1 - self._restored,
            "trial_id": self.who.trial_id,
            "experiment_id": self.who.experiment_id,
            "experiment_tag": "0",
            "hostname": platform.node(),
            "node_ip": own_address(),
            "pid": os.getpid(),
            "config": self._config,
            "done": False,
            # Nobody counts these here; code that was written for Ray reads them.
            "episodes_total": None,
            "timesteps_total": None,
            "timesteps_since_restore": 0,
            "warmup_time": self._warm - self._began,
        }
        self._last = now
        return row


def _written(row: dict[str, Any]) -> str:
    """A line, with a digest of the rest of it."""
    plain_row = json.loads(json.dumps(row, default=as_json))
    return json.dumps({**plain_row, "digest": folders.json_digest(plain_row)}) + "\n"


def _lines(path: Any) -> list[bytes]:
    """Whole lines only: the last one may have been cut off."""
    if not path.is_file():
        return []
    return list(locations.read(path).split(b"\n")[:-1])


def _keyed(value: Any) -> Any:
    """JSON's keys are texts."""
    if isinstance(value, Mapping):
        return {str(key): _keyed(inner) for key, inner in value.items()}
    return [_keyed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def as_json(value: Any) -> Any:
    """What JSON cannot say: a number out of what holds one, else what it looks like."""
    found = plain(value)
    return shown(value) if found is value else found


def plain(value: Any) -> Any:
    """The number in a tensor, or in one of NumPy's types, if it is one; else the value itself."""
    if isinstance(value, (str, bytes, int, float, dict, list, tuple)) or value is None:
        return value
    try:
        return value.item()
    except Exception:  # whatever these say of more than one number
        return value
