"""Buffers that training changes, such as the running statistics of BatchNorm: a step changes them
once, and alike on all ranks. Worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.foreign import buffers_at, content_version, copy_all, unnoticed
from raysgd.torch.group.sharing import gathered_objects
from raysgd.torch.registered import Registered, broadcast, name_of

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SMALL = 1 << 14  # bytes of a buffer that costs nothing
ALIGNED = 16  # bytes: the largest element of a tensor
BufferAt = tuple[nn.Module, str]  # of a buffer, because a module may replace its buffers
Pair = tuple[list[torch.Tensor], list[torch.Tensor]]
Contents = list[tuple[BufferAt, torch.Tensor]]


class RestoreBuffers(Policy):
    """Restores the buffers of a step that is undone, because its batches will be trained again. If
    a rank has several parts, each begins with the buffers of the step's beginning, or, in a later
    batch of a window, with its own. Afterwards they follow the first part: on the first rank, this
    is the one that it has with all workers.

    Before an optimizer steps, all ranks get the buffers of the first rank; if none does, before the
    step is committed. So whichever rank fails, those that are left have equal ones. DDP would send
    them in its forward passes, between which the ranks differ.

    Of large buffers, these are the ones that training has changed in the first step, and those of
    BatchNorm, even if they were frozen then. If there are others, all ranks agree again in the
    first step of each loop, on those that it or the loop before has changed, too.
    """

    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._places: list[BufferAt] | None = None  # None before the first step
        self._seen: dict[BufferAt, Any] = {}  # the versions of buffers when the loop began
        # At the beginning of the step: the buffers, where they were, and their contents.
        self._now: list[torch.Tensor] = []
        self._at: list[BufferAt] = []
        self._before: list[torch.Tensor] = []
        self._copies: list[Pair] = []  # both, in pairs of lists that a device copies at once
        # While a rank has several parts: which one runs, and whether its samples count; the contents at the step's beginning,
        # and after each part.
        self._part = 0, True
        self._began: Contents = []
        self._after: dict[tuple[int, bool], Contents] = {}
        self._looping = False  # whether a loop over an epoch runs
        self._open = self._sent = False  # whether a step is open, and its buffers have been sent
        # What all ranks get in this generation, None before they have agreed on it: where it is, the buffers, the memory that
        # is sent, and pairs of lists of both.
        self._shared: list[BufferAt] | None = None
        self._others = False  # whether a rank has others
        self._buffers: list[torch.Tensor] = []
        self._content = torch.empty(0)
        self._pairs: list[Pair] = []

    @classmethod
    def for_run(cls, run: Any) -> RestoreBuffers | None:
        return run.buffers if run.settings.adds_parts else None

    def joined(self) -> None:
        """Let all ranks agree again in their next step, because a generation begins."""
        self._shared, self.in_usual_steps = None, True

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        """Send the buffers before NCCL's calls are waited for, so that there is one wait."""
        if self._shared != [] and (self._open or self._looping):
            self._send()

    on_other_step = on_whole_step

    def begin_loop(self, feed: Any) -> None:
        self._looping = True  # also of steps that user code makes without a batch of the iterator
        if self._others:
            self._shared, self.in_usual_steps = None, True
        if self._others or self._places is None:
            self._seen = {each: _version(each) for each in self._all()}

    def kept(self, step: Step) -> None:
        """Copy the buffers, to memory that is used again for each step."""
        places = [*self._all()] if self._places is None else self._places
        now = buffers_at(places)
        if len(now) == len(self._now) and all(map(is_, now, self._now)):
            for source, target in self._copies:
                copy_all(source, target)
        else:  # in the first steps, and if a module has replaced one
            self._now, self._before = now, [each.clone() for each in now]
            self._at = [each for each in places if _held(each) is not None]
            self._copies = _copied_together(now, self._before)

    def put_back(self, step: Step, value: None) -> None:
        _put(zip(self._at, self._before, strict=True))

    def begin_part(self, step: Step) -> None:
        self._open, self._sent = True, False
        part = step.current.part, step.current.fresh
        if step.place == 0:
            self._part, self._after = part, {}
            self._began = [] if step.current.last_part else self._contents()
        elif self._began and part != self._part:
            self._after[self._part] = self._contents()
            self._part = part
            _put(self._after.get(self._part, self._began))

    def before_commit(self, step: Step) -> None:
        if not self._sent:
            self._send()

    def end_step(self, step: Step) -> None:
        self._open = False
        if step.outcome == "undone":
            self._after = {}
            return
        if self._after:
            self._take_first()
        if self._places is None:
            self._places = list(dict.fromkeys([*self._found(), *(self._shared or ())]))
        self.in_usual_steps = bool(self._places)

    def reset(self) -> None:
        self._began, self._after, self._open, self._looping = [], {}, False, False
        if self._places is not None:
            self._places = self._with_changed(self._places)
        self._seen = {}

    # -- the same on all ranks ------------------------------------------------------------------------

    def _send(self) -> None:
        """Give all ranks the buffers of rank 0."""
        self._sent = True
        if self._after:
            self._take_first()
        if self._shared is None:
            shares = self._registered.shares_buffers and dist.is_initialized() and dist.get_world_size() > 1
            self._shared = self._agreed() if shares else []
        elif buffers := buffers_at(self._shared):
            self._send_together(buffers)

    def _agreed(self) -> list[BufferAt]:
        """Agree on the buffers that are sent in this generation: what some rank restores. All ranks
        have those of SyncBatchNorm. Send them for the first time."""
        every = self._all()
        mine = self._found() if self._places is None else self._with_changed(self._places)
        names = [every[each] for each in mine if each in every and not isinstance(each[0], nn.SyncBatchNorm)]
        answers = gathered_objects((names, len(mine) < len(every)), self._registered.control)
        self._others = any(others for _, others in answers)
        wanted = {name for names, _ in answers for name in names}
        wanted -= self._registered.own_buffers()
        shared = [place for place, name in every.items() if name in wanted]
        if self._places is not None:
            self._places = list(dict.fromkeys([*self._places, *shared]))
        if shared:
            pairs = ((every[place], _held(place)) for place in shared)
            buffers = {name: each for name, each in pairs if each is not None}
            with unnoticed(buffers.values()):
                broadcast(buffers, self._registered.control)
        return shared

    def _send_together(self, buffers: list[torch.Tensor]) -> None:
        if len(buffers) != len(self._buffers) or not all(map(is_, buffers, self._buffers)):
            self._buffers = buffers
            self._content, parts = _memory_for(buffers)
            self._pairs = _copied_together(buffers, parts)
        first = dist.get_rank() == 0
        for some, sent in self._pairs if first else ():
            copy_all(some, sent)
        dist.broadcast(self._content, src=0)
        with unnoticed(buffers):  # a later backward pass of this step may refer to them, as BatchNorm's does
            for some, sent in () if first else self._pairs:
                copy_all(sent, some)

    def _contents(self) -> Contents:
        places = self._all() if self._places is None else self._places
        buffers = {each: now for each in places if (now := _held(each)) is not None}
        copies = {each: torch.empty_like(now) for each, now in buffers.items()}
        _copy_together(buffers.values(), copies.values())
        return list(copies.items())

    def _take_first(self) -> None:
        _put(next(iter(self._after.values())))
        self._after = {}

    def _found(self) -> list[BufferAt]:
        """The buffers that are restored and sent: those that the first step has changed or created,
        those of BatchNorm, and small ones."""
        before = dict(zip(self._at, self._before, strict=True))
        moving = {
            each
            for each in self._all()
            if isinstance(each[0], BATCH_NORMS) or each not in before or not _equal(_held(each), before[each])
        }
        return [each for each in self._all() if each in moving or before[each].nbytes <= SMALL]

    def _with_changed(self, places: list[BufferAt]) -> list[BufferAt]:
        """Add the buffers that have changed since the loop began."""
        changed = (each for each, before in self._seen.items() if _version(each) != before)
        return list(dict.fromkeys([*places, *changed]))

    def _all(self) -> dict[BufferAt, str]:
        """The buffers, with names that are the same on all ranks."""
        names: dict[BufferAt, str] = {}
        for number, model in enumerate(self._registered.models):
            for path, module in model.named_modules():
                for name, _ in module.named_buffers(recurse=False):
                    names.setdefault((module, name), name_of(number, f"{path}.{name}" if path else name))
        return names


