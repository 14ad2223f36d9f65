"""A torch operator with its data, counters and state, in one worker. It does not use Ray.
Worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from raysgd.constants import PER_WORKER
from raysgd.core.control import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import CheckpointError, ConfigError
from raysgd.replica.calls import CALLS
from raysgd.replica.internals import internals_of
from raysgd.replica.replica_base import ReplicaBase
from raysgd.replica.results import OTHER_ROWS
from raysgd.replica.seeding import seed_python_and_numpy
from raysgd.replica.snapshots import Copied
from raysgd.replica.steps.feed import Source
from raysgd.storage.seen import SeenFile
from raysgd.torch.data.opening import Opener
from raysgd.torch.data.prefetch import make_carrier
from raysgd.torch.data.registered_rows import RegisteredRows
from raysgd.torch.data.sampling import is_planned, random_sources
from raysgd.torch.data.sources import LiveSource, PlannedSource
from raysgd.torch.group import sharing
from raysgd.torch.group.fsdp import DIVIDED, gathered
from raysgd.torch.group.sharing import gathered_objects
from raysgd.torch.internals import TorchInternals
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.results import TorchResults
from raysgd.torch.settings import TorchSettings
from raysgd.torch.state import packing, states
from raysgd.torch.state.checks import check_fits
from raysgd.torch.state.host_memory import HostMemory
from raysgd.torch.state.hyperparameters import made_with, warn_of_ignored

logger = logging.getLogger("raysgd")

OTHER_PARTS = (
    "the batches of the checkpoint's run have %d parts with batch_size=%s, and those of this trainer have %d with %s (parts is num_workers "
    "by default). Results differ from that run: an epoch has other steps, schedules that count steps are at another place, and BatchNorm, "
    "dropout, losses that compare samples and self.part_state see other samples. For equal results, pass parts=%d, and that batch_size"
)
BEGINS_AGAIN = (
    "the checkpoint is %d batches into an epoch of a %s, which has no position to save. This epoch begins again, so some samples are "
    "used twice. To continue within an epoch, use a loader with state_dict and load_state_dict"
)
OTHER_LENGTH = (
    "the checkpoint is within an epoch of %d rows, but train_loader has %d here. The rest of this epoch has the rows of the checkpoint, "
    "and the next epoch those of the loader. Ignore this if the data should differ"
)


class TorchReplica(ReplicaBase):
    """Adds what only torch needs: prefetching to the device, accumulation windows, shards, and a
    state that stays in place when the group changes. The trainer's other calls are in
    `replica_calls`."""

    operator_class = TrainingOperator
    data_names = {"train": "train_loader", "validation": "validation_loader", "test": "test_loader"}  # noqa: RUF012
    without_data = ", or pass train(dataset=..., num_steps=...)"

    operator: TrainingOperator
    internals: TorchInternals

    def __init__(
        self, operator: TrainingOperator, settings: TorchSettings, rank_info: RankInfo, control: Control
    ) -> None:
        self.rows = RegisteredRows(internals_of(operator), self.data_names)
        super().__init__(operator, settings, rank_info, control)
        internals = self.internals
        self._opener = Opener(operator, internals, control)
        options = settings.options
        self.carrier = make_carrier(
            operator.device,
            channels_last=options.channels_last,
            ahead=options.read_ahead,
            reuse=not internals.gives_batches,
        )
        self._memory = HostMemory(operator.device)
        internals.registered.control = control
        self.saved_rows: dict[str, list[Any]] = {}  # the part `rows` of the newest state that was loaded
        # Of this script, and of the one whose state this is.
        self._made_with = self._loaded_settings = made_with(internals.registered)
        self._same_rows = rank_info.world_size == 1  # as the other ranks of this generation
        self._mapped: Collection[str] = ()  # the parts of the state that was read last, which are still in the file
        self._continues_script = False  # its state is that of another script, whose workers it has taken over
        self._loaded_from = 0  # the number of workers of the group from which a state was loaded; 0 if none was

    @classmethod
    def prepare_process(cls, settings: TorchSettings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.dtype is not None:
            torch.set_default_dtype(settings.dtype)
        if settings.seed is not None:
            seed_python_and_numpy(settings.seed)
            torch.manual_seed(settings.seed)  # also GPUs that are not initialized yet

    def _begin_call(self) -> None:
        if not self._same_rows and self.control.phase in CALLS.values():
            known = self.rows.known(*self.data_names)
            mine = {name: each.for_ranks for name, each in known.items() if each.for_ranks}
            first, *others = gathered_objects(mine, self.control)
            for rank, rows in enumerate(others, 1):
                for name in (each for each in rows if rows[each] != first.get(each, rows[each])):
                    raise ConfigError(
                        OTHER_ROWS.format(loader=name, low=0, high=rank, ours=first[name], theirs=rows[name])
                    )
            self._same_rows = True

    # -- data -----------------------------------------------------------------------------------------

    def _train_source(self, dataset: Any) -> Source:
        return super()._train_source(None) if dataset is None else self._opener.for_a_call(dataset, self.position)

    def _open_source(self, data: Any, phase: str) -> Source:
        return self._opener.registered(data, self.position_in(phase), phase, self.places(phase))

    def _make_results(self) -> TorchResults:
        return TorchResults(self.operator, self.internals, self.rows)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def in_shards(self) -> bool:
        """Whether the state is divided among the ranks."""
        return self.internals.registered.shards is not None

    def full_state(self, *, for_peers: bool = False, raw: bool = False) -> dict[str, Any]:
        """The operator's state and the position, which share memory with the live tensors. Shards
        are gathered on rank 0; with `raw`, they stay shards."""
        state = states.gather(self.operator, self.internals.registered)
        if self.in_shards and not raw:
            state |= {name: gathered(state[name], keep=self.rank == 0) for name in DIVIDED if name in state}
            self.control.ensure_whole()
        return state | self._loop_state(for_peers=for_peers)

    def _loop_state(self, *, for_peers: bool) -> dict[str, Any]:
        """Where this replica is in its data; `for_peers` also what a peer needs to repeat an
        interrupted validation. A checkpoint does not contain that, because calls of an earlier
        trainer are never repeated."""
        names = {"train": "loader", "validation": "validation_loader"} if for_peers else {"train": "loader"}
        loader = self.internals.registered.train_loader
        if "train" not in self.sources and is_planned(loader) and random_sources(loader):
            self.sources["train"] = self._open_source(loader, "train")  # its generators belong to the state
        open_now = {name: self.sources[phase] for phase, name in names.items() if phase in self.sources}
        loaders = {name: each.state_for_peers() if for_peers else each.state() for name, each in open_now.items()}
        known = self.rows.known(*self.data_names)
        rows = {name: [each.units, each.indices] for name, each in known.items() if each.indices}
        state = {
            **self.positions(),
            "parts": self.internals.settings.all_parts,
            "batch_size": getattr(loader, "batch_size", None),
            **self.internals.part_states.state(),
            **loaders,
        }
        trained = {"trained": self.unsaved()} if for_peers else {}
        return {**state, **({"rows": rows} if rows else {}), "settings": self._loaded_settings, **trained}

    @property
    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for model in self.internals.registered.models for each in model.parameters()]

    def unsaved(self) -> list[bool]:
        return [each.requires_grad for each in self._parameters]

    def load_unsaved(self, unsaved: Any) -> None:
        for parameter, trained in zip(self._parameters, unsaved or (), strict=False):
            if parameter.requires_grad != trained:  # user code has frozen some since `setup`
                parameter.requires_grad_(trained)

    @property
    def saves_together(self) -> bool:
        return self.in_shards or bool(self.internals.part_states.state())

    def share(self) -> None:
        self.internals.part_states.share()

    def agree_on_snapshot(self, due: bool) -> bool:
        return self.internals.part_states.agreed(due, first=self.rank == 0)

    def copy(self, state: dict[str, Any]) -> tuple[Copied, int]:
        layout = packing.pack(state)
        return self._memory.copy(layout), layout.size

    def _dump(self, state: dict[str, Any]) -> memoryview:
        return packing.packed(state)

    def checkpoint_writer(self, *, later: bool) -> Callable[[Any], None] | None:
        """Make what writes the checkpoint to a file, on rank 0. With `later`, training may continue
        before that. If the model is sharded, all ranks take part, because each has a part of it."""
        if self.rank != 0 and not self.in_shards:
            return None
        state = self.full_state()
        if self.rank != 0:
            return None
        if not later:
            return lambda file: states.write(state, file)
        unchanged, copy = states.unchanging(state, self._memory, in_shards=self.in_shards)

        def write(file: Any) -> None:
            with copy:
                states.write(unchanged, file)

        return write

    def load(self, data: Any) -> None:
        """Load the state of another replica of this trainer. It is trusted, and it fits."""
        self._continues_script = False
        self._take(packing.unpack(data))

    def share_state(self, giver: int, *, takes: bool, is_new: bool) -> None:
        models = None
        if takes and is_new:  # then the models need no memory twice
            self.undefined, models = True, [model.state_dict() for model in self.internals.registered.models]
        device = torch.device("cpu") if dist.get_backend() == "gloo" else self.operator.device
        state = self.state_for_peers() if dist.get_rank() == giver else None
        copy = sharing.share_state(state, giver, takes=takes, models=models, device=device, control=self.control)
        if takes:
            self._continues_script = False
            self._take(copy)

    def take_over(self, data: Any) -> None:
        """Load the state of the last script's replica, whose code may be other than this one's."""
        state, self._continues_script = packing.unpack(data), True
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
        self.internals.part_states.taken(self.position.step)
        self.load_unsaved(state.get("trained"))
        if (position := state.get("validation_loader")) is not None:
            self.sources["validation"] = self._open_source(self.internals.registered.validation_loader, "validation")
            self.sources["validation"].load(position)
        self._loaded_from, self.undefined = state["world_size"], state.get("undefined", False)

    def _adopt(self, state: dict[str, Any]) -> None:
        states.restore(self.operator, self.internals.registered, state)
        self.saved_rows = dict(state.get("rows") or {})
        self._loaded_settings = dict(state.get("settings") or {})
        self._adopt_positions(state)
        self.internals.part_states.load(state)
        loader, position = self.internals.registered.train_loader, state.get("loader")
        if loader is not None and position is not None:
            if "train" not in self.sources or self.sources["train"].loader is not loader:
                self.sources["train"] = self._open_source(loader, "train")
            self.sources["train"].load(position)

    def read(self, source: Any, *, trusted: bool) -> dict[str, Any]:
        self._mapped = states.parts_to_map(self.internals.registered) if isinstance(source, SeenFile) else ()
        if isinstance(source, SeenFile):
            return states.read(source, trusted=trusted, mapped=self._mapped)
        return states.parse(source.data, trusted=trusted)

    def check(self, state: dict[str, Any]) -> None:
        check_fits(self.internals.registered, state)

    def adopt(self, state: dict[str, Any]) -> None:
        if "optimizers" in self._mapped:
            optimizers = map(states.unmapped, state["optimizers"], self.internals.registered.optimizers)
            state = {**state, "optimizers": [*optimizers]}
        if (source := self.sources.pop("train", None)) is not None:
            source.close()
        self._adopt(state)
        source = self.sources.get("train")
        if isinstance(source, LiveSource) and not source.resumable and self.rank == 0 and not self.position.ended:
            logger.warning(BEGINS_AGAIN, self.position.offset, type(source.loader).__name__)
        goes_on = isinstance(source, PlannedSource) and self.rank == 0 and not self.position.ended
        if goes_on and source.units not in (None, len(source.order)):
            logger.warning(OTHER_LENGTH, len(source.order), source.units)
        keep, parts = self.internals.keep_batch, self.internals.settings.all_parts
        size = getattr(self.internals.registered.train_loader, "batch_size", None) or state.get("batch_size")
        saved, here = (state.get("parts", parts), state.get("batch_size") or size), (parts, size)
        if saved != here and self.rank == 0 and (keep.mode != PER_WORKER or saved[0] == parts):
            logger.warning(OTHER_PARTS, *saved, *here, saved[0])
        warn_of_ignored(self.internals, self._made_with, self._loaded_settings)

    def all_succeeded(self, here: bool) -> bool:
        return all(gathered_objects(here, self.control))

    def end_load(self, loads: int | None) -> None:
        if loads is not None:
            self.internals.keep_batch.loaded()
        super().end_load(loads)

    # -- membership -----------------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        """Wrap the models again for a new generation. A batch that was not applied will be
        processed again; its gradients are cleared."""
        old = self.internals.rank_info
        self.internals.join(rank_info)
        if self._continues_script:
            warn_of_ignored(self.internals, self._made_with, self._loaded_settings)
        # A replacement worker has the state of the old group, and `resized` must change it on every rank.
        before = self._loaded_from if old.solo else old.world_size
        self._joined_at = self.position.step if old.solo else self._joined_at
        if before and before != rank_info.world_size:
            self.operator.resized(before, rank_info.world_size)
        self.results.begin_part()
        self._same_rows = rank_info.world_size == 1

    def close(self) -> None:
        for source in self.sources.values():
            source.close()
        super().close()
