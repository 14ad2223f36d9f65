"""What the replicas of torch and TensorFlow have in common: they train, validate, and report
metrics. Worker."""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, cast

from raysgd.core.messages import SnapshotUpload
from raysgd.core.metrics import (
    COUNTED,
    OWN_NAMES,
    SECONDS,
    SKIPPED,
    Measured,
    check_metrics,
    for_all_ranks,
    refuse_own_names,
)
from raysgd.core.outcomes import DataLoaderFailure, Interrupted, TrainAgain
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.rank_comparison import Summary
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, shown
from raysgd.training.feed import Feed, MembershipChange, NoFeed, Source
from raysgd.training.operator_base import OperatorBase
from raysgd.training.position import Position
from raysgd.training.seeding import ONCE, Places
from raysgd.training.settings import ReplicaSettings
from raysgd.training.snapshots import LOADED_S, ROOM_S, Snapshotter
from raysgd.training.step import Step
from raysgd.training.writing import Asking

logger = logging.getLogger("raysgd")

# What a call reads. With several loaders that have names, a phase of each is, for example, "validation.NAME".
Phase = Literal["train", "validation", "test"]
# The phases of calls that read data; all other calls are made between those of training.
PHASES: dict[str, Phase] = {"validate": "validation", "test": "test"}
CALLS: dict[Phase, str] = {"train": "train", "validation": "validate", "test": "test"}
COMPARED_STEPS = 50  # after so many steps of a run, the ranks' weights are compared
NOT_RESUMABLE = (
    "AutoCheckpoint(every=...) with batches or seconds saves within an epoch, but nothing can save the place in an iterable "
    "without a length, or in data that the operator divides itself: pass every='epoch', or register a DataLoader of a data set "
    "with __getitem__ and __len__, a loader with state_dict and load_state_dict, or a raysgd.data.ShardedStream"
)
UNUSED = (
    "%s.train_epoch has not used the iterator that it got, so this call of train() counts no batches and no samples, and the epoch stays "
    "%d. The data of its own loop is not divided among the workers, and after a worker failure the call begins again. Loop over the "
    "iterator: `for batch in iterator:`"
)
JOINED = (
    "%s. This worker joined at step %d. It has what setup makes, and the state of the others, but not what only earlier batches have set: "
    "make the attribute in setup, return it from state_dict(), or keep it in self.part_state"
)
NO_STEP = (
    "no registered optimizer (%s) has made a step in this call of train(), so the weights are as they were before it (batches "
    "processed: %d): %s. Nothing to do if they are meant to stay so, or if the batches of several calls share one step"
)


class OperatorReplicaFactory:
    """Makes a replica of this class in a worker. It is pickled, and it is the only part of a
    trainer that is sent there."""

    def __init__(
        self, replica_cls: type[ReplicaBase], operator_cls: type[Any], config: dict[str, Any], settings: Any
    ) -> None:
        self.replica_cls, self.operator_cls, self.config, self.settings = replica_cls, operator_cls, config, settings

    def __repr__(self) -> str:
        return f"the operator {self.operator_cls.__name__} with its config"

    def __call__(self, rank_info: RankInfo, control: Control) -> ReplicaBase:
        """Worker: make the operator, whose `setup` runs now, and its replica."""
        self.replica_cls.prepare_process(self.settings)
        operator = self.operator_cls(self.config, settings=self.settings, rank_info=rank_info)
        return self.replica_cls(operator, self.settings, rank_info, control)


