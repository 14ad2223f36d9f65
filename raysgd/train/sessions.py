"""The session of a training function: what one rank has reported, and may read, in one attempt.
Worker."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from raysgd.core.channel.messages import FunctionReport
from raysgd.core.control import Control
from raysgd.core.measures.metrics import check_metrics
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, described
from raysgd.storage import folders
from raysgd.train import in_trial
from raysgd.train.callbacks import autofill
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.settings import TIMESTAMP

# `Session.passes` in a checkpoint: a dictionary's key, or a file
PASSES, PASSES_FILE = "_passes", ".raysgd-passes.json"


class Stopped(BaseException):
    """Ends a training function from inside: a peer failed, or all ranks stop here for a planned
    change of workers.

    Not an Exception, so that the function's own error handlers do not catch it.
    """

    def __init__(self, *, asked: bool) -> None:
        super().__init__(
            "raysgd stopped this attempt of the training function, and will run it again on the new workers"
        )
        self.asked = asked


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the driver sends to every rank for one attempt to run a training function.

    workers     how many there should be; None if any number may begin a run
    checkpoint  the newest checkpoint of the run, as bytes
    reports     how many rounds earlier attempts of the run have reported
    outside     how many of these were made before `train.elastic`, and not in the first attempt
    """

    run: int
    number: int = 0
    workers: int | None = None
    checkpoint: bytes | None = None
    reports: int = 0
    outside: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[Mapping[str, Any], ...] = ()
    detailed: bool = False


def _unchanged(values: dict[str, Any]) -> dict[str, Any]:
    return values


def _pickler() -> Any:
    return pickle.Pickler


@dataclass(frozen=True)
class Codec:
    """How reports and checkpoints are packed: the driver's choice of pickler (a function, and one
    that returns its class), and the backend's conversions. Picklable."""

    dumps: Callable[[Any], bytes] = pickle.dumps
    pickler: Callable[[], Any] = _pickler
    encode: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged
    decode: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged


