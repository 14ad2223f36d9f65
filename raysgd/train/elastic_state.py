"""State that survives in the surviving processes: a function goes on in the middle of an epoch, not at a checkpoint."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from raysgd.errors import ConfigError
from raysgd.train.run_session import Session, current

__all__ = ["Committed", "ElasticState", "elastic"]

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


class Committed:
    """The last commit of one rank. It outlives the attempt: the replica holds it, and newcomers are given it."""

    def __init__(self) -> None:
        self.content: dict[str, Any] | None = None

    def forget(self) -> None:
        self.content = None


def elastic(state: Mapping[str, Any]) -> ElasticState:
    """Keeps these things over losses and growth, in the middle of an epoch too.

        state = train.elastic({"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0})
        while state["epoch"] < 10:
            for inputs, targets in loader:
                ...one step...
                state.commit()
            state["epoch"] += 1

    Things with `state_dict` and `load_state_dict` are saved through these; all else must be plain values. When the
    function runs again after a loss, this call puts everything back to the last commit of the most advanced rank.
    """
    session = current("elastic")
    if not isinstance(state, Mapping) or not state:
        raise ConfigError(f"train.elastic takes a dict of what to keep, such as {{'model': model}}, got {state!r}")
    return ElasticState(dict(state), session)


class ElasticState:
    """Owns the live things; the commit is the session's. Plain values are read and set as in a dict: state["epoch"]."""

    def __init__(self, parts: dict[str, Any], session: Session) -> None:
        self._session = session
        self._commit: Committed = session.kept
        self._parts = {name: _bare(part) for name, part in parts.items() if _stateful(part)}
        self._values = {name: part for name, part in parts.items() if not _stateful(part)}
        if self._commit.content is not None:
            self.restore()
        else:
            self._commit.content = self._copied()

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._values:
            have = ", ".join(sorted(self._values)) or "none"
            raise ConfigError(f"{name!r} is not one of the plain values given to train.elastic ({have})")
        self._values[name] = value

    def commit(self) -> None:
        """From here it goes on, whoever is lost. Every rank must call it at the same places; new workers join here."""
        self._commit.content = self._copied()
        self._session.passed()

    def restore(self) -> None:
        """Back to the last commit: what was done since then is undone."""
        content = self._commit.content
        assert content is not None
        if set(content) != {*self._parts, *self._values}:
            raise ConfigError(
                f"train.elastic was given {sorted(content)} before and {sorted([*self._parts, *self._values])} now: "
                "a function must keep the same things each time it runs"
            )
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(content[name]))
        for name in self._values:
            self._values[name] = copy.deepcopy(content[name])

    def sync(self) -> None:
        """Everybody takes rank 0's state, and commits it (torch or Horovod; after a loss the ranks are equal without
        it)."""
        if self._session.rank_info.world_size > 1:
            first = self._session.rank_info.world_rank == 0
            self._commit.content = pickle.loads(_from_rank_0(pickle.dumps(self._copied()) if first else None))
            self.restore()
        self.commit()

    def _copied(self) -> dict[str, Any]:
        saved = {name: part.state_dict() for name, part in self._parts.items()}
        whole: dict[str, Any] = copied({**saved, **self._values})
        return whole


def _from_rank_0(content: bytes | None) -> bytes:
    """Over whatever this function's ranks have met in."""
    hvd, dist = sys.modules.get("horovod.torch"), sys.modules.get("torch.distributed")
    box = [content]
    if hvd is not None and hvd.is_initialized():
        box = [hvd.broadcast_object(content, root_rank=0, name="raysgd.sync")]  # its own name would be the type's
    elif dist is not None and dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    else:
        raise ConfigError(
            "sync() of several workers needs torch's process group, or Horovod: use Trainer(backend='torch'), or "
            "backend='horovod' and hvd.init()"
        )
    assert box[0] is not None
    return box[0]


def _stateful(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _bare(part: Any) -> Any:
    """The model inside a wrapper, whose parameters have the same names in a world of one."""
    return part.module if type(part).__name__ in WRAPPERS else part


def copied(value: Any) -> Any:
    """Tensors cloned to the CPU, everything else deep-copied: what training changes from here on does not show."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each) for each in value)
    return copy.deepcopy(value)
