"""A state that one rank gives to others, by broadcasts. Threads are the ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from raysgd.core.control import Control
from raysgd.torch.group import sharing

PIECE = 64


class Ranks:
    """Broadcasts between threads, and how many bytes each call had."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch) -> None:
        self.own, self.barrier = threading.local(), threading.Barrier(count, timeout=60)
        self._sent: Any = None
        self.sizes: list[int] = []
        self._count = count
        patch.setattr(sharing.dist, "get_rank", lambda: self.own.rank)
        patch.setattr(sharing.dist, "broadcast", self.broadcast)
        patch.setattr(sharing, "PIECE", PIECE)

    def broadcast(self, tensor: torch.Tensor, giver: int) -> None:
        if self.own.rank == giver:
            self._sent = tensor.clone()
            self.sizes.append(tensor.nbytes)
        self.barrier.wait()
        tensor.copy_(self._sent)
        self.barrier.wait()

    def share(self, state: Any, giver: int, takes: tuple[int, ...], device: str = "cpu") -> tuple[list[Any], list[int]]:
        """Return what each rank gets, and how often each has said that something has moved."""
        moved = [0] * self._count

        def run(rank: int) -> Any:
            self.own.rank = rank
            own = state if rank == giver else None
            options: dict[str, Any] = {"device": torch.device(device), "takes": rank in takes}

            def note() -> None:
                moved[rank] += 1

            control = Control()
            control.moved = note
            return sharing.share_state(own, giver, control=control, **options)

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(run, range(self._count))), moved


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tied = torch.randn(3, 40)
    small = [torch.randn(2) for _ in range(20)]
    others = [torch.empty(0, 3), torch.tensor(True), torch.randn(5, 7).t(), torch.randn(3).bfloat16()]
    return {"tied": [tied, tied], "small": small, "others": others, "text": "x" * 200, "number": 3}


def test_the_bits_of_the_giver_arrive_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, given = Ranks(4, monkeypatch), state()
    found, moved = ranks.share(given, 1, takes=(0, 3))
    assert found[1] is found[2] is None
    for taken in (found[0], found[3]):
        assert {name: taken[name] for name in ("text", "number")} == {"text": "x" * 200, "number": 3}
        for name in ("small", "others"):
            assert all(torch.equal(one, other) for one, other in zip(taken[name], given[name], strict=True))
            assert [each.dtype for each in taken[name]] == [each.dtype for each in given[name]]
        assert torch.equal(taken["tied"][0], given["tied"][0])
        assert taken["tied"][0].data_ptr() == taken["tied"][1].data_ptr()
    taken["small"][0].zero_()
    assert given["small"][0].any() and found[0]["small"][0].any(), "each has memory of its own"
    assert max(ranks.sizes) == PIECE and len(set(moved)) == 1 and moved[0] == len(ranks.sizes) - 1


def test_small_tensors_travel_together_and_large_ones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, monkeypatch)
    ranks.share([*(torch.zeros(1) for _ in range(16)), torch.zeros(48)], 0, takes=(1,))
    assert ranks.sizes[-4:] == [64, 64, 64, 64]


def test_a_rank_that_fails_leaves_the_state_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded of a part: the error comes before anything is returned."""
    ranks, calls = Ranks(2, monkeypatch), []
    own = ranks.broadcast

    def broken(tensor: torch.Tensor, giver: int) -> None:
        calls.append(giver)
        if len(calls) > 8:
            ranks.barrier.abort()
            raise RuntimeError("the connection ended")
        own(tensor, giver)

    monkeypatch.setattr(sharing.dist, "broadcast", broken)
    given = state()
    with pytest.raises((RuntimeError, threading.BrokenBarrierError)):
        ranks.share(given, 0, takes=(1,))
    assert torch.equal(given["tied"][0], state()["tied"][0])


def shared_models(ranks: Ranks, given: dict[str, Any], own: list[Any]) -> Any:
    """Return what the second rank takes, in the memory of its `own` models where that is possible."""

    def run(rank: int) -> Any:
        ranks.own.rank = rank
        options: dict[str, Any] = {"device": torch.device("cpu"), "control": Control(), "takes": rank == 1}
        return sharing.share_state(given if rank == 0 else None, 0, models=own if rank == 1 else None, **options)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))[1]


def test_a_new_rank_takes_weights_in_the_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"models": [{"a": torch.arange(50.0), "b": torch.ones(3)}], "optimizers": [torch.full((50,), 2.0)]}
    own = [{"a": torch.zeros(50), "b": torch.zeros(3)}]
    found = shared_models(Ranks(2, monkeypatch), given, own)
    for name, value in given["models"][0].items():
        assert torch.equal(own[0][name], value)
        assert found["models"][0][name].data_ptr() == own[0][name].data_ptr()
    assert torch.equal(found["optimizers"][0], given["optimizers"][0])


@pytest.mark.parametrize(
    "own",
    [
        {"b": torch.zeros(50), "a": torch.zeros(50)},  # in another order
        {"a": torch.zeros(50, dtype=torch.int32), "b": torch.zeros(50)},
        {"a": torch.zeros(40), "b": torch.zeros(50)},
        {"a": torch.zeros(10, 5).t(), "b": torch.zeros(50)},
        {},
    ],
)
def test_models_that_are_not_alike_get_no_wrong_weights(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"models": [{"a": torch.arange(50.0), "b": torch.arange(50.0) * 2}]}
    (found,) = shared_models(Ranks(2, monkeypatch), given, [own])["models"]
    held = {each.data_ptr() for each in own.values()}
    for name, value in given["models"][0].items():
        assert torch.equal(found[name], value) and found[name].data_ptr() not in held
