"""What TorchTrainer and TFTrainer have in common: calls, the group of workers, start and end.
Driver."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.callbacks.base import Kind
from raysgd.callbacks.history import History
from raysgd.callbacks.printing import epoch_line
from raysgd.config import at_least, check_flags
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.speed import Speed
from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.errors import ConfigError, explain_missing, suggesting
from raysgd.replica import evaluation
from raysgd.replica.calls import apply, apply_operator
from raysgd.replica.replica_base import ReplicaBase
from raysgd.trainer.arguments import check_call
from raysgd.trainer.call_runner import exclusive
from raysgd.trainer.description import GivenConfig, RunDescription, build
from raysgd.trainer.loads import DrawnAnew, Loads
from raysgd.trainer.loops import EpochLoops
from raysgd.trainer.saves import Saves
from raysgd.workers.inline_group import InlineGroup
from raysgd.workers.serialization import pack

logger = logging.getLogger("raysgd")

# What a call measured: epoch, batch_count, num_samples, and the metrics that the operator returned.
Metrics = dict[str, Any]
T = TypeVar("T", bound="TrainerBase")


class TrainerBase(ABC):
    """Owns the engine and the callbacks of one trainer."""

    # How many batches `validate` uses by default; None: all.
    _validation_steps: int | None = None
    _in_parts = False  # whether a batch is divided into parts, unless the user has asked for another mode

    def __init__(self, described: RunDescription) -> None:
        self._engine, self._calls = engine, calls = build(described)
        engine.belong_to(self.shutdown)
        self._factory, self.config = described.factory, GivenConfig(described.config)
        self._saves, self._folder = Saves(engine), described.folder
        self._loads = self._make_loads(calls.drawn_anew)
        self._predictions = 0  # that this script has made
        self._loops = EpochLoops(described.folder, engine, calls, self._saves, self._loads, not_finite=self._not_finite)
        calls.start(engine)
        self._begin()
        calls.begun(self._stop)

    if not TYPE_CHECKING:  # which must still find a name that does not exist

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattribute__(name)  # again: the error may be one of a property's code
            except AttributeError as error:
                explain_missing(error)
                raise

    def _make_loads(self, drawn_anew: DrawnAnew) -> Loads:
        return Loads(self._engine, drawn_anew)

    @property
    def attached(self) -> bool:
        """Whether this trainer has taken over the workers of a script that has ended."""
        return self._calls.attached

    def _begin(self) -> None:
        """Begin the loops, from the newest automatic checkpoint if that is wanted. If it fails, end
        the workers."""
        try:
            self._loops.begin(self._load_automatic)
        except BaseException as error:
            self._calls.note_exit(error)
            self._stop(force=True)
            raise

    # -- the loop -------------------------------------------------------------------------------------

    @suggesting
    def epochs(self, epochs: int) -> Iterator[int]:
        """Iterate over 1, 2, ..., `epochs`, for a loop of your own:

            for epoch in trainer.epochs(10):
                trainer.train()
                trainer.validate()

        With `checkpoints`, an automatic checkpoint belongs to the end of the loop's body, or to the
        first call of `train()` in it. A script that was killed and started again with
        `resume="auto"` continues the loop with the first epoch that was not complete, and `train()`
        trains the rest of it; loops that were complete have no epochs then. A callback can end the
        loop after an epoch.
        """
        at_least("epochs", epochs, 0, whole=True)
        return self._loops.run(epochs)

    @suggesting
    def fit(
        self,
        epochs: int,
        validate_every: int = 1,
        *,
        num_steps: int | None = None,
        validation_steps: int | None = None,
        max_retries: int = 3,
        info: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> History:
        """Train for `epochs` epochs, and validate after each `validate_every`-th one (0: never).
        Print one line for each epoch, unless a callback shows the results, and return the history.

            for epoch in trainer.epochs(epochs):
                trainer.train(num_steps, max_retries=max_retries, info=info)
                if epoch % validate_every == 0:
                    trainer.validate(info=info)

        num_steps         batches in each epoch; None: all of them
        validation_steps  the first batches, which each validation has; None: all of them
        max_retries       how many worker failures each epoch survives (-1: any number)
        info              a dictionary that the operator's methods get
        progress          False: print nothing
        """
        check_flags(progress=progress)
        at_least("validate_every", validate_every, 0, whole=True)
        check_call(num_steps, max_retries, info)
        check_call(validation_steps, 0, None)
        if validate_every and not self._has_validation_data():
            raise ConfigError(
                "fit() validates, but the operator has registered no validation data: register it in setup, or pass "
                "validate_every=0"
            )
        for epoch in self.epochs(epochs):
            began = time.monotonic()
            trained = self.train(num_steps, max_retries=max_retries, info=info)
            seconds = time.monotonic() - began
            validated: Metrics = {}
            if validate_every and epoch % validate_every == 0:
                if validation_steps is None:
                    validated = self.validate(info=info)
                else:
                    with self._engine.claim("validate()"):
                        validated = self._evaluate("validate", validation_steps, info=info)
            if progress and not self._calls.shows_results:
                print(epoch_line(epoch, epochs, seconds, trained, validated), flush=True)
        return self.history

    @abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train to the end of the epoch, or for a number of batches."""

    @exclusive
    def _has_validation_data(self) -> bool:
        return bool(self._first(evaluation.has_data, phase="validation"))

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best automatic checkpoint so far (`AutoCheckpoint.best`)."""
        return None if self._folder is None else self._folder.path(self._folder.best)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest automatic checkpoint that is complete."""
        return None if self._folder is None else self._folder.path(self._folder.latest)

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that `resume="auto"` has loaded; None if training started from
        the beginning."""
        return None if self._folder is None else self._folder.path(self._loops.resumed)

    def _not_finite(self) -> str:
        """The name of a parameter that is not finite, if there is one and that is known."""
        return ""

    @abstractmethod
    def _load_automatic(self, path: str) -> None:
        """Load an automatic checkpoint."""

    # -- measuring ------------------------------------------------------------------------------------

    def _train_job(
        self, num_steps: int | None, profile: bool, info: Mapping[str, Any] | None, max_retries: int, **more: Any
    ) -> Job:
        arguments = {"num_steps": num_steps, "profile": profile, "info": self._packed(info and dict(info)), **more}
        self._saves.raise_failed()
        arguments |= self._loops.begin_call(num_steps)
        if self._loops.epochs is None:
            self._calls.warn_of_plain_loop()
        return Job(
            Call(ReplicaBase.train, arguments),
            again="resume",
            redo=True,
            max_failures=max_retries,
            prepare=partial(self._loops.begin_part, self._loops.call),
            is_waiting=self._loops.is_answering,
        )

    @exclusive
    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Validate on one pass over the validation data, using every row once, or on `num_steps`
        batches: those after the ones of the last such call.

        Return what was measured; with `reduce_results=False`, a list with each worker's own
        results, or with what the operator's `validate` returned there if that is not a dict.
        `profile` and `info` have the same meaning as in `train`.
        """
        arguments = {"profile": profile, "reduced": reduce_results, "info": info}
        return self._evaluate("validate", num_steps, **arguments, continues=num_steps is not None)

    @exclusive
    def test(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
    ) -> Any:
        """Test on one pass over the test data, using every row once, or on its first `num_steps`
        batches.

        The operator's `test_batch` measures, by default as `validate_batch` does, with `test_` in
        the names of the metrics. `profile`, `reduce_results` and `info` are those of `validate`,
        and so is the result.
        """
        return self._evaluate("test", num_steps, profile=profile, reduced=reduce_results, info=info)

    def _evaluate(self, kind: Kind, num_steps: int | None, **values: Any) -> Any:
        """Call `Evaluations.run` on all ranks."""
        num_steps = self._validation_steps if num_steps is None and kind == "validate" else num_steps
        values = {"num_steps": num_steps, "profile": False, "reduced": True, "info": None, **values}
        check_call(num_steps, 0, values["info"])
        check_flags(profile=values["profile"], reduce_results=values["reduced"])
        number, values["places"] = self._calls.evaluated[kind]  # one that an error ends is made again under its number
        values |= {"call": number + 1, "info": self._packed(values["info"] and dict(values["info"]))}
        self._saves.raise_failed()
        method = evaluation.validate if kind == "validate" else evaluation.test
        result, each = self._calls.measure(self._engine, kind, Job(Call(method, values)))
        return result if values["reduced"] else each

    def _packed(self, value: Any) -> Any:
        """A user's object in the form in which it is sent to the workers."""
        return pack(value) if self._engine.group.elastic else value

    # -- functions on the workers ---------------------------------------------------------------------

    @exclusive
    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn`, a function without arguments, in every worker process. Return its values in
        rank order."""
        return self._apply("apply_all_workers", apply, fn)

    @exclusive
    def apply_all_operators(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn(operator)` in every worker. Return its values in rank order."""
        return self._apply("apply_all_operators", apply_operator, fn)

    def _apply(self, name: str, method: Callable[..., Any], fn: Callable[..., Any]) -> list[Any]:
        if not callable(fn):
            raise ConfigError(f"fn must be a function, got {fn!r}")
        self._saves.raise_failed()
        fn_name = getattr(fn, "__qualname__", type(fn).__name__)
        return self._change(f"{name}({fn_name})", Call(method, {"function": self._packed(fn)}))

    def _change(self, name: str, call: Call) -> list[Any]:
        """Make a call that changes the state, once in its place. Return its values, by rank."""
        self._loops.note_change(name)

        def make() -> list[Any]:
            parts = self._engine.calls.change(call)
            return [outcome.value for outcome in parts[-1].outcomes if hasattr(outcome, "value")]

        return self._calls.change(name, self._engine, make)

    def _load(self, name: str, load: Callable[[], None]) -> None:
        """Load another state, once in its place."""
        self._loops.refuse_load(name)
        self._saves.raise_failed()

        def make() -> tuple[()]:
            load()
            self._loops.note_load()
            return ()

        self._calls.change(name, self._engine, make)
        for kind, (number, _) in self._calls.evaluated.items():
            self._calls.evaluated[kind] = number, None  # the loaded state has its own places

    def _values(self, method: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function of replicas on every rank, and return its values in rank order."""
        return self._engine.calls.run(Job(Call(method, arguments)))[-1].values

    def _predicted(self, method: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function that predicts: the same numbers, and others than in earlier predictions,
        belong to its number. Return the outputs in the order of the data."""
        self._predictions += 1
        ranks = self._values(method, **arguments, number=self._predictions)
        outputs = sorted((pair for pairs in ranks for pair in pairs), key=lambda pair: pair[0])
        return [output for _, output in outputs]

    def _first(self, method: Callable[..., Any], **arguments: Any) -> Any:
        self._saves.raise_failed()
        return self._values(method, **arguments)[0]

    def _inline_operator(self) -> Any:
        """The operator that trains in this process; None if the workers are other processes."""
        if not isinstance(self._engine.group, InlineGroup):
            return None
        return self._first(apply_operator, function=lambda operator: operator)

    # -- the group ------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The current number of workers."""
        return self._engine.world_size

    @property
    def batch_mode(self) -> str | None:
        """What becomes of the batch of all workers together when their number changes: "parts", it
        stays what it is, because fewer workers compute the same parts; "per_worker", each worker
        keeps its own; of TFTrainer also "global", it is divided again. None before the first
        step."""
        return self._calls.batch_mode or None

    @property
    def recoveries(self) -> list[Recovery]:
        """Every change of the group so far: worker failures, growth, preemptions."""
        return self._engine.recoveries

    @property
    def speed(self) -> Speed:
        """Return what each rank needs for a batch, and for which ranks the others wait."""
        return self._calls.speeds.now()

    @property
    def history(self) -> History:
        """The results of all calls of `train`, `validate` and `test` so far, as a table."""
        return self._calls.history

    def report(self, path: str | os.PathLike[str]) -> str:
        """Write a page about this trainer's run so far, as one HTML file at `path` (also a URI),
        and return its path: `History.report`. This also works after `shutdown()`, and in a
        callback."""
        return self._calls.history.report(path)

    @property
    def logdir(self) -> Path:
        """The folder of the callbacks. The first callback that writes creates it."""
        return self._calls.run.folder

    def __repr__(self) -> str:
        return self._calls.describe(self._engine)

    @exclusive
    def resize(self, num_workers: int) -> None:
        """Set the number of workers to `num_workers`, also in the middle of an epoch. Wait until
        missing ones have joined. If an error or Ctrl-C ends the call before that, the number is
        again what it was."""
        at_least("num_workers", num_workers, 1, whole=True)
        settings = self._factory.settings
        if not settings.distributed and num_workers > 1:
            raise ConfigError(
                "a trainer created with num_workers=1 has no process group and cannot grow: create it with num_workers=2 or "
                "more (ElasticConfig(min_workers=1) lets it shrink to one)"
            )
        if self._in_parts and settings.elastic.batch == "auto" and num_workers > settings.num_workers:
            raise ConfigError(
                f"resize({num_workers}): this trainer divides its batch among num_workers={settings.num_workers} workers at most. Create "
                f"the trainer with num_workers={num_workers}, or pass ElasticConfig(batch='per_worker'), with which steps grow"
            )
        self._engine.resize(num_workers)

    def shutdown(self, force: bool = False) -> None:
        """End the workers, after saves in the background; with `force`, at once. A second call does
        nothing; any other call afterwards raises an error."""
        self._stop(force=force)

    def _stop(self, *, force: bool) -> None:
        try:
            self._loops.close(force=force)
            if not force:
                self._saves.finish()
        finally:  # Ctrl-C may end the wait for the saves
            try:
                self._engine.stop(force=force)
                self._saves.abandon()
            finally:
                self._calls.end()
        if not force:
            self._saves.raise_failed()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.note_exit(error)
        self.shutdown(force=kind is not None)
