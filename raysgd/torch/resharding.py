"""Shard a model again when the workers change: survivors exchange the shards of the newest
committed step. Worker."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.control import Control
from raysgd.core.progress import Progress
from raysgd.core.ranks import RankInfo
from raysgd.core.shard_copies import Agreement, ShardCopy, Transfer, agreed, layout, rows, transfers
from raysgd.core.tree import mapped
from raysgd.errors import ConfigError
from raysgd.torch.checkpoint import packing, states
from raysgd.torch.foreign import without_step_pre_hooks
from raysgd.torch.fsdp import DIVIDED
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.parts import Parts
from raysgd.torch.skipped_steps import gathered_objects
from raysgd.torch.step_options import settings_of

Path = tuple[Any, ...]
Tensors = Mapping[Path, torch.Tensor | None]


@dataclass(frozen=True)
class Piece:
    """One rank's rows of a tensor of this shape, along the dimension `dim`; all of the tensor if
    that is None."""

    shape: tuple[int, ...]
    dim: int | None
    dtype: torch.dtype
    local: torch.Tensor | None


@dataclass(frozen=True)
class HeldShards:
    """Shards that no model uses: of the last generation, or received from a worker that leaves."""

    copy: ShardCopy
    tree: dict[str, Any]


class Resharding:
    """Owns what one rank holds for the next generation besides its live shards, and the agreement
    on each optimizer step.

    A rank makes a step only when all ranks have its gradients, which an all-reduce of one number
    tells them. So if any rank has made it, each other one has made it, or can make it from what it
    has: no step is ever on some ranks only, and no copy of older weights is needed.

    `progress` returns this rank's, and `others` its state without what is sharded. What a rank held
    before a change is kept until the change is complete on all ranks, which the driver's next call
    tells.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        parts: Parts,
        rank_info: RankInfo,
        control: Control,
        progress: Callable[[], Progress],
        others: Callable[[], dict[str, Any]],
    ) -> None:
        self._operator, self._parts, self._replicas = operator, parts, parts.options.replicas
        self._control, self._progress, self._others = control, progress, others
        self._ranks = rank_info.world_size
        # Generation, index and number of the live shards. The generation is -1 while there are none.
        self._live = (-1 if rank_info.solo else rank_info.generation, *self._place(rank_info))
        self._earlier: list[HeldShards] = []
        self._given: Any = None  # a full state, which all ranks have
        self.is_lost = False  # the ranks of this generation had too few shards for a state
        # An optimizer whose step waits for other ranks, and its settings.
        self._ready: tuple[Any, list[dict[str, Any]]] | None = None
        for optimizer in parts.optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    "parallel='fsdp' needs torch optimizers, because all ranks agree on each step in a hook, got a "
                    f"{type(optimizer).__name__}, which has no register_step_pre_hook: make it a subclass of torch.optim.Optimizer"
                )
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _place(self, rank_info: RankInfo) -> tuple[int, int]:
        count = layout(rank_info.world_size, self._replicas)[1]
        return rank_info.world_rank % count, count

    # -- steps ----------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args[1:], kwargs.get("closure"))  # the first one is the optimizer itself
        if any(each is not None for each in given):
            raise ConfigError(
                f"with parallel='fsdp' a closure cannot be passed to {type(optimizer).__name__}.step(), because all ranks must have the "
                "gradients before the first one steps: compute them before the step"
            )
        if self._ranks == 1 or not self._parts.shards_made:
            return
        self._ready = (optimizer, settings_of([optimizer]))
        arrived = torch.ones(1, device=self._operator.device)
        dist.all_reduce(arrived)
        self._control.ensure_whole()
        if int(arrived.item()) != self._ranks:
            raise dist.DistBackendError("the ranks could not agree on a step, because a peer failed")

    def _after_step(self, *_: Any) -> None:
        self._ready = None

    # -- changes --------------------------------------------------------------------------------------

    def settled(self) -> None:
        """Note that the generation is complete on all ranks: what it was made from is no longer
        needed."""
        self._earlier = []

    def give(self, data: Any) -> None:
        """Let the next generation begin with this full state, which all its ranks are given."""
        self._given, self._earlier = data, []

    def hand_over(self, stay: Sequence[int]) -> None:
        """Divide the shards among the ranks that stay, while all ranks are there. All call this."""
        count, rank = self._live[2], dist.get_rank()
        holders = {each: each % count for each in range(dist.get_world_size())}
        tree = _in_pieces(self._operator, self._parts)
        outline = _broadcast(_without_content(tree), 0, self._control)
        targets = {each: index for index, each in enumerate(stay)}
        moved = self._moved(outline, _locals(tree), holders, count, targets, len(stay))
        if rank in stay:
            copy = replace(self._copy(), handed=True, count=len(stay), index=stay.index(rank))
            self._earlier = [HeldShards(copy, _replaced(tree, moved))]

    def rejoin(self, rank_info: RankInfo) -> dict[str, Any] | None:
        """Divide the newest state of which there is a copy of each shard among the ranks of a new
        generation, or the full state that all ranks were given. Return the state that this rank
        must adopt, None if it has it already, or if there is none (`is_lost`). All ranks call
        this."""
        shards, rank = self._parts.shards, rank_info.world_rank
        assert shards is not None
        if shards.made:
            shards.rest()
        self._ranks, self.is_lost = rank_info.world_size, False
        held = self._held()
        everything = gathered_objects((list(held), self._given is not None, self._progress().order), self._control)
        if all(given for _, given, _ in everything):
            state: dict[str, Any] = packing.unpack(self._given)
            self._begin_empty(rank_info)
            return state
        agreement = agreed([copies for copies, *_ in everything])
        if agreement is None:
            self.is_lost = any(copies or given for copies, given, _ in everything)
            if self.is_lost:
                self._begin_empty(rank_info)
            self._live = (rank_info.generation, *self._place(rank_info))
            return None
        used = self._used(held, agreement, rank) if rank in agreement.holders else None
        orders = [order for *_, order in everything]
        lead = max(agreement.holders.keys() - agreement.late, key=lambda rank: (orders[rank], -rank))
        behind = used is None or rank in agreement.late or orders[rank] != orders[lead]
        mine = used.tree if used is not None else {}
        state = _broadcast({**self._others(), **_without_content(mine)} if rank == lead else None, lead, self._control)
        self._earlier = [] if used is None else [used]
        state = self._divided(rank_info, state, state if behind else mine, _locals(mine), agreement)
        if behind:
            return state
        self._parts.averages.load(state.get("averages"))
        return None

    def _copy(self) -> ShardCopy:
        (generation, index, count), at = self._live, self._progress()
        return ShardCopy(generation, False, count, index, at.loads, at.applied, self._ready is not None)

    def _held(self) -> dict[ShardCopy, HeldShards | None]:
        """What this rank holds; None stands for the live shards."""
        if self._given is not None:
            return {}
        has_live = self._parts.shards_made and self._live[0] >= 0
        # Those of an earlier generation are used if a user's `load_state_dict` has failed since.
        live = {self._copy(): None} if has_live and not (self._earlier and self._progress().loads < 0) else {}
        return {**live, **{each.copy: each for each in self._earlier}}

    def _used(self, held: Mapping[ShardCopy, HeldShards | None], agreement: Agreement, rank: int) -> HeldShards:
        """Find what this rank has of the state that all agreed on."""
        place = agreement.generation, agreement.handed
        kept = held[next(each for each in held if (each.generation, each.handed) == place)]
        if kept is not None:
            return kept
        if rank in agreement.late:
            self._step_late()
        return HeldShards(replace(self._copy(), ready=False), _in_pieces(self._operator, self._parts))

    def _step_late(self) -> None:
        """Make the step for which this rank is ready. The hooks before it have run: they clipped
        the gradients, for example."""
        assert self._ready is not None
        optimizer, settings = self._ready
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)  # such as a learning rate that was scaled for this step
        with without_step_pre_hooks(optimizer):
            optimizer.step()

    def _divided(
        self,
        rank_info: RankInfo,
        outline: dict[str, Any],
        state: dict[str, Any],
        own: Tensors,
        agreement: Agreement,
    ) -> dict[str, Any]:
        """Divide the shards that ranks hold among all ranks. Return the state with this rank's new
        shards, which the models have now."""
        shards = self._parts.shards
        assert shards is not None
        index, new_count = self._place(rank_info)
        targets = {rank: rank % new_count for rank in range(rank_info.world_size)}
        moved = self._moved(outline, own, agreement.holders, agreement.count, targets, new_count)
        mesh = shards.mesh()
        state = _replaced(state, {path: _on_mesh(piece, mesh) for path, piece in moved.items()})
        self._live = (-1, index, new_count)  # if a rank fails now, the models may have parts of them
        shards.shard_again(mesh, state["models"], [each.get("state", {}) for each in state["optimizers"]])
        self._live, self._ready = (rank_info.generation, index, new_count), None
        return state

    def _begin_empty(self, rank_info: RankInfo) -> None:
        """Shard the models without values, because a state is loaded next."""
        shards = self._parts.shards
        assert shards is not None
        shards.shard_again(shards.mesh(), None, [{} for _ in self._parts.optimizers])
        self._given, self._earlier, self._ready = None, [], None
        self._live = (rank_info.generation, *self._place(rank_info))

    def _moved(
        self,
        outline: Any,
        own: Tensors,
        holders: Mapping[int, int],
        count: int,
        targets: Mapping[int, int],
        new_count: int,
    ) -> dict[Path, Piece]:
        """Collect this rank's new rows of each tensor in the outline, which the holders send: one
        tensor after the other. `own` are the rows that this rank holds."""
        moved, rank, device = {}, dist.get_rank(), self._operator.device
        for path, piece in _pieces(outline).items():
            sources, shards, to, parts = holders, count, targets, new_count
            if piece.dim is None:  # each rank has all of it
                sources, shards, to, parts = dict.fromkeys(holders, 0), 1, dict.fromkeys(targets, 0), 1
            first = rows(sources[rank], shards, _length(piece))[0] if rank in sources else 0
            plan = [
                each
                for each in transfers(sources, shards, to, parts, _length(piece))
                if rank in (each.source, each.target)
            ]
            new_rows = rows(to[rank], parts, _length(piece)) if rank in to else (0, 0)
            moved[path] = replace(piece, local=_exchanged(piece, own.get(path), first, new_rows, plan, rank, device))
        self._control.ensure_whole()
        return moved