def _memory_for(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Make memory for the contents of these tensors together, and its parts, which are like
    them."""
    sizes = [-(-each.nbytes // ALIGNED) * ALIGNED for each in tensors]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    parts = zip(tensors, memory.split(sizes), strict=True)
    return memory, [part[: each.nbytes].view(each.dtype).view(each.shape) for each, part in parts]


def _copied_together(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> list[Pair]:
    """Divide these tensors into lists of one type each, which a GPU copies with one kernel. A CPU
    copies one after the other anyway."""
    pairs: dict[torch.dtype | None, Pair] = {}
    for one, other in zip(source, target, strict=True):
        pair = pairs.setdefault(None if one.is_cpu else one.dtype, ([], []))
        pair[0].append(one)
        pair[1].append(other)
    return list(pairs.values())


def _copy_together(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> None:
    for pair in _copied_together(source, target):
        copy_all(*pair)


@torch.no_grad()
def _put(contents: Iterable[tuple[BufferAt, torch.Tensor]]) -> None:
    """Restore the contents of buffers; of one that has been replaced by another kind, the
    buffer."""
    sources, targets = [], []
    for place, content in contents:
        now = _held(place)
        if now is not None and _alike(now, content):
            sources.append(content)
            targets.append(now)
        else:
            setattr(*place, content.clone())
    _copy_together(sources, targets)


def _held(place: BufferAt) -> torch.Tensor | None:
    return getattr(*place, None)


def _version(place: BufferAt) -> tuple[int, int]:
    """It differs after a buffer was written, or replaced."""
    now = _held(place)
    return id(now), 0 if now is None else content_version(now)


def _equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and _alike(one, other) and torch.equal(one, other)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