class Session:
    """Owns one rank's counters in one attempt.

    `at_boundary` is called after each commit, where the run can continue with other workers, and in
    a function without `train.elastic` after each checkpoint. `commit` holds the last commit of
    `train.elastic`, and `objects` those of `train.once`, which stay until the run ends.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        control: Control,
        attempt: Attempt,
        codec: Codec,
        *,
        at_boundary: Callable[[], None] = lambda: None,
        commit: Any = None,
        objects: dict[str, Any] | None = None,
    ) -> None:
        self.rank_info, self.attempt, self.commit, self.at_boundary = rank_info, attempt, commit, at_boundary
        self.planned_ranks = attempt.workers or rank_info.world_size  # which define the batch of a step
        self.precision: Any = None  # of train.torch.accelerate
        self.is_elastic = False  # whether this attempt has called train.elastic
        self._objects, self._asked = {} if objects is None else objects, set[str]()
        self.loaders = list[int]()  # the rows of each that was prepared
        self.prepared = list[Any]()  # models and elastic loaders, which `train.elastic` should have
        self.at_end = contextlib.ExitStack()  # what is closed when the function has ended in any way
        self._control, self._codec = control, codec
        self._encoded = False  # whether `_payload` is this rank's own, which the driver has not decoded
        self._payload = attempt.checkpoint
        self._unpacked: Checkpoint | None = None
        self._reports, self._outside = attempt.reports, attempt.outside
        self._sending = threading.Lock()  # a round has one report of each rank, and the function may have threads
        self._repeated = 0  # reports that follow, and that the driver has from before
        self._began = self._last = time.time()

    # -- reporting ------------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        """Send metrics, and a checkpoint if there is one. Return when all ranks have, and the
        driver has stored it."""
        check_metrics(metrics, of="train.report() cannot report this")
        if self._repeated:
            self._repeated -= 1
            self._check_stop()
            return
        self._reports += 1
        try:
            head = self._pickle({**self._autofill(), **self._codec.encode(dict(metrics))})
            payload = self._pack(checkpoint) if checkpoint is not None else None
        except BaseException:
            self._reports -= 1  # a function may catch the error, and report something else
            raise
        self._outside += self._is_outside
        self._send("report", head, payload)

    def ensure_whole(self) -> None:
        """Raise an error if what this rank has received may be incomplete, because a peer
        failed."""
        self._control.ensure_whole()

    def repeat_since(self, reports: int) -> None:
        """Note that the function continues from where it had made so many reports. It makes those
        again that it had made after that, before its next commit, and the driver has them. Those
        that each attempt makes before `train.elastic` are none of them."""
        self._repeated = max(self.attempt.reports - self.attempt.outside - reports, 0)

    def note_commit(self) -> int:
        """Return how many reports were made, because there is a commit: none is repeated after
        it."""
        self._repeated = 0
        return self._reports - self._outside

    @property
    def _is_outside(self) -> bool:
        return self.attempt.number > 1 and not self.is_elastic

    def save_checkpoint(self, values: dict[str, Any]) -> None:
        self._send("checkpoint", self._pickle({}), self._pack(Checkpoint.from_dict(values)))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name in self._asked:
            raise ConfigError(
                f"this function has called train.once() twice with the name {name!r}: pass different ones"
            )
        if name not in self._objects:
            self._objects[name] = make()
        self._asked.add(name)
        return self._objects[name]

    def set_precision(self, precision: Any) -> None:
        if self.precision is not None:
            raise RuntimeError("train.torch.accelerate() was called twice in this function: call it once, at the top")
        self.precision = precision

    def _pack(self, checkpoint: Checkpoint) -> bytes:
        kind, content = checkpoint.get_internal_representation()
        entries = {PASSES: json.dumps(self.passes)} if self.passes else {}
        if kind == "data_dict":
            checkpoint = Checkpoint.from_dict({TIMESTAMP: int(time.time()), **self._codec.encode(content), **entries})
        elif entries and not checkpoint._is_folder():  # one file, which has a dictionary
            checkpoint = Checkpoint.from_dict({**checkpoint.to_dict(), **entries})
        elif entries:
            checkpoint = Checkpoint.from_checkpoint(checkpoint)
            checkpoint._added = {PASSES_FILE: entries[PASSES].encode()}
        if self.attempt.metadata and checkpoint.can_have_metadata and not checkpoint.get_metadata():
            checkpoint.set_metadata(self.attempt.metadata)
        # Other workers will load it as trusted.
        return checkpoint.checked_bytes(pickler=self._codec.pickler())

    def _send(self, kind: Literal["report", "checkpoint"], head: bytes, payload: bytes | None) -> None:
        self._check_stop()
        message = FunctionReport(
            kind,
            self.attempt.run,
            self.attempt.number,
            self.rank_info.world_rank,
            len(head),
            payload is not None,
            self._is_outside,
        )
        with self._sending:
            self._control.deliver(message, head if payload is None else b"".join((head, payload)))
        if payload is not None:
            self._payload, self._unpacked, self._encoded = payload, None, True
            if not self.is_elastic:  # it continues from commits, which all ranks make, also if one reports checkpoints
                self.commit.count()
                self.at_boundary()
        self._check_stop()

    def _pickle(self, metrics: dict[str, Any]) -> bytes:
        try:
            return self._codec.dumps(metrics)
        except Exception as error:
            names = [name for name, value in metrics.items() if not self._is_picklable(value)]
            raise TypeError(
                f"train.report() cannot send {', '.join(names) or 'the metrics'} to the driver, because pickling failed "
                f"({described(error)}). Report numbers, strings, arrays, or lists and dictionaries of them"
            ) from error

    def _is_picklable(self, value: Any) -> bool:
        try:
            self._codec.dumps(value)
        except Exception:
            return False
        return True

    def _check_stop(self) -> None:
        if self._control.interrupted:
            raise Stopped(asked=False)

    def _autofill(self) -> dict[str, Any]:
        now = time.time()
        row: dict[str, Any] = {
            TIMESTAMP: int(now),
            "_time_this_iter_s": now - self._last,
            "_training_iteration": self._reports,
        }
        if self.attempt.detailed:
            full = autofill(self._reports, self._began, self._last, now)
            row |= {f"_{name}": full[name] for name in ("date", "hostname", "node_ip", "pid", "time_total_s")}
        self._last = now
        return row

    # -- reading --------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint: this rank's own of this attempt, or else that with which the
        attempt began. What others have reported since is not known here."""
        if self._payload is None:
            return None
        if not is_directory(self._payload):
            checkpoint = Checkpoint.from_bytes(self._payload, trusted=True)
            return Checkpoint.from_dict(self._codec.decode(checkpoint.to_dict())) if self._encoded else checkpoint
        if self._unpacked is None:  # only once, because the files may be large
            self._unpacked = Checkpoint.from_bytes(self._payload, trusted=True)
        return self._unpacked

    @cached_property
    def passes(self) -> dict[str, int]:
        """The number of the pass that each prepared loader is in, or of its next one. At first,
        they are those of the commit or the checkpoint from which this attempt continues."""
        if self.commit is not None and self.commit.kept.content is not None:
            return {**self.commit.kept.passes}
        if self._payload is None:
            return {}
        if is_directory(self._payload):
            content: Any = folders.member_of(self._payload, PASSES_FILE)
        else:
            content = Checkpoint.from_bytes(self._payload, trusted=True).to_dict().get(PASSES)
        return dict(json.loads(content or "{}"))

    def shard(self, name: str | None) -> Any:
        if not self.attempt.shards:
            return None
        mine = self.attempt.shards[self.rank_info.world_rank]
        if name is None:
            if len(mine) == 1:
                return next(iter(mine.values()))
            raise ConfigError(f"the trainer has several datasets: name one of {', '.join(sorted(mine))}")
        if name not in mine:
            raise ConfigError(
                f"there is no dataset {name!r}: the trainer's datasets are {', '.join(sorted(mine)) or 'none'}"
            )
        return mine[name]


