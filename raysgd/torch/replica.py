"""A torch operator with its data, counters and state, in one worker. It does not use Ray.
Worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from raysgd.constants import NUM_SAMPLES
from raysgd.core.batch_mode import PER_WORKER
from raysgd.core.metrics import SECONDS, SKIPPED, Measured
from raysgd.core.progress import Control
from raysgd.core.rank_comparison import Summary
from raysgd.core.ranks import RankInfo
from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage.seen import SeenFile
from raysgd.torch.checkpoint import packing, states
from raysgd.torch.checkpoint.checks import check_fits
from raysgd.torch.data.opening import Opener
from raysgd.torch.data.prefetch import make_carrier
from raysgd.torch.data.rows import LoaderRows
from raysgd.torch.data.sampling import is_planned, random_sources
from raysgd.torch.data.sources import LiveSource
from raysgd.torch.foreign import content_version
from raysgd.torch.fsdp import gathered
from raysgd.torch.hyperparameters import made_with, warn_of_ignored
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.rank_comparison import summary_of
from raysgd.torch.resharding import Resharding
from raysgd.torch.settings import TorchSettings
from raysgd.torch.skipped_steps import gathered_objects
from raysgd.training.feed import Source
from raysgd.training.operator_base import each_loader
from raysgd.training.replica_base import Phase, ReplicaBase
from raysgd.training.seeding import seed_python_and_numpy

logger = logging.getLogger("raysgd")

PARTIAL_S = 10.0
OTHER_PARTS = (
    "this checkpoint is of a run with num_workers=%d, and this trainer has num_workers=%d: a batch has other parts, so what is computed "
    "with all samples of a part (BatchNorm, dropout, losses that compare samples), or kept in self.part_state, differs from that run"
)
BEGINS_AGAIN = (
    "the checkpoint is %d batches into an epoch of a %s, whose position it cannot hold: this epoch begins again from its beginning, so "
    "some samples are used twice. A loader with state_dict and load_state_dict continues"
)
NOT_FINITE = (
    "%s is %s in epoch %d, after %d batches of the call: the loss of a batch was not finite, and the weights may not be either. Pass "
    "TrainingOptions(on_nonfinite='raise') to end training at the first step whose gradients are not finite, and to see its samples, or "
    "'skip' to leave out such steps"
)


class TorchReplica(ReplicaBase):
    """Adds what only torch needs: prefetching to the device, accumulation windows, shards, and a
    state that stays in place when the group changes. The trainer's other calls are in
    `replica_calls`."""

    operator_class = TrainingOperator
    data_names = {"train": "train_loader", "validation": "validation_loader", "test": "test_loader"}  # noqa: RUF012
    without_data = ", or pass train(dataset=..., num_steps=...)"
    how_to_step = "call self.backward(loss), and then self.step(optimizer) or optimizer.step()"

    operator: TrainingOperator

    def __init__(
        self, operator: TrainingOperator, settings: TorchSettings, rank_info: RankInfo, control: Control
    ) -> None:
        super().__init__(operator, settings, rank_info, control)
        self._opener = Opener(operator, settings, control)
        options = settings.options
        self._carrier = make_carrier(operator.device, channels_last=options.channels_last, ahead=options.read_ahead)
        operator._parts.calls.control, control.called = control, operator._parts.calls.newest
        operator._keep_batch.position = self._position
        self._partial_at = 0.0
        self._partial: Measured | None = None
        self._position.made_for = settings.num_workers, operator._planned_steps
        if type(operator).train_epoch is TrainingOperator.train_epoch:
            operator._own_schedulers()  # raises ConfigError for what it cannot step
        self._described: dict[str, tuple[Any, LoaderRows]] = {}  # with the loaders
        self.saved_rows: dict[str, list[Any]] = {}  # the part `rows` of the newest state that was loaded
        self._settings = self._loaded_settings = made_with(
            operator
        )  # of this script, and of the one whose state this is
        self._continues_script = False  # its state is that of another script, whose workers it has taken over
        self._phase: Phase = "train"  # the running call's
        self._warns_of_loss = False  # in it, if it is not finite
        self._loaded_from = 0  # the number of workers of the group from which a state was loaded; 0 if none was
        for optimizer in operator._parts.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_post_hook(self._on_optimizer_step)
        own = operator, rank_info, control, lambda: self.progress, self._unsharded_state
        self._resharding = Resharding(*own) if self.in_shards else None

    @classmethod
    def prepare_process(cls, settings: TorchSettings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.seed is not None:
            seed_python_and_numpy(settings.seed)
            torch.manual_seed(settings.seed)  # also GPUs that are not initialized yet

    def _begin_call(self) -> None:
        if self._resharding is not None:
            self._resharding.settled()

    # -- data -----------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        return super()._train_source(None) if dataset is None else self._opener.for_a_call(dataset, self._position)

    def _open_source(self, data: Any, phase: str) -> Source:
        return self._opener.registered(data, self._position_in(phase), phase, self.places(phase))

    def _feed_options(self, phase: str) -> dict[str, Any]:
        if phase != "train":
            return {"carrier": self._carrier}
        return {"carrier": self._carrier, "window": self.operator._parts.options.accumulate}

    def _on_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        step = self.operator._feed.step
        self._position.applied += 1
        step.outcome = "applied"
        for policy in step.policies.stepped:
            policy(step, optimizer)

    def _steps_made(self) -> Any:
        """An optimizer that is not torch's cannot be watched, weights may be changed without one,
        and all may be frozen."""
        optimizers = self.operator._parts.optimizers
        if not all(hasattr(each, "register_step_post_hook") for each in optimizers):
            return None
        parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        trained = [each for each in parameters if each.requires_grad]
        return (self._position.applied, sum(map(content_version, trained))) if trained else None

    def _summary(self) -> Summary:
        return summary_of(self.operator)

    # -- results --------------------------------------------------------------------------------------

    def _measured(self, metrics: dict[str, Any]) -> Measured:
        for name, value in metrics.items() if self._warns_of_loss and metrics.get(NUM_SAMPLES, 1) else ():
            if "loss" in name and isinstance(value, float) and not math.isfinite(value):
                logger.warning(NOT_FINITE, name, value, self._position.users_epoch, self._position.call_batches)
                self._warns_of_loss = False
                break
        return super()._measured(metrics)

    def _partial_to_report(self) -> Measured | None:
        """Return the partial result. Metrics on a GPU are read only from time to time, because that
        waits for the device."""
        now = time.monotonic()
        if self.operator.device.type == "cpu" or now >= self._partial_at:
            self._partial_at, self._partial = now + PARTIAL_S, self.partial()
        if self._rank_info.world_size == 1:
            return self._partial
        # The driver compares these with the data of other ranks.
        rows = {name: each.for_ranks for name, each in self.rows_of(self._phase).items() if each.for_ranks}
        sources = zip(self._loaders(self._phase), self._phases(self._phase), strict=True)
        begun = {name: getattr(self._sources.get(phase), "first", "") for name, phase in sources}
        first = {name: batch for name, batch in begun.items() if batch}
        return replace(self._partial or Measured(), rows=rows, first=first)

    def _loaders(self, phase: Phase) -> dict[str, Any]:
        """Return the registered data, or each of several loaders, by what errors call it."""
        name = self.data_names[phase]
        return dict(each_loader(name, getattr(self.operator._parts, name)))

    def rows_of(self, *phases: Phase) -> dict[str, LoaderRows]:
        """Return what is known of the rows of the registered data, by its name, if raysgd divides
        it by index among the ranks."""
        loaders = {name: loader for phase in phases for name, loader in self._loaders(phase).items()}
        for name, loader in loaders.items():
            if name not in self._described or self._described[name][0] is not loader:
                rows = LoaderRows.of(loader) if self.operator._is_divided and is_planned(loader) else LoaderRows()
                self._described[name] = loader, rows
        return {name: self._described[name][1] for name in loaders}

    def _counts(self) -> dict[str, Any]:
        skipped = self.operator._parts.precision.skipped() + self.operator._leave_out.skipped
        counts = {
            **super()._counts(),
            **self.operator._monitor.measured(),
            **({SKIPPED: skipped} if skipped else {}),
        }
        if SECONDS["communication"] in counts:
            counts[SECONDS["compute"]] = max(counts[SECONDS["compute"]] - counts[SECONDS["communication"]], 0.0)
        return counts

    def _batch_mode(self) -> str:
        return self.operator._keep_batch.mode if self._phase == "train" else ""

    def _begin_measuring(self, phase: Phase, profile: bool, *, new_call: bool) -> None:
        super()._begin_measuring(phase, profile, new_call=new_call)
        if new_call:  # registered metrics continue after a change of the group
            self.operator._parts.begin_measuring(self._metric_of(phase))
        self.operator._parts.precision.forget_skipped()
        self.operator._leave_out.skipped = 0
        self._phase = phase
        if new_call:
            self.operator._parts.refuse_unfrozen()
            own = self.operator._parts.options.on_nonfinite
            self._warns_of_loss = phase == "train" and own is None and self.rank == 0
        self.operator._monitor.begin()
        self._partial_at, self._partial = time.monotonic() + PARTIAL_S, None

    def _add_metrics(self, report: dict[str, Any], phase: Phase) -> dict[str, Any]:
        report.update(self.operator._parts.measured(self._metric_of(phase)))
        return {} if self.operator._profiler is None else {"traces": self.operator._profiler.taken()}

    def _metric_of(self, phase: Phase) -> Phase:
        """Return the phase of the registered metric that the methods of this phase update."""
        default = type(self.operator).test_batch is self.operator_class.test_batch
        own = phase != "test" or "test" in self.operator._parts.metrics
        return "validation" if default and not own else phase

    # -- state ----------------------------------------------------------------------------------------

    @property
    def in_shards(self) -> bool:
        """Return whether the state is divided among the ranks."""
        return self.operator._parts.shards is not None

    def full_state(self, *, raw: bool = False, for_peers: bool = False) -> dict[str, Any]:
        """Return the operator's state and the position, which share memory with the live tensors.
        Shards are gathered on rank 0; with `raw`, they stay shards."""
        state = states.gather(self.operator)
        if self.in_shards and not raw:
            sharded = [name for name in ("models", "optimizers", "averages") if name in state]
            state |= {name: gathered(state[name], keep=self.rank == 0) for name in sharded}
            self._control.ensure_whole()
        return state | self._loop_state(for_peers=for_peers)

    def _loop_state(self, *, for_peers: bool) -> dict[str, Any]:
        """Return where this replica is in its data; `for_peers` also what a peer needs to repeat an
        interrupted validation. A checkpoint does not contain that, because calls of an earlier
        trainer are never repeated."""
        names = {"train": "loader", "validation": "validation_loader"} if for_peers else {"train": "loader"}
        loader = self.operator._parts.train_loader
        if "train" not in self._sources and is_planned(loader) and random_sources(loader):
            self._sources["train"] = self._open_source(loader, "train")  # its generators belong to the state
        open_now = {name: self._sources[phase] for phase, name in names.items() if phase in self._sources}
        loaders = {name: each.state_for_peers() if for_peers else each.state() for name, each in open_now.items()}
        known = self.rows_of(*self.data_names)
        rows = {name: [each.units, each.indices] for name, each in known.items() if each.indices}
        found = {**self._positions(), "parts": self.num_workers, **self.operator._part_states.state(), **loaders}
        trained = {"trained": [each.requires_grad for each in self._parameters]} if for_peers else {}
        return {**found, **({"rows": rows} if rows else {}), "settings": self._loaded_settings, **trained}

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for model in self.operator._parts.models for each in model.parameters()]

    def _state_for_peers(self) -> dict[str, Any]:
        return self.full_state(for_peers=True)

    @property
    def saves_together(self) -> bool:
        return self.in_shards or bool(self.operator._part_states.state())

    def _share(self) -> None:
        self.operator._part_states.share()

    def _snapshot_due(self, before: int) -> bool:
        return self.operator._part_states.agreed(super()._snapshot_due(before), first=self.rank == 0)

    def _packed_copy(self, state: dict[str, Any]) -> Sequence[Any]:
        return packing.pack(state, copy=True)

    def _dump(self, state: dict[str, Any]) -> memoryview:
        return packing.packed(state)

    def checkpoint_writer(self, *, later: bool) -> Callable[[Any], None] | None:
        """Return what writes the checkpoint to a file, on rank 0. With `later`, training may
        continue before that. If the model is sharded, all ranks take part, because each has a part
        of it."""
        if self.rank != 0 and not self.in_shards:
            return None
        state = self.full_state()
        if self.rank != 0:
            return None
        written = states.unchanging(state, in_shards=self.in_shards) if later else state
        return lambda file: states.write(written, file)

    def load(self, data: Any, *, other_code: bool = False) -> None:
        """Load the state of another replica of this trainer. It is trusted, and it fits, unless
        that had `other_code`. Shards are made of it in the next generation."""
        if self._resharding is not None:
            self._resharding.give(data)
            return
        state, self._continues_script = packing.unpack(data), other_code
        if other_code:
            try:
                self.check(state)
            except CheckpointError as error:
                raise ConfigError(
                    f"the state of the last script (here: the checkpoint) does not fit the code of this one: {error}"
                ) from error
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        self.undefined = True  # an error may follow, and this rank must not pass on what it has then
        self._adopt(state)
        self.operator._part_states.taken(self._position.step)
        for parameter, trained in zip(self._parameters, state.get("trained", ()), strict=False):
            if parameter.requires_grad != trained:  # user code has frozen some since `setup`
                parameter.requires_grad_(trained)
        if (position := state.get("validation_loader")) is not None:
            self._sources["validation"] = self._open_source(self.operator._parts.validation_loader, "validation")
            self._sources["validation"].load(position)
        self._control.ensure_whole()  # shards that were made of it
        self._loaded_from, self.undefined = state["world_size"], state.get("undefined", False)

    def _adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, state)
        self.saved_rows = dict(state.get("rows") or {})
        self._loaded_settings = dict(state.get("settings") or {})
        self._adopt_positions(state)
        self.operator._part_states.load(state)
        loader, position = self.operator._parts.train_loader, state.get("loader")
        if loader is not None and position is not None:
            if "train" not in self._sources or self._sources["train"].loader is not loader:
                self._sources["train"] = self._open_source(loader, "train")
            self._sources["train"].load(position)

    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        if isinstance(source, SeenFile):
            return states.read(source, trusted=trusted, map_models=states.copies_models(self.operator))
        return states.parse(source.data, trusted=trusted)

    def check(self, state: dict[str, Any]) -> None:
        check_fits(self.operator, state)

    def adopt(self, state: dict[str, Any]) -> None:
        if (source := self._sources.pop("train", None)) is not None:
            source.close()
        self._adopt(state)
        source = self._sources.get("train")
        if isinstance(source, LiveSource) and not source.resumable and self.rank == 0 and not self._position.ended:
            logger.warning(BEGINS_AGAIN, self._position.offset, type(source.loader).__name__)
        keep, saved = self.operator._keep_batch, state.get("parts", self.num_workers)
        if saved != self.num_workers and self.rank == 0 and keep.mode != PER_WORKER:
            logger.warning(OTHER_PARTS, saved, self.num_workers)
        keep.loaded()
        warn_of_ignored(self.operator, self._settings, self._loaded_settings)

    def all_succeeded(self, here: bool) -> bool:
        return all(gathered_objects(here, self._control))

    # -- membership -----------------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        """Wrap the models again for a new generation. A batch that was not applied will be
        processed again; its gradients are cleared."""
        old = self._rank_info
        self._cut_short()
        if self._resharding is not None:
            state = self._resharding.rejoin(rank_info)
            if state is not None:
                self._take(state)
            self.undefined = self.undefined or self._resharding.is_lost
        self._rank_info = self.operator._rank_info = rank_info
        self.operator._parts.rewrap()
        self.operator._weigh.joined()
        self.operator._buffers.joined()
        self.operator._keep_batch.joined(rank_info)
        self.operator._part_states.joined()
        if self._continues_script:
            warn_of_ignored(self.operator, self._settings, self._loaded_settings)
        # A replacement worker has the state of the old group, and `resized` must change it on every rank.
        before = self._loaded_from if old.solo else old.world_size
        self._joined_at = self._position.step if old.solo else self._joined_at
        if before and before != rank_info.world_size:
            self.operator.resized(before, rank_info.world_size)
        self._units_before = self._position.call_units

    def hand_over(self, stay: list[int]) -> None:
        """Give the ranks that stay the shards of all ranks, before the others leave. All ranks call
        this together."""
        assert self._resharding is not None
        self._resharding.hand_over(stay)

    def _unsharded_state(self) -> dict[str, Any]:
        """Return what a peer needs besides shards."""
        state = states.gather(self.operator) | self._loop_state(for_peers=True) | {"undefined": self.undefined}
        return {name: value for name, value in state.items() if name not in ("models", "optimizers", "averages")}

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        super().close()
