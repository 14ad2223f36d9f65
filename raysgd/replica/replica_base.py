"""What the replicas of torch and TensorFlow have in common: they train, validate, and report
metrics. Worker."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import DataLoaderFailure, Interrupted, RetryStep
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.calls import CALLS, PHASES, Phase, choose_arguments, split
from raysgd.replica.evaluation import Evaluations
from raysgd.replica.internals import Internals, internals_of
from raysgd.replica.operator_base import OperatorBase
from raysgd.replica.results import Results
from raysgd.replica.seeding import Places
from raysgd.replica.settings import ReplicaSettings
from raysgd.replica.snapshots import Copied, Snapshotter
from raysgd.replica.steps.asking import Asking
from raysgd.replica.steps.feed import Carrier, Feed, MembershipChange, Source
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import ONCE
from raysgd.replica.steps.step_loop import StepLoop
from raysgd.replica.writing import save

logger = logging.getLogger("raysgd")

WITHIN_EPOCH = (
    "this loop begins within epoch %d of the data, which an earlier call has begun: its first epoch is the rest of it, from batch %d of "
    "%d. For complete epochs, call train() before the loop, or create another trainer"
)
NOT_RESUMABLE = (
    "AutoCheckpoint(every=...) with batches or seconds saves within an epoch. An iterable without a length, and data that the operator "
    "divides itself, have no place there that can be saved. Pass every='epoch', or register a DataLoader of a data set with __getitem__ "
    "and __len__, or a loader with state_dict and load_state_dict"
)
JOINED = (
    "%s. This worker joined at step %d. It has what setup makes, and the state of the others, but not what only earlier batches have set: "
    "make the attribute in setup, return it from state_dict(), or keep it in self.part_state"
)


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

    operator: Any
    internals: Internals
    carrier = Carrier()

    def __init__(
        self, operator: OperatorBase, settings: ReplicaSettings, rank_info: RankInfo, control: Control
    ) -> None:
        self.internals = internals_of(operator)
        if not self.internals.registered.is_complete:
            raise ConfigError(
                f"{type(operator).__name__}.setup did not call self.register(models=..., optimizers=...): call it there, "
                "because the trainer trains and saves what is registered"
            )
        self.operator, self.control, self.position = operator, control, self.internals.position
        self.sources: dict[str, Any] = {}  # by phase
        self.results = self._make_results()
        self.evaluations = {kind: Evaluations(kind) for kind in PHASES.values()}
        self._has_begun = False  # the running call, and not only what comes before each
        self._joined_at = 0  # the step before which it joined a running group
        self.undefined = False  # a load has begun to change the state, and has not completed that
        self.snapshots = Snapshotter(settings.snapshot_every, control)

    @classmethod
    @abstractmethod
    def prepare_process(cls, settings: Any) -> None:
        """Set the threads and the seeds of the process, before the operator's `setup`."""

    @property
    def progress(self) -> Progress:
        phase = self.control.phase
        return Progress(phase=phase, loads=-1) if self.undefined else self.position.progress(phase)

    @property
    def rank(self) -> int:
        return self.internals.rank_info.world_rank

    def run(self, call: Call) -> Any:
        self.control.phase, self._has_begun = call.name, False
        try:
            self._begin_call()
            self._has_begun = True
            return self._make_change(call) if call.change else call.method(self, **call.arguments)
        except DataLoaderFailure as failure:
            name = self.data_names[PHASES.get(call.name, "train")]
            return failure.interrupted(name, self.partial(), self.progress)
        except RetryStep as found:
            return found.interrupted(self.partial(), self.progress)
        finally:
            self.control.phase = "idle"

    def _make_change(self, call: Call) -> Any:
        """Make the user's change of the state, unless that has it. Return what it returns."""
        position = self.position
        if call.change <= position.loads:
            return None
        number = position.changes + call.change - position.loads
        if (places := self.places(call.name)) is not None:
            places.enter(epoch=number)
        value = call.method(self, **call.arguments)
        position.loads, position.changes = call.change, number
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
        begins: bool = False,
        epochs: int | None = None,
        counts: bool = False,
        reduced: bool = True,
        most: int | None = None,
    ) -> Any:
        """Train the rest of the epoch, or of `num_steps`, from the current position; in a call that
        an error had ended, at `most` the batches before that. `asks` are the arguments of `Asking`,
        if checkpoints are made between the batches. The call `continues` the one in which the
        loaded checkpoint was made. It belongs to a loop over `epochs`, if there is one, or `begins`
        it. With `counts`, its `num_steps` are an epoch. Unless results are `reduced`, the operator
        may return any object."""
        position, operator, internals = self.position, self.operator, self.internals
        new = position.is_new(call, continues=continues)
        if new:
            position.resume_epoch()  # an earlier call on a data set of its own may have ended in an error
        done = not position.open_call(call)
        if new and (counts or (position.counted and num_steps is None)):
            position.count_call(num_steps or 1)
        if done:  # the rank that was the first when the call ended may have failed before it sent its snapshot
            self.snapshots.take(self)
            return Measured({"epoch": position.users_epoch}, position.call_units)
        self.results.begin("train", profile=profile, new_call=new)
        source = self._train_source(dataset)
        if asks is not None and not getattr(source, "resumable", True):
            raise ConfigError(NOT_RESUMABLE)
        asking = None if asks is None else Asking(self, save, **asks)
        internals.epochs, internals.num_steps = epochs, num_steps
        operator.global_step = position.step
        if new and begins and num_steps is None:
            self._warn_of_rest(source)
        if snapshot_first:
            self.snapshots.take(self)
        unwinds = type(operator).train_epoch is not self.operator_class.train_epoch
        loop = self.open_loop(source, "train", num_steps, asking=asking, unwinds=unwinds, most=most)
        arguments, named, loop.feed.info = self._epoch_arguments(loop.batches, info, num_steps)
        result: Any = {}  # if the workers are about to change
        with self._running_epoch(loop):
            result = operator.train_epoch(*arguments, **named)
            loop.batches.close()
            loop.end()
        if loop.feed.stopped:
            return self._end_early(result)
        report = self.results.of_call(result, profile, "train", reduced)
        if unwinds:
            self.results.warn_of_own_loop(loop.feed)
        self._end_call()
        return report

    def _warn_of_rest(self, source: Source) -> None:
        """Warn if a loop over epochs begins within one."""
        position, done = self.position, self.position.epoch_batches
        rest = source.steps_left(self.internals.rank_info, position.offset)
        if done and rest and not position.ended and self.rank == 0:
            logger.warning(WITHIN_EPOCH, position.users_epoch, done + 1, done + rest)

    def _end_early(self, result: Any) -> Interrupted:
        """Return the outcome of a call that has stopped at a batch boundary."""
        asked = not self.control.interrupted
        if asked:  # all ranks are there, and some may leave
            self.share()
        return Interrupted(self.results.so_far(result), "stopped at a batch boundary", self.progress, asked=asked)

    def report(self, feed: Feed) -> None:
        progress = replace(self.position.progress(feed.call), batches=feed.position.call_batches)
        partial = self.results.to_report()
        if feed.training:
            partial = replace(partial or Measured(), pace=self.internals.pace.sums())
        self.control.report(progress, partial)

    def _epoch_arguments(self, batches: Iterator[Any], info: dict[str, Any] | None, num_steps: int | None) -> Any:
        """What the operator's `train_epoch` is called with, and the `info` in it."""
        epoch_idx = (self.position.counted or self.position.call_epoch) - 1
        info = {"epoch_idx": epoch_idx, **(info or {})}
        named = {"info": info, "num_steps": num_steps, "epoch_idx": epoch_idx}
        return *choose_arguments(self.operator.train_epoch, batches, **named), info

    def _running_epoch(self, loop: StepLoop) -> ExitStack:
        """A context for the user's loop over an epoch, which ends it when the workers are about to
        change."""
        stack = ExitStack()  # and no generator with @contextmanager, which would set the traceback of the user's error
        for reset in self.internals.policies.reset:
            stack.callback(reset)
        stack.enter_context(self.operator.timers.record("train_epoch"))
        for begin_loop in self.internals.policies.begin_loop:
            begin_loop(loop.feed)

        def ended(kind: Any, error: BaseException | None, traceback: Any) -> bool:
            changes = isinstance(error, MembershipChange)
            if changes:
                loop.end()
            elif error is not None:
                if self.internals.feed is loop.feed:
                    loop.end(failed=True)  # what was applied must count before another rank takes this state
                if self._joined_at and isinstance(error, AttributeError) and error.obj is self.operator:
                    error.args = (JOINED % (error, self._joined_at),)
            self.operator.global_step = self.position.step  # without the batches of a step that is undone
            return changes

        stack.push(ended)
        return stack

    def _end_call(self) -> None:
        """Note that a call of `train` is done."""
        self.control.ensure_whole()  # user code after the loop can have made collective calls that changed the state
        self.position.call_done, self.position.call_ended = True, False
        self.position.resume_epoch()
        self.snapshots.take(self)

    def open_loop(
        self, source: Source, phase: str, limit: int | None, *, unwinds: bool = False, **more: Any
    ) -> StepLoop:
        """Open the loop over a source; its steps are the operator's."""
        kind, name = split(phase)
        position, seed = self.position_in(phase), self.seeding(phase)
        if seed is not None:  # what user code draws before its loop begins
            seed(epoch=position.epoch, offset=position.offset, part=ONCE)
        feed = self.internals.feed = Feed(
            source,
            position,
            self.internals.rank_info,
            self.control,
            limit=limit,
            shared=self.internals.settings.distributed,
            call=CALLS[kind],
            name=self.data_names[kind] + (f"[{name!r}]" if name else ""),
            seed=seed,
            policies=self.internals.policies,
            carrier=self.carrier,
            window=self.operator._batches_per_step if phase == "train" else 1,
            **more,
        )
        if phase == "train":
            self.internals.pace.begin(feed)
        return StepLoop(feed, self, unwinds=unwinds)

    def position_in(self, phase: str) -> Position:
        kind = split(phase)[0]
        return self.position if kind == "train" else self.evaluations[kind].position_in(phase)

    # -- random numbers -------------------------------------------------------------------------------

    def places(self, phase: str) -> Places | None:
        """The places of this phase, for which a trainer's `seed` decides all random numbers."""
        kind, name = split(phase)
        seed = self.internals.settings.seed
        return None if seed is None else Places(seed, CALLS.get(kind, kind), name)

    def seeding(self, phase: str) -> Callable[..., None] | None:
        """What seeds this process for one of these places."""
        places = self.places(phase)
        return None if places is None else places.enter

    # -- sources --------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        """The source of a call of `train`; `dataset` is what the call received."""
        return self.registered_source("train")

    def registered_source(self, phase: str) -> Source:
        """The source of the registered data. Data that was registered since is used from the next
        epoch on."""
        kind, name = split(phase)
        data = getattr(self.internals.registered, self.data_names[kind])
        data = data[name] if name else data
        source: Source | None = self.sources.get(phase)
        if source is not None and not self.position_in(phase).ended:
            return source
        if data is None:
            raise ConfigError(
                f"{CALLS[kind]}() needs data: call self.register_data({self.data_names[kind]}=...)"
                f" in {type(self.operator).__name__}.setup{self.without_data if phase == 'train' else ''}"
            )
        if source is None or source.loader is not data:
            source = self.sources[phase] = self._open_source(data, phase)
        return source

    # -- state ----------------------------------------------------------------------------------------

    def partial(self) -> Measured:
        return self.results.so_far() if self._has_begun else Measured()

    def positions(self) -> dict[str, Any]:
        """The part of the state that says where this replica is in its data."""
        return {
            "epoch": self.position.users_epoch,
            "world_size": self.internals.rank_info.world_size,
            "position": self.position.as_dict(),
            **{f"{kind}_position": each.passes.as_dict() for kind, each in self.evaluations.items()},
        }

    def _adopt_positions(self, state: dict[str, Any]) -> None:
        old = {"epoch": state.get("epoch", 0), "step": state.get("global_step", 0)}
        self.position.adopt(state.get("position") or old)
        for kind, each in self.evaluations.items():
            each.passes.adopt(state.get(f"{kind}_position") or {})

    def state(self) -> memoryview:
        """The state as bytes, for a rank that is behind or new, or for the next script's replica in
        this process."""
        return self._dump(self.state_for_peers())

    def state_for_peers(self) -> dict[str, Any]:
        return {**self.full_state(for_peers=True), "undefined": self.undefined}

    @abstractmethod
    def copy(self, state: dict[str, Any]) -> tuple[Copied, int]:
        """Return a state that training does not change, which is packed in another thread, and its
        size in bytes."""

    def close(self) -> None:
        self.snapshots.close()

    # -- loading a checkpoint -------------------------------------------------------------------------

    @abstractmethod
    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        """Read the state in a `SeenFile`, or in a `Blob` that was sent. Raise CheckpointError if
        there is none."""

    @abstractmethod
    def check(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError unless the state fits. Nothing is changed."""

    @abstractmethod
    def adopt(self, state: dict[str, Any]) -> None:
        """Load a checked state."""

    @abstractmethod
    def all_succeeded(self, here: bool) -> bool:
        """Whether all ranks have succeeded, which all ask together. `here` is whether this one
        has."""

    def end_load(self, loads: int | None) -> None:
        """Complete the load of a checkpoint: forget the calls of the trainer that wrote it, unless
        that was this one, and take a snapshot. `loads` is how often this trainer has loaded a
        state; a state with more loads is newer than any other."""
        if loads is not None:
            self.position.call, self.position.call_done, self.position.loads = -1, False, loads
        for each in self.evaluations.values():
            each.passes.call = -1
        self.snapshots.take(self)

    def unsaved(self) -> Any:
        """What a checkpoint does not have of the state, and new processes need to load it again."""
        return None

    def load_unsaved(self, unsaved: Any) -> None:  # noqa: B027 - it is optional
        """Restore what `unsaved` returned, or, for None, nothing."""

    # -- what frameworks do differently ---------------------------------------------------------------

    def _begin_call(self) -> None:  # noqa: B027 - it is optional
        """Prepare for a call. That the driver makes one shows that the generation is complete on
        all ranks."""

    @property
    def saves_together(self) -> bool:
        """Whether all ranks take part in a checkpoint."""
        return False

    def share(self) -> None:  # noqa: B027 - it is optional
        """Give all ranks what only some of them have of the state. All call this together."""

    def agree_on_snapshot(self, due: bool) -> bool:
        """Return whether a snapshot in an epoch is due, if it is or is not on this rank."""
        return due

    @abstractmethod
    def _make_results(self) -> Results:
        """Make what makes the results of calls."""

    @abstractmethod
    def _open_source(self, data: Any, phase: str) -> Source:
        """Open a source of registered data."""

    @abstractmethod
    def full_state(self, *, for_peers: bool = False) -> dict[str, Any]:
        """The operator's state and the position, `for_peers` with what only another rank of this
        trainer needs."""

    @abstractmethod
    def _dump(self, state: dict[str, Any]) -> memoryview:
        """Write a state as bytes."""
