"""One operator with its data, counters and state, living in one worker. No Ray inside."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from raysgd.core.meters import AverageMeterCollection
from raysgd.core.metrics import COMMITTED, check_metrics
from raysgd.core.outcomes import Interrupted
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import CheckpointError, ConfigError, shown
from raysgd.tf import states
from raysgd.tf.channel import Channel
from raysgd.tf.data import Drawn, Source, make_source
from raysgd.tf.feed import Feed, MembershipChange
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.parts import as_tensor, assign
from raysgd.tf.position import Position
from raysgd.tf.process_group import prepare_runtime
from raysgd.tf.reports import metric_results
from raysgd.tf.settings import ReplicaSettings
from raysgd.tf.snapshots import Snapshotter

__all__ = ["TFReplica", "TFReplicaFactory"]


class TFReplicaFactory:
    """Makes a replica in a worker; picklable, and the only thing of a trainer's that travels there."""

    def __init__(self, operator_cls: type[TrainingOperator], config: dict[str, Any], settings: ReplicaSettings) -> None:
        self.operator_cls, self.config, self.settings = operator_cls, config, settings

    def __call__(self, rank_info: RankInfo, control: Control) -> TFReplica:
        settings = self.settings
        if settings.threads is not None and not settings.distributed:  # a process of its own, and no meeting before
            prepare_runtime(settings.threads, use_gpu=settings.use_gpu)
        if settings.seed is not None:
            tf.random.set_seed(settings.seed)
        operator = self.operator_cls(self.config, settings=settings, rank_info=rank_info)
        if not operator._parts.registered:
            raise ConfigError(
                f"{self.operator_cls.__name__}.setup did not call self.register(models=..., optimizers=...): "
                "without it there is nothing to train or to save"
            )
        return TFReplica(operator, settings, rank_info, control)


