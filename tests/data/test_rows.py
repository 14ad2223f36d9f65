"""Rows of blocks, dealt by position; and columns that become batches. No Ray here."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysgd.data import RayData
from raysgd.errors import ConfigError
from raysgd.ray_data.dealer import BlockBuffer, Dealer, PartRequest, RankRows


class Blocks:
    """Stands for a Ray Dataset: its blocks are lists of row numbers."""

    passes = 0

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def iter_internal_ref_bundles(self) -> Iterator[Any]:
        type(self).passes += 1
        row = 0
        for size in self.sizes:
            block = list(range(row, row + size))
            row += size
            yield SimpleNamespace(blocks=[(block, SimpleNamespace(num_rows=size))])


def dealer(*sizes: int) -> Dealer:
    Blocks.passes = 0
    return Dealer(pickle.dumps(Blocks(*sizes)))


def rows(dealt: RankRows | None) -> list[int]:
    return [] if dealt is None else [row for block, start, stop in dealt.slices for row in block[start:stop]]


def test_a_window_holds_what_may_be_asked_for() -> None:
    buffer = BlockBuffer([("a", 3), ("b", 0), ("c", 4), ("d", 2)])
    buffer.read_to(4, keep_from=0)
    assert (buffer.begin, buffer.end, buffer.complete) == (0, 7, False)
    assert buffer.slices(2, 5) == (("a", 2, 3), ("c", 0, 2))
    buffer.read_to(100, keep_from=4)
    assert (buffer.begin, buffer.end, buffer.complete) == (3, 9, True), "all of the first block is before row 4"
    assert buffer.slices(4, 9) == (("c", 1, 4), ("d", 0, 2))


@pytest.mark.parametrize("sizes", [(10,), (3, 3, 4), (1,) * 10, (0, 7, 0, 3)])
@pytest.mark.parametrize(("world", "step"), [(1, 4), (2, 4), (3, 6), (4, 4)])
def test_every_row_once_in_order(sizes: tuple[int, ...], world: int, step: int) -> None:
    hand = dealer(*sizes)
    seen, start = [], 0
    while True:
        asked = [PartRequest((0, 1), start, step, rank, world, pad=False, floor=start) for rank in range(world)]
        dealt = [hand.take(ask) for ask in asked]
        if dealt[0] is None:
            assert dealt == [None] * world, "the end comes for all ranks at the same step"
            break
        seen += [row for part in dealt for row in rows(part)]
        start = dealt[0].after
    assert seen == list(range(10)) and Blocks.passes == 1


def test_the_last_step_has_a_row_for_everybody() -> None:
    last = [dealer(9).take(PartRequest((0, 1), 8, 4, rank, 2)) for rank in range(2)]
    assert [rows(each) for each in last] == [[8], [8]]
    assert [each.fresh for each in last if each] == [True, False]


def test_a_new_world_goes_on_where_the_old_one_committed() -> None:
    """Two ranks had asked ahead to row 12 and committed 4: three go on from there, in the very same pass."""
    hand = dealer(5, 5, 5, 5)
    for start in (0, 4, 8):
        for rank in (0, 1):
            hand.take(PartRequest((0, 1), start, 4, rank, 2, turn=(1, 1), floor=max(start - 8, 0)))
    again = [hand.take(PartRequest((0, 1), 4, 6, rank, 3, turn=(1, 2), floor=4)) for rank in range(3)]
    assert [rows(each) for each in again] == [[4, 5], [6, 7], [8, 9]]
    assert Blocks.passes == 1


def test_late_questions_change_nothing() -> None:
    hand = dealer(4, 4)
    assert rows(hand.take(PartRequest((0, 1), 0, 4, turn=(2, 1)))) == [0, 1, 2, 3]
    assert hand.take(PartRequest((0, 0), 4, 4, turn=(1, 1))) is None, "of an older call"
    assert hand.take(PartRequest((0, 1), 8, 4, turn=(2, 1))) is None, "the end"
    assert rows(hand.take(PartRequest((0, 2), 0, 4, turn=(2, 1)))) == [0, 1, 2, 3]
    assert hand.take(PartRequest((0, 1), 8, 4, turn=(2, 1))) is None, (
        "the end of the last pass, by a rank that was slow"
    )
    assert hand.take(PartRequest((0, 1), 4, 4, turn=(2, 1))) is None, "of a pass that was left before its end"
    assert Blocks.passes == 2


def test_what_is_not_held_any_more_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    hand = dealer(4, 4, 4)
    hand.take(PartRequest((0, 1), 8, 4, turn=(1, 1), floor=8))
    assert "skipping its first 8 row(s), which have been used" in caplog.text
    assert rows(hand.take(PartRequest((0, 1), 3, 3, turn=(1, 2), floor=3))) == [3, 4, 5]
    assert Blocks.passes == 2


class Broken(Blocks):
    """Fails in its second block, in its first pass only."""

    def iter_internal_ref_bundles(self) -> Iterator[Any]:
        blocks = super().iter_internal_ref_bundles()
        yield next(blocks)
        if type(self).passes == 1:
            raise ZeroDivisionError("planned")
        yield from blocks


def test_every_rank_hears_of_an_error_and_the_next_call_tries_again() -> None:
    Broken.passes = 0
    hand = Dealer(pickle.dumps(Broken(4, 4)))
    assert rows(hand.take(PartRequest((0, 1), 0, 4, 0, 2, turn=(1, 1)))) == [0, 1]
    for rank in (0, 1, 0):
        with pytest.raises(ZeroDivisionError, match="planned"):
            hand.take(PartRequest((0, 1), 4, 4, rank, 2, turn=(1, 1)))
    assert rows(hand.take(PartRequest((0, 1), 4, 4, 1, 2, turn=(2, 2)))) == [6, 7]


class Splittable:
    def streaming_split(self) -> None: ...


DATA = Splittable()
COLUMNS = {"a": np.array([1.0, 2.0]), "b": np.array([3, 4]), "c": np.zeros((2, 3)), "s": np.array(["x", "y"])}
LISTS = np.empty(2, dtype=object)
LISTS[:] = [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("features", "target", "shapes"),
    [
        ("a", "b", [(2,), (2,)]),
        (["a", "b"], "b", [(2, 2), (2,)]),
        (["a", "c"], ["b"], [(2, 4), (2, 1)]),
        ("l", "b", [(2, 2), (2,)]),
        ([["a", "b"], "c"], "b", [(2, 2), (2, 3), (2,)]),
    ],
)
def test_columns_become_features_and_target(features: Any, target: Any, shapes: list[tuple[int, ...]]) -> None:
    batch = RayData(DATA, features=features, target=target).arranged({**COLUMNS, "l": LISTS})
    assert [part.shape for part in batch] == shapes


def test_without_names_a_batch_is_a_dict() -> None:
    plain = {name: column for name, column in COLUMNS.items() if name != "s"}
    assert list(RayData(DATA).arranged(plain)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RayData([1, 2]), r"takes a Ray Dataset .*got \[1, 2\]"),
        (lambda: RayData(DATA, batch_size=0), "1 or more, got 0"),
        (lambda: RayData(DATA, features="a"), "features and target go together"),
        (lambda: RayData(DATA, features=[3], target="a"), "names of columns"),
        (lambda: RayData(DATA, features=[], target="a"), "names of columns"),
        (lambda: RayData(DATA, features="z", target="a").arranged(COLUMNS), "no column z; it has a, b, c, s"),
        (lambda: RayData(DATA, features="s", target="a").arranged(COLUMNS), "'s' holds no numbers of one shape"),
        (lambda: RayData(DATA).arranged(COLUMNS), "'s' holds no numbers"),
        (lambda: RayData(DATA).sized({}, "*batch_size"), r"put '\*batch_size' into the trainer's config"),
    ],
)
def test_what_cannot_be_a_batch(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_batch_size_is_its_own_or_the_configs() -> None:
    assert RayData(DATA, batch_size=3).sized({"*batch_size": 8}, "*batch_size").batch_size == 3
    assert RayData(DATA).sized({"*batch_size": 8}, "*batch_size").batch_size == 8
    assert RayData.is_given_as(DATA) and RayData.is_given_as(RayData(DATA)) and not RayData.is_given_as([1])