class OutsideSession(Session):
    """The session of a function that is called directly, for example in a test: rank 0 of 1.
    Reports and checkpoints are checked, and dropped.

    Each call of `current` makes one, because nothing says when such a function ends. Only what
    `train.torch.accelerate` has set stays, until it is called again or another trial begins.
    """

    _kept: ClassVar[tuple[str | None, Any]] = None, None  # a trial, and its precision

    def __init__(self, trial: Mapping[str, Any] | None = None) -> None:
        super().__init__(RankInfo(), Control(), Attempt(run=0, trial=trial or {}), Codec())
        owner, precision = self._kept
        self.precision = precision if owner == self._trial_id else None

    @property
    def _trial_id(self) -> str | None:
        trial_id: str | None = self.attempt.trial.get("trial_id")
        return trial_id

    def set_precision(self, precision: Any) -> None:
        self.precision = precision
        OutsideSession._kept = self._trial_id, precision

    def _send(self, kind: Literal["report", "checkpoint"], head: bytes, payload: bytes | None) -> None:
        """Drop it."""


class TrialSession(OutsideSession):
    """The session of a function that Tune itself runs, as in AIR: `train.report` reports to Tune,
    and `train.get_checkpoint` returns the trial's checkpoint."""

    def __init__(self) -> None:
        super().__init__(in_trial.describe())

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        in_trial.report(metrics, checkpoint)

    def save_checkpoint(self, values: dict[str, Any]) -> None:
        raise ConfigError(
            "train.save_checkpoint() was called in a function that Tune runs, and Tune takes checkpoints with reports only: "
            "train.report(metrics, checkpoint=Checkpoint.from_dict({...}))"
        )

    def checkpoint(self) -> Checkpoint | None:
        return in_trial.newest_checkpoint()


# `train.report` and the other functions have no argument for the session, so it is a global variable. It is not
# thread-local, because a training function may start threads that report.
_running: list[Session] = []


class running:
    """A context with this session as the current one. `contextlib` would set attributes of
    exceptions that leave it, which some exceptions do not allow."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        _running.append(self._session)

    def __exit__(self, *error: object) -> None:
        _running.remove(self._session)
        self._session.at_end.close()


def current(function: str) -> Session:
    """Find the session of the training function that is running in this process. `function` is the
    caller's name. Outside one, warn, and return that of a single worker."""
    if _running:
        return _running[-1]
    if in_trial.is_trial():
        return TrialSession()
    warnings.warn(
        f"train.{function}() was called outside a training function that a trainer runs on its workers (Trainer.run, "
        "run_iterator, fit): it acts as on a single worker, and reports and checkpoints are dropped. In the script itself, "
        "use what the trainer returns",
        stacklevel=3,
    )
    return OutsideSession()
