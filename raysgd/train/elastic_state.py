"""`train.elastic`: state with which a function resumes within an epoch. Worker."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysgd.core.tree import leaves, mapped
from raysgd.errors import ConfigError
from raysgd.train.sessions import OutsideSession, Session, current

logger = logging.getLogger("raysgd")

NOT_READ = (
    "the training function runs again with the state of its last commit, and commits without having read %s: if it counts in variables of "
    "its own, it repeats what was done before. Begin with these values, for example with `while state['epoch'] < 10`"
)


@dataclass
class ByReference:
    """Content that a commit does not copy, because nothing changes it until the next one."""

    content: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> ByReference:
        return self


class Kept(NamedTuple):
    """What a rank continues from. It is replaced as a whole, because a signal can come between two
    assignments: ranks with the same `number`, of commits and checkpoints, have the same `content`,
    which is None at first. `reports`: how many rounds of them the run had before it."""

    content: dict[str, Any] | None = None
    reports: int = 0
    number: int = 0
    passes: Mapping[str, int] = {}


@dataclass
class Commit:
    """The last commit of one rank, which its replica owns. Replacement workers receive it."""

    kept: Kept = field(default_factory=Kept)

    def count(self) -> None:
        """Count a checkpoint, after which a function can continue with other workers, too."""
        self.kept = self.kept._replace(number=self.kept.number + 1)

    def settle(self) -> None:
        """Copy what is kept by reference. Called when the function has ended."""
        for leaf in leaves(self.kept.content):
            if isinstance(leaf, ByReference):
                leaf.content = copied(leaf.content)


def elastic(state: Mapping[str, Any]) -> ElasticState:
    """Keep this `state` when workers fail or join, also within an epoch.

        state = train.elastic({"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0})
        while state["epoch"] < 10:
            for inputs, targets in loader:
                ...one step...
                state.commit()
            state["epoch"] += 1

    Objects with `state_dict` and `load_state_dict` are saved with these methods; everything else
    must be a plain value. When the function runs again after a worker failure, this call restores
    the last commit of the most advanced rank.
    """
    session = current("elastic")
    if isinstance(session, OutsideSession):
        session.commit = Commit()
    if not isinstance(state, Mapping) or not state:
        raise ConfigError(f"train.elastic takes a dict of the state to keep, such as {{'model': model}}, got {state!r}")
    return ElasticState(dict(state), session)


class ElasticState:
    """Owns the live objects and values. Plain values are read and set as in a dict."""

    def __init__(self, parts: dict[str, Any], session: Session) -> None:
        self._session = session
        self._commit: Commit = session.commit
        if session.is_elastic:
            raise ConfigError(
                "this function has called train.elastic() twice, or has trained with two prepared Trainers of transformers or Lightning. A "
                "function has one commit. Pass all that continues to one call, or run each Trainer in a function of its own"
            )
        session.is_elastic = True
        self._parts = {name: _unwrap(part) for name, part in parts.items() if _has_state_dict(part)}
        self._values = {name: part for name, part in parts.items() if not _has_state_dict(part)}
        for name, value in self._values.items():
            for leaf in leaves(value):
                _refuse_value(leaf, name)
        self._unread: list[str] = []  # counters that were restored, until one is read
        if self._commit.kept.content is not None:
            self.restore()
            self._unread = [f"state[{name!r}]" for name, value in self._values.items() if type(value) is int]
            session.repeat_since(self._commit.kept.reports)
        else:
            self._keep(self._copy_state(), new=0)
        self._watch: Any = None
        if "torch" in sys.modules and not isinstance(session, OutsideSession):
            from raysgd.train.loaders import Watch

            self._watch = Watch(session, self._parts)

    def __getitem__(self, name: str) -> Any:
        self._unread = []
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._values:
            known = ", ".join(sorted(self._values)) or "none"
            raise ConfigError(f"{name!r} is not one of the plain values given to train.elastic ({known})")
        self._values[name] = value

    def commit(self) -> None:
        """Commit the current state: training resumes from here after a failure, and new workers
        join here. Every rank must call it at the same places."""
        if self._unread and self._session.rank_info.world_rank == 0:
            logger.warning(NOT_READ, " or ".join(self._unread))
        self._unread = []
        if self._watch is not None:
            self._watch.check()
        self._keep(self._copy_state())
        self._session.at_boundary()

    def commit_step(self) -> None:
        """Commit in `optimizer.step()`, before which the gradients were known to be whole."""
        self._keep(self._copy_state(), known_whole=True)
        self._session.at_boundary()

    def keep_again(self) -> None:
        """Keep the last commit with the objects that have its content now. What the function has
        reported after it is still repeated."""
        self._commit.kept = self._commit.kept._replace(content=self._copy_state())

    def _keep(self, content: Any, reports: int | None = None, *, new: int = 1, known_whole: bool = False) -> None:
        if not known_whole:
            self._session.ensure_whole()
        reports = self._session.note_commit() if reports is None else reports
        self._commit.kept = Kept(content, reports, self._commit.kept.number + new, {**self._session.passes})

    def restore(self) -> None:
        """Restore the last commit, and discard what was done since then."""
        content = self._commit.kept.content
        assert content is not None
        if set(content) != {*self._parts, *self._values}:
            raise ConfigError(
                f"train.elastic was given {sorted(content)} before and {sorted([*self._parts, *self._values])} now: "
                "pass the same names each time the function runs"
            )
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(content[name]))
        for name in self._values:
            self._values[name] = copy.deepcopy(content[name])

    def sync(self) -> None:
        """Give rank 0's state to all ranks, with torch or Horovod, and commit it. After a failure
        this is not necessary, because the ranks have the same state then. If nothing has changed
        since the last commit, the function still repeats its reports since then."""
        several, before = self._session.rank_info.world_size > 1, self._commit.kept
        content = self._copy_state()
        unchanged = _are_equal(content, before.content)
        if several:
            first = self._session.rank_info.world_rank == 0
            content, unchanged = pickle.loads(_broadcast_from_rank_0(_pack((content, unchanged)) if first else None))
        self._keep(content, before.reports if unchanged else None)
        if several:
            self.restore()
        self._session.at_boundary()

    def _copy_state(self) -> dict[str, Any]:
        saved = {name: part.state_dict() for name, part in self._parts.items()}
        return {name: copied(value) for name, value in {**saved, **self._values}.items()}


def _pack(content: Any) -> bytes:
    """Pickle a state; with plain containers, if those of the script's own classes cannot be."""
    try:
        return pickle.dumps(content)
    except Exception:
        return pickle.dumps(mapped(lambda leaf, *path: leaf, content))


def _broadcast_from_rank_0(content: bytes | None) -> bytes:
    """Broadcast with Horovod or torch.distributed, whichever the function has initialized."""
    hvd, dist = sys.modules.get("horovod.torch"), sys.modules.get("torch.distributed")
    box = [content]
    if hvd is not None and hvd.is_initialized():
        # The name must be the same on all ranks. The default contains the type, and only rank 0 has bytes.
        box = [hvd.broadcast_object(content, root_rank=0, name="raysgd.sync")]
    elif dist is not None and dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    else:
        raise ConfigError(
            "sync() of several workers needs torch's process group or Horovod: use Trainer(backend='torch'), or "
            "backend='horovod' and hvd.init()"
        )
    assert box[0] is not None
    return box[0]


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two copies of a state are equal. If that cannot be known, they are not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    try:
        equal: Any = getattr(one, "shape", ()) == getattr(other, "shape", ()) and one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except Exception:
        return False


def _refuse_value(part: Any, name: str) -> None:
    if _has_state_dict(part):
        raise ConfigError(
            f"train.elastic got a {type(part).__name__} inside of {name!r}. It would restore a copy there, and not the object that "
            "the function uses. Pass each object under a name of its own"
        )
    if hasattr(part, "dataset") and hasattr(part, "__iter__"):
        raise ConfigError(
            f"train.elastic got a {type(part).__name__}, which has no position to commit. After a failure, its epoch would begin again. "
            "Pass the loader that train.torch.elastic_data_loader(loader) returns"
        )


def _has_state_dict(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _unwrap(part: Any) -> Any:
    """Return the model inside of wrappers: its parameter names do not depend on the world size."""
    if "torch" not in sys.modules:
        return part
    from raysgd.torch.group.wrapping import unwrapped

    return unwrapped(part)


def copied(value: Any) -> Any:
    """Make a copy that training does not change: tensors on the CPU, deep copies of others. The
    classes of containers stay, such as that of a Counter, unless they cannot be copied."""
    tensors: dict[int, Any] = {}
    for leaf in leaves(value):
        if hasattr(leaf, "detach") and hasattr(leaf, "cpu") and id(leaf) not in tensors:
            tensors[id(leaf)] = leaf.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value, {**tensors})
    except Exception:
        return mapped(lambda leaf, *path: tensors[id(leaf)] if id(leaf) in tensors else copy.deepcopy(leaf), value)
