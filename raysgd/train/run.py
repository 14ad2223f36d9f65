"""One run of a training function, as the driver sees it: attempts, rounds of reports, checkpoints. Knows no workers."""

from __future__ import annotations

import inspect
import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from raysgd.config import flag_from_environment
from raysgd.core.messages import FunctionReport
from raysgd.errors import ConfigError
from raysgd.storage.locations import Uri, place
from raysgd.train.background_writer import Scribe
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.rounds import Report, Round, Rounds, checkpoint_of
from raysgd.train.run_session import Attempt

__all__ = ["Run", "RunOptions", "ShardMaker", "Told", "payload_of", "task_of"]

DETAILED = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
Rows = list[dict[str, Any]]


class ShardMaker(Protocol):
    """Makes each rank's data sets: called by the run on the driver, for every attempt anew, with the node of each rank;
    what it made before is not read any more."""

    def __call__(self, world_size: int, nodes: Sequence[str] = ()) -> Sequence[Mapping[str, Any]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run is given beside its function."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] = field(default_factory=dict)
    shards: ShardMaker | None = None


@dataclass(frozen=True)
class Told:
    """A complete round: what each rank reported, and the number of the newest checkpoint then."""

    rows: Rows
    checkpoint: int


class Run:
    """Owns the rounds of the running attempt, the queue of complete ones, and a scribe that stores checkpoints. What goes
    wrong in here is told to `fail`, since reports are taken in while the engine is at work."""

    def __init__(
        self,
        number: int,
        keeper: CheckpointKeeper,
        *,
        fail: Callable[[BaseException], None],
        decode: Callable[[dict[str, Any]], dict[str, Any]],
        options: RunOptions | None = None,
    ) -> None:
        self.number, self.keeper = number, keeper
        self._fail, self._decode = fail, decode
        self._options = options or RunOptions()
        self._detailed = flag_from_environment(DETAILED)
        self._attempt = 0
        self._reports = 0
        self._rounds = Rounds(0)
        self._complete: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._scribe = Scribe(fail)
        self.values: list[Any] = []
        self.error: BaseException | None = None

    # -- the engine's thread --------------------------------------------------------------------------

    def begin_attempt(self, world_size: int, nodes: Sequence[str] = ()) -> Attempt:
        """The function is about to be fanned out. What ranks of the last attempt had reported and others had not
        counts too: a report that was taken is never forgotten."""
        self._close_leftovers()
        self._attempt += 1
        self._rounds = Rounds(world_size)
        shards = self._options.shards(world_size, nodes) if self._options.shards is not None else ()
        return Attempt(
            run=self.number,
            number=self._attempt,
            reports=self._reports,
            metadata=dict(self._options.metadata),
            trial=dict(self._options.trial),
            shards=tuple(shards),
            detailed=self._detailed,
        )

    def take(self, message: FunctionReport, body: Any) -> None:
        """One rank's report has come. Those of an attempt that is over are late, and nobody was promised them."""
        if (message.run, message.attempt) != (self.number, self._attempt):
            return
        try:
            split = message.metrics_size
            metrics = self._decode(pickle.loads(body[:split]))
            payload = bytes(memoryview(body)[split:]) if message.has_checkpoint else None
            complete = self._rounds.add(Report(message.rank, message.kind, metrics, payload))
            if complete is not None:
                self._close(complete)
        except Exception as error:
            self._fail(error)

    def end(self, values: list[Any]) -> None:
        """The function returned on every rank."""
        self._rounds.check_all_said()
        self.values = values

    def closed(self, error: BaseException | None = None) -> None:
        """There will be no more rounds. What is still being stored is waited for."""
        try:
            self._close_leftovers()
        except Exception as late:
            error = error or late
        if self._options.shards is not None:
            self._options.shards.close()
        unstored = self._scribe.finish()
        self.error = error or unstored
        self._complete.put(None)

    def _close_leftovers(self) -> None:
        """Of several checkpoints that not all ranks have made, the first: a rank that waits for the others in its
        collectives is one ahead at most, and one that does not must not make them skip work."""
        fresh = True
        for leftover in self._rounds.leftovers():
            self._close(leftover, with_checkpoint=fresh)
            fresh = fresh and checkpoint_of(leftover) is None

    def _close(self, round_: Round, *, with_checkpoint: bool = True) -> None:
        payload = checkpoint_of(round_) if with_checkpoint else None
        if payload is not None:
            number = self.keeper.note(payload)
            self._scribe.put(partial(self.keeper.store, number, payload, round_[0].metrics), heavy=True)
        if round_[0].kind == "report":
            self._reports += 1
            told = Told([report.metrics for report in round_], self.keeper.latest_id)
            self._scribe.put(partial(self._complete.put, told))  # it is shown when its checkpoint is stored

    # -- the user's thread ----------------------------------------------------------------------------

    def next_round(self, timeout: float) -> Told | None:
        """The next complete round; None when there are no more. Raises queue.Empty when none came in time."""
        told = self._complete.get(timeout=timeout)
        if told is None:
            self._complete.put(None)
        return told

    def unfetched(self) -> list[Told]:
        """The rounds that are complete by now; none of them comes again."""
        found: list[Told] = []
        try:
            while (told := self.next_round(0)) is not None:
                found.append(told)
        except queue.Empty:  # the run has not ended
            pass
        return found


def task_of(function: Any, config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training function with the arguments it is called with: none, or the config."""
    if not callable(function):
        raise ConfigError(f"the training function must be a function of no or one argument, got {function!r}")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    unmet = [str(each) for each in parameters if each.kind in named and each.default is each.empty]
    if unmet:
        raise ConfigError(
            f"the training function is called with the config as its first argument, and this one wants {unmet[0]} by name: "
            "let it take one positional argument, or bind the names with functools.partial"
        )
    count = len([each for each in parameters if each.kind not in named])
    if count > 1:
        raise ConfigError(
            f"the training function must take no argument or one (the config), and this one takes {count}: put the "
            "others into the config, or bind them with functools.partial"
        )
    return function, (dict(config or {}),) * count


def payload_of(checkpoint: Any, dumps: Callable[[Any], bytes]) -> bytes | None:
    """What a run is started with, as bytes: a dict, a Checkpoint, or the place of a stored one. What is damaged, foreign
    or would run code is refused here, and reaches no worker."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, Mapping):
        checkpoint = Checkpoint.from_dict(checkpoint)
    elif isinstance(checkpoint, (str, Path, Uri)):
        where = place(checkpoint)
        if not where.exists():
            raise ConfigError(f"there is no checkpoint at {where.absolute() if isinstance(where, Path) else where}")
        checkpoint = Checkpoint(where)
    elif not isinstance(checkpoint, Checkpoint) and hasattr(checkpoint, "as_directory"):  # Ray's own, from Tune
        with checkpoint.as_directory() as folder:
            return Checkpoint(folder).checked_bytes(dumps=dumps)
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"checkpoint must be a dict, the path or URI of a stored one, or a Checkpoint, got {checkpoint!r}"
        )
    return checkpoint.checked_bytes(dumps=dumps)