class ReplicaBase(ABC):
    """Owns an operator, its data sources, and its position in the data.

    A trainer's `Call` names a method of this class or a function, and `run` makes it. (A subclass
    must not override the methods that calls name, because a call holds the method itself.)
    """

    # The class whose `train_epoch` is the default one; how `register_data` names the data; and what else users can do
    # when no training data is registered.
    operator_class: ClassVar[type[OperatorBase]]
    data_names: ClassVar[dict[Phase, str]]
    without_data: ClassVar[str] = ""
    how_to_step: ClassVar[str]  # in a user's batch method

    operator: Any

    def __init__(
        self, operator: OperatorBase, settings: ReplicaSettings, rank_info: RankInfo, control: Control
    ) -> None:
        if getattr(operator, "_parts", None) is None:
            raise ConfigError(
                f"{type(operator).__name__}.__init__ did not call super().__init__(*args, **kwargs): call it, or move the "
                "content of __init__ into setup(self, config)"
            )
        if not operator._parts.registered:
            raise ConfigError(
                f"{type(operator).__name__}.setup did not call self.register(models=..., optimizers=...): call it there, "
                "because the trainer trains and saves what is registered"
            )
        self.operator, self._rank_info, self._control = operator, rank_info, control
        self._distributed, self._seed, self._measures = settings.distributed, settings.seed, settings.measures
        self.num_workers = settings.num_workers
        self._steps_before: Any = None  # what `_steps_made` returned when the running call of `train` began
        self._began: float | None = None  # when the running part of a call of `train` began
        self._waited = 0.0  # how long it has waited for data
        self._joined_at = 0  # the step before which it joined a running group
        self._units_before = 0  # what the running call of `train` had committed before this part of it
        self._position = Position()
        self._pass_positions: dict[str, Position] = {}  # of evaluations, of which each call begins a new pass
        # Their `epoch` counts the passes that have begun, their `call` is the newest of them.
        self._validated, self._tested = Position(), Position()
        self.operator._epochs_before = lambda: max(self._position.epoch - 1, 0)
        self._sources: dict[str, Any] = {}
        self.undefined = False  # a load has begun to change the state, and has not completed that
        self._snapshots = Snapshotter(settings.snapshot_every, control)
        # The step after which the driver gets a summary of the weights, and whether it has got one.
        self._summary_at, self._summarized = math.inf, False

    @classmethod
    @abstractmethod
    def prepare_process(cls, settings: Any) -> None:
        """Set the threads and the seeds of the process, before the operator's `setup`."""

    @property
    def progress(self) -> Progress:
        phase = self._control.phase
        return Progress(phase=phase, loads=-1) if self.undefined else self._position.progress(phase)

    @property
    def rank(self) -> int:
        return self._rank_info.world_rank

    def run(self, call: Call) -> Any:
        self._control.phase = call.name
        self._begin_call()
        try:
            return self._changed(call) if call.change else call.method(self, **call.arguments)
        except DataLoaderFailure as failure:
            name = self.data_names[PHASES.get(call.name, "train")]
            return failure.interrupted(name, self.partial(), self.progress)
        except TrainAgain as found:
            return found.interrupted(self.partial(), self.progress)
        finally:
            self._control.phase = "idle"

    def _changed(self, call: Call) -> Any:
        """Make the user's change of the state, unless that has it. Return what it returns."""
        if call.change <= self._position.loads:
            return None
        if (places := self.places(call.name)) is not None:
            places.enter(epoch=call.change)
        value = call.method(self, **call.arguments)
        self._position.loads = call.change
        return value

    # -- training -------------------------------------------------------------------------------------

    def train(
        self,
        call: int,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        dataset: Any = None,
        snapshot_first: bool = False,
        asks: Mapping[str, Any] | None = None,
        continues: bool = False,
        epochs: int | None = None,
        counts: bool = False,
        reduced: bool = True,
        compares: bool = False,
    ) -> Any:
        """Train the rest of the epoch, or of `num_steps`, from the current position. `asks` are the
        arguments of `Asking`, if checkpoints are made between the batches. The call `continues` the
        one in which the loaded checkpoint was made. It belongs to a loop over `epochs`, if there is
        one. With `counts`, its `num_steps` are an epoch. Unless results are `reduced`, the operator
        may return any object. The driver `compares` the ranks' weights."""
        position, operator = self._position, self.operator
        new = position.is_new(call, continues=continues)
        if new and dataset is None:
            position.resume_epoch()  # an earlier call on a data set of its own may have ended in an error
        done = not position.open_call(call)
        if new and (counts or (position.counted and num_steps is None)):
            position.count_call(num_steps or 1)
        if compares and not self._summarized and self._rank_info.world_size > 1:
            self._summary_at = position.step + COMPARED_STEPS  # the same on all ranks, as none has sent one
        if done:
            self.take_snapshot()  # the rank that was the first when the call ended may have failed before it sent its own
            return Measured({"epoch": position.users_epoch}, position.call_units)
        self._begin_measuring("train", profile, new_call=new)
        if new:
            self._steps_before = self._steps_made()
        self._units_before = position.call_units
        source = self._train_source(dataset)
        if asks is not None and not getattr(source, "resumable", True):
            raise ConfigError(NOT_RESUMABLE)
        operator.global_step, operator._run_length = position.step, (epochs, num_steps)
        operator._last_epoch = position.call_epoch
        if snapshot_first:
            self.take_snapshot()
        unwinds = type(operator).train_epoch is not self.operator_class.train_epoch
        feed = self._make_feed(source, "train", num_steps, asking=None if asks is None else Asking(self, **asks))
        batches = feed.batches = self._batches(feed, unwinds=unwinds)
        result: Any = {}  # if the workers are about to change
        given, named, feed.info = self._epoch_arguments(batches, info, num_steps)
        with self._running_epoch(feed):
            result = operator.train_epoch(*given, **named)
            batches.close()
            self._leave(feed)
        if feed.stopped:
            return self._stopped(result)
        report = self._reported(result, profile, "train", reduced)
        self._warn_of_no_training(unused=unwinds and feed.unused, skipped=SKIPPED in report.metrics)
        self._end_call()
        return report

    def _stopped(self, result: Any) -> Interrupted:
        """Return the outcome of a call that has stopped at a batch boundary."""
        asked = not self._control.interrupted
        if asked:  # all ranks are there, and some may leave
            self._share()
        return Interrupted(self.partial(result), "stopped at a batch boundary", self.progress, asked=asked)

    def _batches(self, feed: Feed, *, unwinds: bool = False) -> Generator[Any]:
        """Yield the batches of a loop, and commit each step when the loop asks for what follows it.
        A stop at a batch boundary ends the iteration, or, if it `unwinds`, the user's loop."""
        try:
            for step in feed:
                for policy in step.policies.begin if feed.training else ():
                    policy(step)
                # To `train_batch`, in which self.zero_grad, self.backward and self.step act on the step.
                yield step.current.batch
                if step.closing:
                    self._end(feed, step)
        except MembershipChange:
            if unwinds:
                raise
            return
        if self._control.due(last=True):
            self._report(feed)

    def _leave(self, feed: Feed, *, failed: bool = False) -> None:
        """End a loop. The step that it leaves open is committed if it counts, and undone
        otherwise."""
        step, failure = feed.step, feed.failure
        if not step.ended:
            if failed and feed.training and self._was_made():
                step.outcome = "applied"
            if not step.counts(failed=failed):
                step.outcome = "undone"
            self._end(feed, step, failed=failed)
        self._waited, feed.failure, self.operator._feed = feed.waited_s, None, NoFeed(self.operator._policies)
        if failure is not None and not failed:
            raise failure  # the user's loop caught it, but the data has not ended

    def _end(self, feed: Feed, step: Step, *, failed: bool = False) -> None:
        """Commit a step, unless it is undone, or has `failed` before it was applied. Nothing else
        counts what was trained."""
        position, snapshots, counts = feed.position, self._snapshots, step.outcome != "undone"
        before, step.failed = position.step, failed
        for policy in step.policies.before_commit if counts and feed.training and not failed else ():
            policy(step)
        if counts:
            position.commit(step)
            self._control.batch, self._waited = position.call_batches, feed.waited_s
        for policy in step.policies.on_step if feed.training else ():
            policy(step)
        if not counts:
            return
        if (feed.training and position.step >= self._summary_at) or self._control.due(last=failed):
            self._report(feed)
        may_be_due = snapshots.within_epochs and feed.training and not failed
        if may_be_due and self._snapshot_due(before):
            self.take_snapshot(room_s=ROOM_S)

    def _report(self, feed: Feed) -> None:
        """Report the progress, with a summary of the weights if that is due."""
        progress = replace(self._position.progress(feed.call), batches=feed.position.call_batches)
        if feed.training and self._position.step >= self._summary_at:
            progress = replace(progress, summary=self.summarize())
            self._summary_at, self._summarized = math.inf, True
        self._control.report(progress, self._partial_to_report())

    def _epoch_arguments(self, batches: Iterator[Any], info: dict[str, Any] | None, num_steps: int | None) -> Any:
        """Return what the operator's `train_epoch` is called with, and the `info` in it."""
        epoch_idx = (self._position.counted or self._position.call_epoch) - 1
        info = {"epoch_idx": epoch_idx, **(info or {})}
        named = {"info": info, "num_steps": num_steps, "epoch_idx": epoch_idx}
        return *accepted_arguments(self.operator.train_epoch, batches, **named), info

    def _running_epoch(self, feed: Feed) -> ExitStack:
        """Return a context for the user's loop over an epoch, which ends it when the workers are
        about to change."""
        stack = ExitStack()  # and no generator with @contextmanager, which would set the traceback of the user's error
        for rest in self.operator._policies.rest:
            stack.callback(rest)
        stack.enter_context(self.operator.timers.record("train_epoch"))
        for policy in self.operator._policies.on_epoch:
            policy(feed)

        def ended(kind: Any, error: BaseException | None, traceback: Any) -> bool:
            changes = isinstance(error, MembershipChange)
            if changes:
                self._leave(feed)
            elif error is not None:
                self._cut_short()  # what was applied must count before another rank takes this state
                if self._joined_at and isinstance(error, AttributeError) and error.obj is self.operator:
                    error.args = (JOINED % (error, self._joined_at),)
            return changes

        stack.push(ended)
        return stack

    def _warn_of_no_training(self, *, unused: bool, skipped: bool) -> None:
        """Warn, once, if the call has left the iterator `unused`, or if no optimizer has made a
        step in it. Steps that were `skipped` are in the result."""
        position, made = self._position, self._steps_made()
        if unused:
            self.operator._warn_once(UNUSED, type(self.operator).__name__, position.epoch)
        elif position.call_batches and not skipped and made is not None and made == self._steps_before:
            optimizers = ", ".join(type(each).__name__ for each in self.operator._parts.optimizers)
            self.operator._warn_once(NO_STEP, optimizers, position.call_batches, self.how_to_step)

    def summarize(self) -> str:
        """Return a summary of the weights, as text."""
        return self._summary().as_text()

    def _end_call(self) -> None:
        """Note that a call of `train` is done."""
        self._control.ensure_whole()  # user code after the loop can have made collective calls that changed the state
        self._position.call_done = True
        self._position.resume_epoch()
        self.take_snapshot()

    def _make_feed(self, source: Source, phase: str, limit: int | None, *, asking: Asking | None = None) -> Feed:
        """Return what a loop reads; its steps are the operator's."""
        kind, name = split(phase)
        position, seed = self._position_in(phase), self._seeding(phase)
        if seed is not None:  # what user code draws before its loop begins
            seed(epoch=position.epoch, offset=position.offset, part=ONCE)
        feed = self.operator._feed = Feed(
            source,
            position,
            self._rank_info,
            self._control,
            limit=limit,
            asking=asking,
            shared=self._distributed,
            call=CALLS[kind],
            name=self.data_names[kind] + (f"[{name!r}]" if name else ""),
            seed=seed,
            policies=self.operator._policies,
            **self._feed_options(phase),
        )
        return feed

    def _position_in(self, phase: str) -> Position:
        return self._position if phase == "train" else self._pass_positions.setdefault(phase, Position())

    def _cut_short(self) -> None:
        """End a loop after an error, and commit what was applied."""
        feed = self.operator._feed
        if isinstance(feed, Feed):
            self._leave(feed, failed=True)

    # -- validation and test --------------------------------------------------------------------------

    def validate(
        self, num_steps: int | None, profile: bool, info: dict[str, Any] | None, call: int, reduced: bool = True
    ) -> Any:
        """Validate on one pass over the validation data, or on its first `num_steps` batches. No
        rank waits for another one."""
        return self._evaluate_passes("validation", self._validated, num_steps, profile, info, call, reduced)

    def test(
        self, num_steps: int | None, profile: bool, info: dict[str, Any] | None, call: int, reduced: bool = True
    ) -> Any:
        """Test on one pass over the test data, or on its first `num_steps` batches."""
        return self._evaluate_passes("test", self._tested, num_steps, profile, info, call, reduced)

    def _evaluate_passes(
        self,
        kind: Phase,
        passes: Position,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        call: int,
        reduced: bool,
    ) -> Any:
        """Begin a pass over the data, or over each loader that has a name. So of the position only
        the number of `passes` is part of the state."""
        phases = self._phases(kind)
        for phase in phases:
            self._registered_source(phase)
        if call != passes.call:  # otherwise, a peer failed, and all repeat the call
            passes.open_call(call)
            passes.epoch += 1
        began = Position(epoch=passes.epoch - 1)
        began.open_call(call)
        found: list[Measured] = []
        for phase in phases:
            self._position_in(phase).adopt(began.as_dict())
            named = dict(info or {}) | ({"loader": split(phase)[1]} if phase != kind else {})
            measured = self._evaluate(phase, num_steps, profile, named, reduced)
            if isinstance(measured, Interrupted):
                return measured
            found.append(measured)
        if phases == [kind]:
            return found[0]
        prefix = "test_" if kind == "test" else self.operator._validation_prefix
        loaders = {
            f"{prefix}{split(phase)[1]}_": bare(each.metrics, prefix) for phase, each in zip(phases, found, strict=True)
        }
        returned = tuple(each for measured in found for each in measured.returned)
        return replace(found[0], metrics={}, loaders=loaders, returned=returned)

    def _phases(self, kind: Phase) -> list[str]:
        """Return the phases of an evaluation: one, or one for each loader that has a name."""
        data = getattr(self.operator._parts, self.data_names[kind])
        return [f"{kind}.{name}" for name in data] if isinstance(data, Mapping) else [kind]

    def _evaluate(
        self,
        phase: str,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        reduced: bool,
    ) -> Any:
        """Run the operator's loop over the data of this phase."""
        operator, kind = self.operator, split(phase)[0]
        source = self._registered_source(phase)
        self._begin_measuring(kind, profile, new_call=True)
        feed = self._make_feed(source, phase, num_steps)
        batches = self._batches(feed)
        given, named = accepted_arguments(operator.validate, batches, info=dict(info or {}))
        try:
            with operator._validating(), operator.timers.record("validation"):
                result = operator.validate(*given, **named)
            batches.close()
            self._leave(feed)
        except BaseException:
            operator._feed = NoFeed(operator._policies)
            raise
        if feed.stopped:
            return Interrupted(None, "a peer failed", self.progress)
        return self._reported(result, profile, kind, reduced)

    # -- random numbers -------------------------------------------------------------------------------

    def places(self, phase: str) -> Places | None:
        """Return the places of this phase, for which a trainer's `seed` decides all random
        numbers."""
        kind, name = split(phase)
        return None if self._seed is None else Places(self._seed, CALLS.get(kind, kind), name)

    def _seeding(self, phase: str) -> Callable[..., None] | None:
        """Return what seeds this process for one of these places."""
        places = self.places(phase)
        return None if places is None else places.enter

    def notice_preemption(self, deadline_s: float | None) -> None:
        """Tell the operator that this machine will be stopped."""
        self.operator.on_preemption_notice(deadline_s)

    # -- sources --------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        """Return the source of a call of `train`; `dataset` is what the call received."""
        return self._registered_source("train")

    def _registered_source(self, phase: str) -> Source:
        """Return the source of the registered data. Data that was registered since is used from the
        next epoch on."""
        kind, name = split(phase)
        data = getattr(self.operator._parts, self.data_names[kind])
        data = data[name] if name else data
        source: Source | None = self._sources.get(phase)
        if source is not None and not self._position_in(phase).ended:
            return source
        if data is None:
            raise ConfigError(
                f"{CALLS[kind]}() needs data: call self.register_data({self.data_names[kind]}=...)"
                f" in {type(self.operator).__name__}.setup{self.without_data if phase == 'train' else ''}"
            )
        if source is None or source.loader is not data:
            source = self._sources[phase] = self._open_source(data, phase)
        return source

    # -- results --------------------------------------------------------------------------------------

    def partial(self, result: dict[str, Any] | None = None) -> Measured:
        """Return what the running call has measured so far."""
        own = result if result and isinstance(result, dict) else self.operator._meter.summary()
        own = self._named_for_test(own) if self.operator._testing else own
        return self._measured({"epoch": self._position.users_epoch, **own, **self._counts()})

    def _partial_to_report(self) -> Measured | None:
        """Return the partial result for a progress message."""
        return self.partial()

    def _measured(self, metrics: dict[str, Any]) -> Measured:
        """Return these metrics of the running call of `train`, with what users do not see."""
        return Measured(metrics, self._position.call_units, self._batch_mode())

    def _counts(self) -> dict[str, Any]:
        """Return what the running call has that is not the operator's metrics: counts, and what
        callbacks measure."""
        if self._began is None or "seconds" not in self._measures:
            return {}
        busy = time.perf_counter() - self._began - self._waited
        return {SECONDS["data"]: self._waited, SECONDS["compute"]: busy}

    def _begin_measuring(self, phase: Phase, profile: bool, *, new_call: bool) -> None:
        """Reset the timers and metrics. With `new_call` False, the call continues after a change of
        the group."""
        operator = self.operator
        operator._meter, operator._testing = operator._meter_class(), phase == "test"
        self._began, self._waited = time.perf_counter() if phase == "train" else None, 0.0
        operator.timers.reset()
        operator.timers.enabled = profile

    def _reported(self, result: Any, profile: bool, phase: Phase, reduced: bool) -> Measured:
        """Return the result of a call on this rank."""
        method = "train_epoch" if phase == "train" else "validate"
        returned: tuple[Any, ...] = ()
        if not isinstance(result, dict):
            if reduced:
                raise TypeError(
                    f"{type(self.operator).__name__}.{method} must return a dict of results, got {shown(result)}. For a list "
                    f"of what each worker returned, of any type, call trainer.{CALLS[phase]}(reduce_results=False)"
                )
            result, returned = {}, (result,)
        else:
            check_metrics(result, of=f"{type(self.operator).__name__}.{method} returned an invalid result")
        report: dict[str, Any] = dict(result)
        if phase == "train":
            refuse_own_names(result, of=f"{type(self.operator).__name__}.train_epoch", names=OWN_NAMES - COUNTED)
            report = {"epoch": self._position.users_epoch, **result, **self._counts()}
        others = self._add_metrics(report, phase)
        if phase == "test":
            report = self._named_for_test(report)
        if profile:
            report["profile"] = self.operator.timers.stats()
        measured = self._measured(report) if phase == "train" else Measured(report)
        return replace(measured, returned=returned, **others)

    def _named_for_test(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return a test's report with "test_" in the names that a validation's metrics have, unless
        there is such a name."""
        named: dict[str, Any] = {}
        for name, value in report.items():
            last, bare = ("last_", name[5:]) if name.startswith("last_") else ("", name)
            for prefix in ("val_", self.operator._validation_prefix):
                other = f"{last}test_{bare.removeprefix(prefix)}"
                if bare.startswith(prefix) and other not in report:
                    name = other
                    break
            named[name] = value
        return named

    # -- state ----------------------------------------------------------------------------------------

    def take_snapshot(self, room_s: float | None = None) -> None:
        """Send a copy of the state to the driver, from rank 0. Training waits for the copy, and
        until a large one before it is sent. If that takes longer than `room_s`, take none."""
        self._share()
        if not (self._snapshots.wanted and self.rank == 0 and self._snapshots.wait_for_room(room_s)):
            return
        state = self._state_for_peers()
        try:
            content = self._packed_copy(state)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._snapshots.warn(error)
            return
        partial, committed = self.partial(), self._position.call_units - self._units_before
        ranks, own = self._rank_info.world_size, self.operator._meter.drawn
        everywhere = replace(partial, metrics=for_all_ranks(partial.metrics, ranks, own, committed))
        self._snapshots.send(SnapshotUpload(self.progress, self._position.call, everywhere), content)

    def _positions(self) -> dict[str, Any]:
        """Return the part of the state that says where this replica is in its data."""
        return {
            "epoch": self._position.users_epoch,
            "world_size": self._rank_info.world_size,
            "position": self._position.as_dict(),
            "validation_position": self._validated.as_dict(),
            "test_position": self._tested.as_dict(),
        }

    def _adopt_positions(self, state: dict[str, Any]) -> None:
        old = {"epoch": state.get("epoch", 0), "step": state.get("global_step", 0)}
        self._position.adopt(state.get("position") or old)
        self._validated.adopt(state.get("validation_position") or {})
        self._tested.adopt(state.get("test_position") or {})

    def state(self) -> memoryview:
        """Return the state as bytes, for a rank that is behind or new, or for the next script's
        replica in this process."""
        return self._dump({**self._state_for_peers(), "undefined": self.undefined})

    def _state_for_peers(self) -> dict[str, Any]:
        """Return the state for another rank of this trainer."""
        return self.full_state()

    def _packed_copy(self, state: dict[str, Any]) -> Sequence[Any]:
        """Return a state as buffers, which training does not change."""
        return [self._dump(state)]

    def close(self) -> None:
        self._snapshots.close()

    # -- loading a checkpoint -------------------------------------------------------------------------

    @abstractmethod
    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        """Return the state in a `SeenFile`, or in a `Blob` that was sent. Raise CheckpointError if
        there is none."""

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError unless the state fits. Nothing is changed."""

    @abstractmethod
    def adopt(self, state: dict[str, Any]) -> None:
        """Load a checked state."""

    @abstractmethod
    def all_succeeded(self, here: bool) -> bool:
        """Return whether all ranks have succeeded, which all ask together. `here` is whether this
        one has."""

    def end_load(self, loads: int | None) -> None:
        """Complete the load of a checkpoint: forget the calls of the trainer that wrote it, unless
        that was this one, and take a snapshot. `loads` is how often this trainer has loaded a
        state; a state with more loads is newer than any other."""
        if loads is not None:
            self._position.call, self._position.call_done, self._position.loads = -1, False, loads
        self._validated.call = self._tested.call = -1
        self.take_snapshot()
        self._snapshots.wait(LOADED_S)  # otherwise the load would be undone if all workers failed now

    # -- what frameworks do differently ---------------------------------------------------------------

    def _feed_options(self, phase: str) -> dict[str, Any]:
        """Return further arguments of the `Feed`."""
        return {}

    def _begin_call(self) -> None:  # noqa: B027 - it is optional
        """Prepare for a call. That the driver makes one shows that the generation is complete on
        all ranks."""

    @property
    def saves_together(self) -> bool:
        """Return whether all ranks take part in a checkpoint."""
        return False

    def _share(self) -> None:  # noqa: B027 - it is optional
        """Give all ranks what only some of them have of the state. All call this together."""

    def _snapshot_due(self, before: int) -> bool:
        """Return whether to take a snapshot in an epoch, after the step `before` and those
        since."""
        return self._snapshots.due_after_batch(self._position.step, before=before)

    def _was_made(self) -> bool:
        """Return whether an optimizer that has no hooks has made the running step."""
        return False

    @abstractmethod
    def _steps_made(self) -> Any:
        """Return a value that changes with each step of a registered optimizer; None if steps
        cannot be noticed."""

    def _summary(self) -> Summary:
        """Return what this rank reports for a comparison with the other ranks. Only where the
        driver asks for it."""
        raise NotImplementedError

    @abstractmethod
    def _open_source(self, data: Any, phase: str) -> Source:
        """Return a source of registered data."""

    @abstractmethod
    def _batch_mode(self) -> str:
        """Return what was decided about the batch."""

    @abstractmethod
    def _add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        """Add the registered metrics to a report. Return what else is in `Measured`. All ranks call
        this together."""

    @abstractmethod
    def full_state(self) -> dict[str, Any]:
        """Return the operator's state and the position."""

    @abstractmethod
    def _dump(self, state: dict[str, Any]) -> memoryview:
        """Return a state as bytes."""


def split(phase: str) -> tuple[Phase, str]:
    """Return what a phase evaluates, and the name of its loader, if that has one."""
    kind, _, name = phase.partition(".")
    return cast(Phase, kind), name


def bare(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return metrics without this prefix in their names, as far as no other has the shorter
    name."""
    found = {}
    for name, value in metrics.items():
        last, rest = ("last_", name[5:]) if name.startswith("last_") else ("", name)
        short = last + rest.removeprefix(prefix)
        found[name if short in metrics else short] = value
    return found


# -- calls that run a user's function -----------------------------------------------------------------


def has_data(replica: ReplicaBase, phase: Phase) -> bool:
    """Return whether the operator has registered data for this."""
    return getattr(replica.operator._parts, replica.data_names[phase]) is not None


def apply_operator(replica: ReplicaBase, function: Callable[[Any], Any]) -> Any:
    return function(replica.operator)


def apply(replica: ReplicaBase, function: Callable[[], Any]) -> Any:
    return function()


def accepted_arguments(
    function: Callable[..., Any], *positional: Any, **optional: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a user's function accepts: all of
    `positional`, and those of `optional` that it has parameters for. A required parameter with
    another name, such as `_` for an `info` that the function does not use, receives the next of
    them."""
    bound = getattr(function, "__self__", None) is not None and hasattr(function, "__func__")
    parameters = _parameters(function.__func__)[1:] if bound else _parameters(function)  # type: ignore[attr-defined]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return positional, optional
    optional = dict(optional)
    for each in parameters[len(positional) :]:
        name = each.name
        by_place = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        if not by_place or not optional:
            break
        positional += (optional.pop(name if name in optional else next(iter(optional))),)
    names = {each.name for each in parameters}
    return positional, {name: value for name, value in optional.items() if name in names}


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())
