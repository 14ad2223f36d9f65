"""Run a loop of torch.distributed, written by hand, in processes of its own, and compare what it measures with raysgd's.

Such a loop takes model and data from the program (`examples/programs`), and nothing from raysgd but `seed_for`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from tests.forked_workers import fresh_processes

__all__ = [
    "Share",
    "Weight",
    "arguments",
    "assert_equal",
    "assert_equal_weights",
    "collated",
    "own",
    "place",
    "run",
    "total",
]

Loop = Callable[..., Any]


def run(loop: Loop, folder: Path, settings: Mapping[str, Any]) -> Any:
    """Call `loop(rank, **settings)` in as many processes as `settings` have workers. Return what it returns on rank 0."""
    method = fresh_processes().get_start_method()
    torch.multiprocessing.start_processes(_rank, (loop, folder, settings), settings["workers"], start_method=method)
    return torch.load(folder / "returned.pt", weights_only=False)


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as arguments of a program."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def _rank(rank: int, loop: Loop, folder: Path, settings: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=settings["workers"])
    try:
        returned = loop(rank, **settings)
        if rank == 0:
            torch.save(returned, folder / "returned.pt")
        # DDP is in a cycle. As the group's last owner, it would wait for threads of the group that can wait for the interpreter.
        gc.collect()
    finally:
        dist.destroy_process_group()


def own(order: torch.Tensor, size: int, rank: int, workers: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield this rank's samples of each batch of `size` samples, and how many the batch has. It is cut into one piece for
    each rank, and those of the first ranks can be longer by one."""
    for batch in order.split(size):
        yield batch.tensor_split(workers)[rank], len(batch)


def place(number: int, size: int, samples: int, rank: int, workers: int) -> int:
    """Return where this rank's samples of a batch begin in the epoch, for `raysgd.seed_for`."""
    first = number * size
    base, extra = divmod(min(size, samples - first), workers)
    return first + rank * base + min(rank, extra)


class Share:
    """A batch sampler: yields this rank's samples of each batch of `size` samples, in the order of the sampler."""

    def __init__(self, sampler: Iterable[int], size: int, rank: int, workers: int) -> None:
        self.sampler, self.how = sampler, (size, rank, workers)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.tensor(list(self.sampler))  # when the first batch is asked for, as a DataLoader draws it
        for mine, _ in own(order, *self.how):
            if len(mine):
                yield mine.tolist()


class Weight:
    """Multiplies a model's gradients on this rank, so that their mean over the ranks is the mean over the samples."""

    def __init__(self, model: nn.Module) -> None:
        self.value = 1.0
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * self.value)


def collated(data: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    return torch.utils.data.default_collate([data[int(row)] for row in rows])  # type: ignore[no-any-return]


def total(*numbers: float) -> list[float]:
    """Return the sum over the ranks of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums.tolist()


def assert_equal(history: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> None:
    """Compare each row of the loop with the history's row in its place."""
    rows = list(rows)
    assert len(history) == len(rows)
    for theirs, mine in zip(history, rows, strict=True):
        assert {name: theirs[name] for name in mine} == pytest.approx(mine, rel=2e-7, abs=0)


def assert_equal_weights(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Compare all parameters and buffers, to the last bit."""
    theirs = model.state_dict()
    assert list(theirs) == list(state)
    assert not [name for name in state if not torch.equal(theirs[name], state[name])]
