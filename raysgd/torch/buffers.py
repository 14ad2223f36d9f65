"""Buffers that training changes, such as the running statistics of BatchNorm: a step changes them
once. Worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import nn

from raysgd.torch.foreign import buffers_at, copy_all
from raysgd.torch.parts import Parts
from raysgd.training.step import Policy, Step

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Place = tuple[nn.Module, str]  # of a buffer, because a module may replace its buffers
Pair = tuple[list[torch.Tensor], list[torch.Tensor]]


class KeepBuffers(Policy):
    """Restores the buffers of a step that is undone, because its batches will be trained again. If
    a rank has several parts of a batch, each begins with the buffers of the batch's beginning, and
    afterwards they follow the first one: on the first rank, this is the part that it has with all
    workers.

    Which buffers training changes is seen in the first step; those of BatchNorm are among them even
    if they are frozen then.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places: list[Place] | None = None  # None before the first step
        # At the beginning of the step: the buffers, where they were, and their contents.
        self._now: list[torch.Tensor] = []
        self._at: list[Place] = []
        self._before: list[torch.Tensor] = []
        self._copies: list[Pair] = []  # both, in pairs of lists that a device copies at once
        # While a rank has several parts: the contents at its beginning, and after the first part.
        self._began: list[tuple[Place, torch.Tensor]] = []
        self._first: list[tuple[Place, torch.Tensor]] = []

    def begin(self, step: Step) -> None:
        if step.place == 0:
            self._keep(self._all() if self._places is None else self._places)
        elif step.parts_before == 0:
            self._take_first()
        else:
            self._first = self._first or self._contents()
            self._begin_again()
        if step.parts_before == 0 and not step.current.whole:
            self._began = self._contents()

    def on_step(self, step: Step) -> None:
        if step.outcome == "undone":
            self._first = []
            _put(zip(self._at, self._before, strict=True))
            return
        self._take_first()
        if self._places is None:
            self._places = self._found()
            self.in_usual_steps = bool(self._places)

    def rest(self) -> None:
        self._first, self._began = [], []

    def _begin_again(self) -> None:
        """Restore the buffers of the batch's beginning, for the next part. DDP sends those of rank
        0 in its forward pass, but not after one that has exchanged no gradients."""
        _put(self._began)
        for model in self._parts.wrapped if self._began else ():
            if hasattr(model, "require_forward_param_sync"):
                model.require_forward_param_sync = True  # type: ignore[assignment]

    def _contents(self) -> list[tuple[Place, torch.Tensor]]:
        places = self._all() if self._places is None else self._places
        return [(each, held.clone()) for each in places if (held := _held(each)) is not None]

    def _keep(self, places: Sequence[Place]) -> None:
        now = buffers_at(places)
        if len(now) == len(self._now) and all(map(is_, now, self._now)):
            for source, target in self._copies:
                copy_all(source, target)
        else:  # in the first steps, and if a module has replaced one
            self._now, self._before = now, [each.clone() for each in now]
            self._at = [each for each in places if _held(each) is not None]
            self._copies = _copied_together(now, self._before)

    def _take_first(self) -> None:
        _put(self._first)
        self._first = []

    def _found(self) -> list[Place]:
        """Return the buffers that the first step has changed or created, and those of BatchNorm."""
        before = dict(zip(self._at, self._before, strict=True))
        return [
            each
            for each in self._all()
            if isinstance(each[0], BATCH_NORMS) or each not in before or not _equal(_held(each), before[each])
        ]

    def _all(self) -> list[Place]:
        modules = [each for model in self._parts.models for each in model.modules()]
        return list(dict.fromkeys((each, name) for each in modules for name, _ in each.named_buffers(recurse=False)))


def _copied_together(source: Iterable[torch.Tensor], target: Iterable[torch.Tensor]) -> list[Pair]:
    """Return these tensors in lists of one type each, which a GPU copies with one kernel. A CPU
    copies one after the other anyway."""
    found: dict[torch.dtype | None, Pair] = {}
    for one, other in zip(source, target, strict=True):
        own = found.setdefault(None if one.is_cpu else one.dtype, ([], []))
        own[0].append(one)
        own[1].append(other)
    return list(found.values())


@torch.no_grad()
def _put(contents: Iterable[tuple[Place, torch.Tensor]]) -> None:
    """Restore the contents of buffers; of one that has been replaced by another kind, the
    buffer."""
    for place, content in contents:
        now = _held(place)
        if now is not None and _alike(now, content):
            now.copy_(content)
        else:
            setattr(*place, content.clone())


def _held(place: Place) -> torch.Tensor | None:
    return getattr(*place, None)


def _equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and _alike(one, other) and torch.equal(one, other)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