def _length(piece: Piece) -> int:
    """How many rows the full tensor has; a tensor without dimensions has one."""
    return piece.shape[piece.dim or 0] if piece.shape else 1


def _exchanged(
    piece: Piece,
    own: torch.Tensor | None,
    first: int,
    new_rows: tuple[int, int],
    plan: Sequence[Transfer],
    rank: int,
    device: torch.device,
) -> torch.Tensor:
    """The new rows of one tensor. `own` are this rank's rows of it, from row `first` on."""
    dim, shape = piece.dim or 0, list(piece.shape) or [1]
    shape[dim] = new_rows[1] - new_rows[0]
    new = torch.empty(shape, dtype=piece.dtype, device=device)
    calls, arrived = [], []
    for each in plan:
        length = each.end - each.begin
        if each.source == rank:
            assert own is not None
            sent = own.reshape(own.shape or (1,)).narrow(dim, each.begin - first, length)
            if each.target == rank:
                new.narrow(dim, each.begin - new_rows[0], length).copy_(sent)
            else:
                calls.append(dist.P2POp(dist.isend, sent.contiguous().to(device), each.target))
        else:
            place = new.narrow(dim, each.begin - new_rows[0], length)
            buffer = torch.empty(place.shape, dtype=piece.dtype, device=device)
            calls.append(dist.P2POp(dist.irecv, buffer, each.source))
            arrived.append((place, buffer))
    for work in dist.batch_isend_irecv(calls) if calls else []:
        work.wait()
    for place, buffer in arrived:
        place.copy_(buffer)
    return new if piece.shape else new.reshape(())


