"""The batches of one rank of a Trainer, in an order that is rank 0's. Worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from raysgd.replica.seeding import Places, seed_generators
from raysgd.torch.data.sampling import Units, agree, set_epoch
from raysgd.train.huggingface.attributes import Attributes
from raysgd.train.huggingface.windows import Windows
from raysgd.train.in_place.generators import generator_states, set_generators


class PartSampler(Sampler[list[int]]):
    """The batches of one rank: its parts of each step of an epoch. Owns the epoch's order, which is
    rank 0's, and what its sampler had then in its attributes, such as a generator."""

    def __init__(
        self,
        windows: Windows,
        sampler: Any,
        step: Any,
        live: Any = None,
        places: Places | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.windows, self._sampler, self._step, self._live = windows, sampler, step, live or {}
        self._places, self._elsewhere = places, elsewhere  # whether other processes read
        self._attributes = Attributes({"sampler": sampler}, self._live)
        # An epoch, its order, and what drawing it has changed in the sampler.
        self.drawn: tuple[int, Any, Any] | None = None
        self.before_step: Any = None  # the random states before the samples of the step were read
        self._again: Any = None

    def __len__(self) -> int:
        return len(self.windows)

    def continue_with(self, drawn: tuple[int, Any, Any], before_step: Any) -> None:
        self.drawn, self._again = drawn, before_step
        self._attributes.put_back(drawn[2])

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = divmod(self._step(), self.windows.steps)
        set_epoch(self._live.get("data set"), epoch)
        return self._parts_of(epoch, done)

    def _parts_of(self, epoch: int, done: int) -> Iterator[Any]:
        """Yield nothing in the batches of steps that are done: transformers drops them unread. The
        order is drawn with the first batch, as a loader's iterator has drawn a number before
        that."""
        if self.drawn is None or self.drawn[0] != epoch:
            self.drawn = epoch, self._draw(epoch), self._attributes.changed()
        order = self.drawn[1]
        for step in range(self.windows.steps):
            if step >= done:
                self._begin_step()
            for part in self.windows.of_rank(step):
                yield [] if step < done else self._to_read(epoch, part.start, order[part.start : part.stop].tolist())

    def _begin_step(self) -> None:
        if self._again is not None:
            set_generators(self._again)
        self._again, self.before_step = None, generator_states()

    def _draw(self, epoch: int) -> Any:
        """Draw an order. With a seed, the process's generators are seeded for it, and then as they
        were."""
        set_epoch(self._sampler, epoch)
        states = generator_states()
        if self._places is not None:
            self._places.enter(epoch=epoch + 1)
        order: Any = torch.tensor(list(self._sampler))
        if self._places is not None:
            set_generators(states)
        if self.windows.ranks > 1:
            order, _ = agree(order, None, first=self.windows.rank == 0)
        return order

    def _to_read(self, epoch: int, start: int, rows: list[int]) -> Any:
        """Seed the generators of the process that reads these rows next."""
        if self._places is None:
            return rows
        number = self._places.number(epoch=epoch + 1, offset=start, reading=True)
        if self._elsewhere:
            return Units(number, rows)
        seed_generators(number)
        return rows