class TFReplica:
    """Owns the operator, its sources and the position. Its public methods are the calls of the trainer's."""

    def __init__(
        self, operator: TrainingOperator, settings: ReplicaSettings, rank_info: RankInfo, control: Control
    ) -> None:
        self.operator, self._settings, self._rank_info, self._control = operator, settings, rank_info, control
        self._position, self._val_position = Position(), Position()
        self._feed: Feed | None = None
        self._train: Source | None = None
        self._validation: Source | None = None
        self._snapshots = Snapshotter(settings.snapshot_every, control)
        self._undo: memoryview | None = None  # the state before the newest load, until the next call
        self._prefix = "train_"
        self._steps_before = 0
        self._statistics_before: list[Any] = []

    @property
    def progress(self) -> Progress:
        return self._position.progress(self._control.phase)

    def run(self, call: Call) -> Any:
        self._cut_short()
        if call.method is not TFReplica.take_back:
            self._undo = None
        self._control.phase = call.name
        try:
            return call.method(self, **call.arguments)
        except BaseException:
            self._cut_short()
            raise
        finally:
            self._control.phase = "idle"

    # -- training -------------------------------------------------------------------------------------

    def train(
        self,
        call: int,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        snapshot_first: bool = False,
    ) -> Any:
        """The trainer's `train`: the rest of the epoch, or of `num_steps`, from where the position stands."""
        position, operator = self._position, self.operator
        if not position.open_call(call):
            return {"epoch": position.epoch, COMMITTED: position.call_units}
        if snapshot_first:
            self._snapshots.take(self)
        source = self._train_source()
        own_loop = type(operator).train_epoch is not TrainingOperator.train_epoch
        self._begin("train_", profile)
        operator.global_step = position.step
        self._feed = feed = self._make_feed(source, position, num_steps, unwind=own_loop)
        try:
            with operator.timers.record("train_epoch"):
                result = operator.train_epoch(feed, info=info, num_steps=num_steps, epoch_idx=position.call_epoch - 1)
        except MembershipChange:
            result = {}
        feed.leave()
        if feed.stopped:
            asked = not self._control.interrupted
            return Interrupted(self.partial(result), "stopped at a batch boundary", self.progress, asked=asked)
        report = self._reported(result, profile)
        self._feed = None
        position.call_done = True
        self._snapshots.call_ended(self)
        return {"epoch": position.epoch, **report, COMMITTED: position.call_units}

    def _make_feed(self, source: Source, position: Position, limit: int | None, *, unwind: bool = False) -> Feed:
        training = position is self._position
        return Feed(
            source,
            position,
            self._rank_info,
            self._control,
            limit=limit,
            on_begin=self._on_begin if training else lambda drawn: None,
            on_commit=self._on_commit if training else self._on_validated,
            stepped=self._stepped,
            unwind=unwind,
        )

    def _on_begin(self, drawn: Drawn) -> None:
        """Before each batch: its share, and what must be undone should a peer be lost in it."""
        operator = self.operator
        operator._take_share(drawn.share)
        operator._counts = drawn.fresh
        self._steps_before = self._steps()
        if self._rank_info.world_size > 1:
            self._statistics_before = [tf.identity(as_tensor(v)) for v in operator._statistics]

    def _steps(self) -> int:
        return sum(int(as_tensor(optimizer.iterations)) for optimizer in self.operator._parts.optimizers)

    def _stepped(self) -> bool:
        return self._steps() > self._steps_before

    def _cut_short(self) -> None:
        """A loop was left by an error: what was applied counts; what was not leaves no trace."""
        feed, self._feed = self._feed, None
        if feed is not None and feed.cut_short() and self._rank_info.world_size > 1:
            assign(self.operator._statistics, self._statistics_before)

    def _on_commit(self) -> None:
        control = self._control
        if control.due():
            control.report(self._position.progress("train"), self._measured())
        self._snapshots.batch_done(self)

    def _on_validated(self) -> None:
        if self._control.due():
            told = replace(self._position.progress("validate"), batches=self._val_position.call_batches)
            self._control.report(told, self._measured())

    def _train_source(self) -> Source:
        operator = self.operator
        data = operator._parts.train_dataset
        if data is None:
            raise ConfigError(
                f"train() needs data: give self.register_data(train_dataset=...) in {type(operator).__name__}.setup"
            )
        if self._train is None or (self._position.ended and self._train.data is not data):
            self._train = make_source(data, self._rank_info, operator._channel, training=True)
        return self._train

    # -- validation -----------------------------------------------------------------------------------

    def validate(self, num_steps: int | None, profile: bool, info: dict[str, Any] | None) -> Any:
        """The trainer's `validate`; ranks meet only at its end, to add up their metrics."""
        operator, position = self.operator, self._val_position
        data = operator._parts.validation_dataset
        if data is None:
            raise ConfigError(
                "validate() needs data: give self.register_data(validation_dataset=...) in "
                f"{type(operator).__name__}.setup"
            )
        if self._validation is None or (position.ended and self._validation.data is not data):
            self._validation = make_source(data, self._rank_info, operator._channel, training=False)
        position.open_call(position.call + 1)
        kept = position.as_dict()
        self._begin(operator._validation_prefix, profile)
        feed = self._make_feed(self._validation, position, num_steps)
        try:
            with operator.timers.record("validation"):
                result = operator.validate(feed, info=info)
            feed.leave()
            if feed.stopped:
                position.adopt(kept)
                return Interrupted(None, "a peer was lost", self.progress)
            return self._reported(result, profile)
        except BaseException:
            position.adopt(kept)
            raise

    # -- results --------------------------------------------------------------------------------------

    def partial(self, result: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the running call has so far, as this rank sees it."""
        found = metric_results(self.operator._metrics(), Channel())
        return {
            **{self._prefix + name: value for name, value in found.items()},
            **(result or {}),
            **self._measured(),
        }

    def _measured(self) -> dict[str, Any]:
        return {
            "epoch": self._position.epoch,
            **self.operator._meter.summary(),
            COMMITTED: self._position.call_units,
        }

    def _begin(self, prefix: str, profile: bool) -> None:
        operator, self._prefix = self.operator, prefix
        operator._meter = AverageMeterCollection()
        for metric in operator._metrics():
            metric.reset_state()
        operator.timers.reset()
        if profile:
            operator.timers.enable()
        else:
            operator.timers.disable()

    def _reported(self, result: Any, profile: bool) -> dict[str, Any]:
        name = "validate" if self._prefix.startswith("val") else "train_epoch"
        if not isinstance(result, dict):
            raise TypeError(f"{name} must return a dict of results, got {shown(result)}")
        check_metrics(result, of=f"{type(self.operator).__name__}.{name} returned what cannot be a result")
        report = dict(result)
        for name, value in metric_results(self.operator._metrics(), self.operator._channel).items():
            report.setdefault(self._prefix + name, value)
        self.operator._on_report(self._prefix, report)
        if profile:
            report["profile"] = self.operator.timers.stats()
        return report

    # -- other calls ----------------------------------------------------------------------------------

    def apply_operator(self, function: Callable[[Any], Any]) -> Any:
        return function(self.operator)

    def apply(self, function: Callable[[], Any]) -> Any:
        return function()

    def random_state(self) -> dict[str, Any]:
        return states.random_state()

    def checkpoint(self, ranks: list[Any]) -> Any:
        """The whole checkpoint as bytes, on rank 0; `ranks` are the random states of all."""
        return (
            states.dump({**self.full_state(), "rng": ranks}, sealed=True) if self._rank_info.world_rank == 0 else None
        )

    def check(self, data: Any) -> str:
        """What does not fit; nothing, where all fits. An answer and no error, since an error of one rank ends the group of all."""
        try:
            state = states.parse(data.data)
            states.check(self.operator, state)
            states.check_random(state.get("rng"))
            Position.check(_position(state), "position")
            Position.check(state.get("validation_position") or {}, "validation_position")
        except CheckpointError as error:
            return str(error)
        return ""

    def restore(self, data: Any) -> tuple[str, ...]:
        """Takes a checked state; or answers with what the operator's own `load_state_dict` raised, and its traceback. Then
        `take_back` must follow, on every rank."""
        state, loads = states.parse(data.data), self._position.loads
        self._undo = states.dump({**self.full_state(), "rng": [states.random_state()]})
        try:
            self._adopt(state)
        except Exception as error:
            return f"{type(error).__name__}: {error}", traceback.format_exc()
        # The call that the checkpoint was taken in is not one of ours; and this state outranks all that was before.
        self._position.call, self._position.call_done, self._position.loads = -1, False, loads + 1
        ranks = state.get("rng") or []
        if self._rank_info.world_rank < len(ranks):
            states.restore_random(ranks[self._rank_info.world_rank])
        return ()

    def take_back(self) -> str:
        """As it was before `restore`, when the operator of some rank could not take the state. Answers with what the
        operator raised, if it does not take its own part back either."""
        undo, self._undo = self._undo, None
        if undo is None:
            return ""
        state = states.parse(undo)
        states.restore_variables(self.operator, state)
        self._position.adopt(state["position"])
        self._val_position.adopt(state["validation_position"])
        try:
            if state["operator"] is not None:
                self.operator.load_state_dict(state["operator"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            states.restore_random(state["rng"][0])
        return ""

    # -- state ----------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Any]:
        """Operator and position, as a copy."""
        state = states.gather(self.operator)
        state["epoch"] = self._position.epoch
        state["position"] = self._position.as_dict()
        state["validation_position"] = self._val_position.as_dict()
        return state

    def state(self) -> memoryview:
        self._cut_short()
        return states.dump(self.full_state())

    def load(self, data: Any) -> None:
        self._adopt(states.parse(data))

    def _adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, state)
        self._position.adopt(_position(state))
        self._val_position.adopt(state.get("validation_position") or {})
        self._val_position.ended = True
        self._feed = None

    def joined(self, rank_info: RankInfo) -> None:
        """A new generation, in the same process: only possible where nobody is to be met."""
        self._cut_short()
        self._rank_info = self.operator._rank_info = rank_info

    def close(self) -> None:
        self.operator._close()
        self._snapshots.close()


def _position(state: dict[str, Any]) -> Any:
    return state.get("position") or {"epoch": state.get("epoch", 0)}