# -- states as trees ----------------------------------------------------------------------------------


def _in_pieces(operator: TrainingOperator, parts: Parts) -> dict[str, Any]:
    """What is sharded of the state, with a `Piece` in place of each sharded tensor."""
    state = states.gather(operator, parts)
    return {name: mapped(_piece, state[name]) for name in DIVIDED if name in state}


def _piece(value: Any, *_: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not hasattr(value, "full_tensor"):
        return value
    sharded: Any = value.detach()
    dims = {each.dim if each.is_shard() else None for each in sharded.placements}
    if any(each.is_partial() for each in sharded.placements) or len(dims - {None}) > 1:
        raise ConfigError(
            f"a tensor of the optimizer is divided as {sharded.placements}, which cannot be divided among other workers: use an "
            "optimizer whose states are sharded like the parameters"
        )
    dim = next(iter(dims - {None}), None)
    return Piece(tuple(sharded.shape), dim, sharded.dtype, sharded.to_local())


def _pieces(tree: Any, path: Path = ()) -> dict[Path, Piece]:
    if isinstance(tree, Piece):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return {place: piece for key, each in items for place, piece in _pieces(each, (*path, key)).items()}


def _locals(tree: Any) -> dict[Path, torch.Tensor | None]:
    """This rank's rows of each sharded tensor in a tree."""
    return {path: piece.local for path, piece in _pieces(tree).items()}


def _replaced(tree: Any, values: Mapping[Path, Any]) -> Any:
    """A tree with these values in place of its pieces."""
    return mapped(lambda leaf, *path: values[path] if isinstance(leaf, Piece) else leaf, tree)


def _without_content(tree: Any) -> Any:
    return mapped(lambda leaf, *_: replace(leaf, local=None) if isinstance(leaf, Piece) else leaf, tree)


def _on_mesh(piece: Piece, mesh: Any) -> Any:
    """Make the tensor whose rows on this rank are those of the piece."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    last = Replicate() if piece.dim is None else Shard(piece.dim)
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), last]
    full = torch.empty(piece.shape, device="meta")
    assert piece.local is not None
    return DTensor.from_local(piece.local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _broadcast(value: Any, source: int, control: Control) -> Any:
    """Send one rank's value to all, with tensors on the CPU."""
    buffer = io.BytesIO()
    if dist.get_rank() == source:
        torch.save(value, buffer)
    sent = [buffer.getvalue()]
    dist.broadcast_object_list(sent, src=source)
    control.ensure_whole()
    return torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)
