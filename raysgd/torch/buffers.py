"""Buffers that training changes, such as the running statistics of BatchNorm: a step changes them
once. Worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from raysgd.torch.foreign import copy_all
from raysgd.torch.parts import Parts
from raysgd.training.step import Policy, Step

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class KeepBuffers(Policy):
    """Restores the buffers of a step that is undone, because its batches will be trained again. If
    a batch comes in pieces, the buffers follow the first one: on the first rank, this is the part
    that it has with all workers.

    Which buffers training changes is seen in the first step; those of BatchNorm are among them even
    if they are frozen then.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._places: list[tuple[nn.Module, str]] | None = None  # None before the first step
        self._norms = False
        self._before: list[torch.Tensor] = []  # the contents at the beginning of the step
        self._first: list[torch.Tensor] | None = None  # those after the first piece, while others follow

    @property
    def are_moving(self) -> bool:
        """Return whether training changes buffers, or computes with all samples of a batch."""
        places = self._places if self._places is not None else self._found()
        return self._norms or bool(places)

    def begin(self, step: Step) -> None:
        if step.place == 0:
            if self._places is None:
                self._before = [each.clone() for each in self._read(self._all())]
            elif self._places:
                copy_all(self._read(self._places), self._before)
        elif self._places != []:
            if step.drawn[-2].whole:
                self._take_first()
            elif self._first is None:
                self._first = [each.clone() for each in self._read(self._kept())]

    def on_step(self, step: Step) -> None:
        if step.outcome == "undone":
            copy_all(self._before, self._read(self._kept()))
            self._first = None
            return
        self._take_first()
        if self._places is None:
            self._places = self._found()
            self._before = [each.clone() for each in self._read(self._places)]

    def rest(self) -> None:
        self._first = None

    def _take_first(self) -> None:
        if self._first is not None:
            copy_all(self._first, self._read(self._kept()))
            self._first = None

    def _kept(self) -> list[tuple[nn.Module, str]]:
        return self._all() if self._places is None else self._places

    def _found(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that the first step has changed, and those of BatchNorm."""
        every = self._all()
        self._norms = any(isinstance(each, BATCH_NORMS) for model in self._parts.models for each in model.modules())
        pairs = zip(every, self._read(every), self._before, strict=True)
        return [
            place for place, now, before in pairs if isinstance(place[0], BATCH_NORMS) or not torch.equal(now, before)
        ]

    def _all(self) -> list[tuple[nn.Module, str]]:
        modules = [each for model in self._parts.models for each in model.modules()]
        found = [(each, name) for each in modules for name, _ in each.named_buffers(recurse=False)]
        return list({(id(each), name): (each, name) for each, name in found}.values())

    @staticmethod
    def _read(places: Sequence[tuple[nn.Module, str]]) -> list[torch.Tensor]:
        # A module may replace its buffers.
        return [getattr(module, name) for module, name in places]
