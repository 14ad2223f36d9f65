"""One operator with its data, counters and state, living in one worker. No Ray inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from raysgd.core.meters import AverageMeterCollection
from raysgd.core.metrics import COMMITTED, SKIPPED, check_metrics
from raysgd.core.outcomes import DataLoaderFailure, Interrupted
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, TrainingFailedError, shown
from raysgd.torch.accepted import accepted_arguments
from raysgd.torch.checkpoint import states
from raysgd.torch.checkpoint.checks import check_fits
from raysgd.torch.checkpoint.in_memory import opened
from raysgd.torch.checkpoint.undo import Undo
from raysgd.torch.data.opening import Opener
from raysgd.torch.data.prefetch import make_carrier
from raysgd.torch.data.sources import Source, close
from raysgd.torch.feed import Feed, MembershipChange
from raysgd.torch.fsdp import gathered
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.position import Position
from raysgd.torch.settings import ReplicaSettings
from raysgd.torch.snapshots import Snapshotter

__all__ = ["TorchReplica", "TorchReplicaFactory"]

PARTIAL_S = 10.0


class TorchReplicaFactory:
    """Makes a replica in a worker. It is pickled, and it is the only part of a trainer that is sent there."""

    def __repr__(self) -> str:
        return f"the operator {self.operator_cls.__name__} with its config"

    def __init__(self, operator_cls: type[TrainingOperator], config: dict[str, Any], settings: ReplicaSettings) -> None:
        self.operator_cls, self.config, self.settings = operator_cls, config, settings

    def __call__(self, rank_info: RankInfo, control: Control) -> TorchReplica:
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        operator = self.operator_cls(self.config, settings=self.settings, rank_info=rank_info)
        if not operator._parts.registered:
            raise ConfigError(
                f"{self.operator_cls.__name__}.setup did not call self.register(models=..., optimizers=...): "
                "without it there is nothing to train, to wrap or to save"
            )
        return self._replica(operator, rank_info, control)

    def _replica(self, operator: TrainingOperator, rank_info: RankInfo, control: Control) -> TorchReplica:
        return TorchReplica(operator, self.settings, rank_info, control)


class TorchReplica:
    """Owns the operator, its data sources and the position. Trains and validates; the trainer's other calls are in
    `replica_calls`."""

    def __init__(
        self, operator: TrainingOperator, settings: ReplicaSettings, rank_info: RankInfo, control: Control
    ) -> None:
        self.operator, self._settings, self._rank_info, self._control = operator, settings, rank_info, control
        self._opener = Opener(operator, settings, control)
        self._position, self._val_position = Position(), Position()
        self._validation_began = self._val_position.as_dict()
        self._feed: Feed | None = None
        self._train: Source | None = None
        self._validation: Source | None = None
        self.snapshots = Snapshotter(settings.snapshot_every, control)
        self._carrier = make_carrier(operator.device, channels_last=settings.options.channels_last)
        self._partial_at = 0.0
        self._partial: dict[str, Any] | None = None
        self._state_of = 0  # how many workers there were where a loaded state comes from; 0: nothing was loaded
        for optimizer in operator._parts.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_post_hook(self._on_step)

    @property
    def progress(self) -> Progress:
        return self._position.progress(self._control.phase)

    def run(self, call: Call) -> Any:
        self._control.phase = call.name
        try:
            return call.method(self, **call.arguments)
        except DataLoaderFailure as failure:
            name = "validation_loader" if call.method is TorchReplica.validate else "train_loader"
            return failure.interrupted(name, self.partial(), self.progress)
        finally:
            self._control.phase = "idle"

    # -- training -------------------------------------------------------------------------------------

    def train(
        self,
        call: int,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        dataset: Any = None,
        snapshot_first: bool = False,
    ) -> Any:
        """Carry out the trainer's `train`: train the rest of the epoch, or of `num_steps`, from the current position."""
        position, operator = self._position, self.operator
        if not self._open_call(call, dataset):
            return {"epoch": position.epoch, COMMITTED: position.call_units}
        source = self._train_source(dataset)
        own_loop = type(operator).train_epoch is not TrainingOperator.train_epoch
        self._time(profile)
        operator._meter = AverageMeterCollection()
        operator.global_step = position.step
        if snapshot_first:
            self.snapshots.take(self)
        self._feed = feed = self._make_feed(source, position, num_steps, shared=True, unwind=own_loop)
        given, named = accepted_arguments(
            operator.train_epoch, feed, info=info, num_steps=num_steps, epoch_idx=position.call_epoch - 1
        )
        try:
            with self._measuring_epoch():
                result = operator.train_epoch(*given, **named)
        except MembershipChange:
            result = {}
        except BaseException:
            feed.cut_short()  # what was applied must count before another rank takes this state
            raise
        feed.leave()
        if feed.stopped:
            asked = not self._control.interrupted
            return Interrupted(self.partial(result), "stopped at a batch boundary", self.progress, asked=asked)
        return self._end_call(self._reported(result, profile, "train", position))

    def _end_call(self, report: dict[str, Any]) -> dict[str, Any]:
        """Note that the call of `train` is done. Return its report."""
        self._feed = None
        self._position.call_done = True
        self._position.resume_epoch()
        self.snapshots.call_ended(self)
        return report

    def _measuring_epoch(self) -> AbstractContextManager[Any]:
        """Return a context for the user's loop over an epoch."""
        return self.operator.timers.record("train_epoch")

    def _open_call(self, call: int, dataset: Any) -> bool:
        """Begin the call, or continue it after a change of members. Return False if its work is done already."""
        if call != self._position.call:
            self.operator._parts.begin_measuring("train")
            if dataset is None:
                self._position.resume_epoch()  # a call on a data set of its own may have ended in an error
        return self._position.open_call(call)

    def _make_feed(
        self, source: Source, position: Position, num_steps: int | None, *, shared: bool, unwind: bool = False
    ) -> Feed:
        trains, accumulate = position is self._position, self._settings.options.accumulate
        return Feed(
            source,
            position,
            self._rank_info,
            self._control,
            limit=num_steps,
            shared=shared and self._settings.distributed,
            carrier=self._carrier,
            on_commit=self._on_commit if trains else self._on_validated,
            window=accumulate if trains else 1,
            on_batch=self.operator._gradients.begin if trains and accumulate > 1 else None,
            unwind=unwind,
            name="train_loader" if trains else "validation_loader",
        )

    def _on_step(self, *_: Any) -> None:
        self._position.applied += 1
        self.operator._gradients.stepped()
        if self._feed is not None:
            self._feed.stepped()

    def _on_commit(self, last: bool = False) -> None:
        self.operator._precision.batch_done()
        control = self._control
        if last or control.due():
            control.report(self._position.progress("train"), self._partial_to_report())
        if not last:
            self.snapshots.batch_done(self)

    def _partial_to_report(self) -> dict[str, Any] | None:
        """Return the partial result. Metrics on a GPU are read only now and then, because reading waits for the
        device."""
        now = time.monotonic()
        if self.operator.device.type == "cpu" or now >= self._partial_at:
            self._partial_at, self._partial = now + PARTIAL_S, self.partial()
        return self._partial

    def _on_validated(self, last: bool = False) -> None:
        if last or self._control.due():
            told = replace(self._position.progress("validate"), batches=self._val_position.call_batches)
            self._control.report(told, self._partial_to_report())

    # -- validation -----------------------------------------------------------------------------------

    def validate(self, num_steps: int | None, profile: bool, info: dict[str, Any] | None, call: int) -> Any:
        """Carry out the trainer's `validate`. No rank waits for another one in it."""
        operator, position = self.operator, self._val_position
        if operator._parts.validation_loader is None:
            raise ConfigError(
                "validate() needs data: give self.register_data(validation_loader=...) in "
                f"{type(operator).__name__}.setup"
            )
        loader = operator._parts.validation_loader
        if self._validation is None or (position.ended and self._validation.loader is not loader):
            self._validation = self._opener.registered(loader, self._val_position, training=False)
        if call != position.call:
            position.open_call(call)
            self._validation_began = position.as_dict()
        else:
            position.adopt(self._validation_began)  # a peer failed: all start over where the first attempt began
        self._time(profile)
        self.operator._parts.begin_measuring("validation")
        feed = self._make_feed(self._validation, position, num_steps, shared=True)
        given, named = accepted_arguments(operator.validate, feed, info=info)
        try:
            with operator._parts.validating(), operator.timers.record("validation"):
                result = operator.validate(*given, **named)
        except BaseException:
            position.adopt(self._validation_began)
            raise
        feed.leave()
        if feed.stopped:
            position.adopt(self._validation_began)
            return Interrupted(None, "a peer failed", self.progress)
        return self._reported(result, profile, "validation", None)

    # -- sources --------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        if dataset is not None:
            return self._opener.for_a_call(dataset, self._position)
        loader = self.operator._parts.train_loader
        if self._train is None or (self._position.ended and self._train.loader is not loader):
            if loader is None:
                raise ConfigError(
                    "train() needs data: give self.register_data(train_loader=...) in "
                    f"{type(self.operator).__name__}.setup, or pass train(dataset=..., num_steps=...)"
                )
            self._train = self._opener.registered(loader, self._position, training=True)
        return self._train

    # -- results --------------------------------------------------------------------------------------

    def partial(self, result: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the running call has so far."""
        own = result or self.operator._meter.summary()
        return {"epoch": self._position.epoch, **own, **self._skipped(), COMMITTED: self._position.call_units}

    def _skipped(self) -> dict[str, Any]:
        skipped = self.operator._precision.skipped()
        return {SKIPPED: skipped} if skipped else {}

    def _reported(self, result: Any, profile: bool, phase: str, position: Position | None) -> dict[str, Any]:
        method = "validate" if position is None else "train_epoch"
        _check_result(result, method)
        check_metrics(result, of=f"{type(self.operator).__name__}.{method} returned what cannot be a result")
        report: dict[str, Any] = result
        if position is not None:
            report = {"epoch": position.epoch, **result, **self._skipped(), COMMITTED: position.call_units}
        report |= self.operator._parts.measured(phase)
        if profile:
            report["profile"] = self.operator.timers.stats()
        return report

    def _time(self, profile: bool) -> None:
        """Timers and figures of a call begin anew."""
        self.operator._precision.forget_skipped()
        self._partial_at, self._partial = time.monotonic() + PARTIAL_S, None
        timers = self.operator.timers
        timers.reset()
        (timers.enable if profile else timers.disable)()

    # -- state ----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank_info.world_rank

    @property
    def in_shards(self) -> bool:
        """Does it take all ranks to put the state together?"""
        return self.operator._parts.shards is not None

    def full_state(self, *, raw: bool = False) -> dict[str, Any]:
        """Operator and position; tensors are shared with the live ones. Shards are put together (on rank 0),
        unless they are wanted `raw`."""
        position = self._position
        state = states.gather(self.operator)
        if self.in_shards and not raw:
            state |= {name: gathered(state[name], keep=self.rank == 0) for name in ("models", "optimizers")}
        state |= {"epoch": position.epoch, "world_size": self._rank_info.world_size}
        state["position"] = position.as_dict()
        state["validation_position"] = self._val_position.as_dict()
        state["validation_began"] = self._validation_began
        if self._train is not None:
            state["loader"] = self._train.state()
        return state

    def state(self) -> memoryview:
        """For a peer that is behind, or new."""
        if self.in_shards:
            raise TrainingFailedError(
                "with parallel='fsdp' each worker holds a part of the model, and one alone cannot give it to "
                "another: load the newest checkpoint into a new trainer"
            )
        return states.dump(self.full_state())

    def load(self, data: Any) -> None:
        """Another replica's state, from this very trainer: trusted, and it fits."""
        state = torch.load(opened(data), map_location="cpu", weights_only=False)
        self._adopt(state)
        self._state_of = state["world_size"]

    def _adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, state)
        old = {"epoch": state.get("epoch", 0), "step": state.get("global_step", 0)}
        self._position.adopt(state.get("position") or old)
        self._val_position.adopt(state.get("validation_position") or {})
        began = Position()  # a file without a digest may lack counters
        began.adopt(state.get("validation_began") or self._val_position.as_dict())
        self._validation_began = began.as_dict()
        self._feed = None
        loader, place = self.operator._parts.train_loader, state.get("loader")
        if loader is not None and place is not None:
            if self._train is None or self._train.loader is not loader:
                self._train = self._opener.registered(loader, self._position, training=True)
            self._train.load(place)

    def take_over(self, read: Callable[[], dict[str, Any]], loads: int) -> None:
        """A checkpoint's content, if it fits; the user's load of that number: on all ranks, or on none. Random states are
        each rank's own."""
        with Undo(self).unless_all_succeed():
            state = read()
            check_fits(self.operator, state)
            self._train = None
            self._adopt(state)
        # The call that the checkpoint was taken in is not one of ours; and this state outranks all that was before.
        self._position.call, self._position.call_done, self._position.loads = -1, False, loads
        self._val_position.call, self._val_position.ended = -1, True
        self.snapshots.take(self)
        ranks = state.get("rng") or []
        if self.rank < len(ranks):
            states.restore_random(ranks[self.rank])

    def joined(self, rank_info: RankInfo) -> None:
        """A new generation: fresh wrappers, a fresh deal; who was cut short forgets the batch in work."""
        old, self._rank_info = self._rank_info, rank_info
        if self._feed is not None:
            self._feed.cut_short()
            self._feed = None
        self.operator._rank_info = rank_info
        self.operator._precision.abandon()
        self.operator._gradients.abandon()
        self.operator._parts.rewrap()
        # A recruit's state is that of the old world, and what `resized` does to it must happen on every rank.
        before = self._state_of if old.solo else old.world_size
        if before and before != rank_info.world_size:
            self.operator.resized(before, rank_info.world_size)

    def close(self) -> None:
        close(self._train)
        close(self._validation)
        self.snapshots.close()


def _check_result(result: Any, method: str) -> None:
    if not isinstance(result, dict):
        raise TypeError(f"{method} must return a dict of results, got {shown(result)}")
