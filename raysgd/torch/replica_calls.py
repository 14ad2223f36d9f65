"""What a replica answers beside training and validation: functions of the user's, models, and state to and from files.

The trainer's calls name these functions, and every rank runs them with its replica. Worker.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from raysgd.errors import CheckpointError
from raysgd.torch import manifest, shard_files, states
from raysgd.torch.checks import check_fits
from raysgd.torch.files import SeenFile, UnseenError
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.sharded import gathered
from raysgd.torch.snapshots import Snapshotter

__all__ = ["CalledReplica", "Refusal"]


class CalledReplica(Protocol):
    """What is asked of the replica."""

    operator: TrainingOperator

    @property
    def rank(self) -> int: ...

    @property
    def in_shards(self) -> bool: ...

    @property
    def snapshots(self) -> Snapshotter: ...

    def full_state(self, *, raw: bool = False) -> dict[str, Any]: ...

    def take_over(self, read: Callable[[], dict[str, Any]], loads: int) -> None: ...


def apply_operator(replica: CalledReplica, function: Callable[[Any], Any]) -> Any:
    return function(replica.operator)


def apply(replica: CalledReplica, function: Callable[[], Any]) -> Any:
    return function()


def update_scheduler(replica: CalledReplica, metric: Any) -> None:
    schedulers = replica.operator._parts.schedulers
    if not schedulers:
        raise TypeError("update_scheduler needs a scheduler: register one with self.register(schedulers=...)")
    for scheduler in schedulers:
        scheduler.step(metric)


def get_model(replica: CalledReplica) -> list[Any] | None:
    """Bare models on the CPU, as copies: the training models stay where they are. From rank 0."""
    first, parts = replica.rank == 0, replica.operator._parts
    if parts.shards is not None:
        saved = gathered([model.state_dict() for model in parts.models], keep=first)
        return parts.shards.whole_models(saved) if first else None
    return [copy.deepcopy(model).cpu() for model in parts.models] if first else None


def random_state(replica: CalledReplica) -> dict[str, Any]:
    return states.random_state()


def checkpoint(replica: CalledReplica, ranks: list[Any]) -> Any:
    """The whole checkpoint as bytes, on rank 0; `ranks` are the random states of all."""
    state = _complete(replica, ranks)
    return None if state is None else states.dump(state)


def save(replica: CalledReplica, sink: Any, ranks: list[Any], blocking: bool) -> None:
    """Rank 0 sends the checkpoint into `sink`: now, or a copy of it from a thread."""
    state = _complete(replica, ranks)
    if state is None or replica.rank != 0:
        return
    if blocking:
        sink.send(lambda file: states.write(state, file))
    else:
        replica.snapshots.send(sink, state, in_shards=replica.in_shards)


def _complete(replica: CalledReplica, ranks: list[Any]) -> dict[str, Any] | None:
    """A checkpoint's content, on rank 0. Of a model in shards every rank has a part, so all take part in it."""
    return {**replica.full_state(), "rng": ranks} if replica.rank == 0 or replica.in_shards else None


@dataclass(frozen=True)
class Refusal:
    """Why a checkpoint is not taken. It is an answer like others, so that the generation goes on; `unseen`: a rank does not
    see the file, and the driver has to send it."""

    why: str
    trace: str = ""
    unseen: bool = False


def _or_refusal(answer: Callable[[], None]) -> Refusal | None:
    try:
        answer()
        return None
    except UnseenError:
        return Refusal("a worker does not see the file", unseen=True)
    except CheckpointError as error:
        return Refusal(str(error), traceback.format_exc())


def check(replica: CalledReplica, data: Any, trusted: bool) -> Refusal | None:
    return _or_refusal(lambda: check_fits(replica.operator, states.parse(data.data, trusted=trusted)))


def restore(replica: CalledReplica, data: Any, trusted: bool, loads: int) -> Refusal | None:
    """`loads` counts the user's loads; each rank that takes this one has the same number after it."""
    return _or_refusal(lambda: replica.take_over(lambda: states.parse(data.data, trusted=trusted), loads))


def check_file(replica: CalledReplica, file: SeenFile, trusted: bool) -> Refusal | None:
    """Whether this rank can read the file itself, and whether it fits."""

    def look() -> None:
        state = states.outline(file, trusted=trusted) if file.here else None
        if state is None:
            raise UnseenError
        check_fits(replica.operator, state)

    return _or_refusal(look)


def restore_file(replica: CalledReplica, file: SeenFile, trusted: bool, loads: int) -> Refusal | None:
    return _or_refusal(lambda: replica.take_over(lambda: states.read(file, trusted=trusted), loads))


def save_shards(replica: CalledReplica, folder: str, ranks: list[Any]) -> dict[str, Any]:
    """Write this rank's part. Return the sizes and digests of the files that it wrote."""
    return shard_files.write(folder, {**replica.full_state(raw=True), "rng": ranks})


def verify_shards(replica: CalledReplica, folder: str, files: dict[str, Any]) -> Refusal | None:
    """Compare the files' digests; each rank looks at some of them."""
    mine = sorted(files)[replica.rank :: replica.operator.world_size]
    return _or_refusal(lambda: manifest.verify(folder, {name: files[name] for name in mine}))


def check_shards(replica: CalledReplica, folder: str) -> Refusal | None:
    def look() -> None:
        check_fits(replica.operator, states.shaped(shard_files.read_outline(folder)), metadata_only=True)

    return _or_refusal(look)


def restore_shards(replica: CalledReplica, folder: str, loads: int) -> Refusal | None:
    state = shard_files.read(folder, replica.operator)  # with the other ranks, so an error here must free them
    return _or_refusal(lambda: replica.take_over(lambda: state, loads))
