"""The dealer divides rows by position, and columns become batches. Without Ray."""

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
    """Replaces a Ray Dataset. Its blocks are lists of row numbers."""

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


def test_the_buffer_holds_blocks_that_may_be_requested() -> None:
    buffer = BlockBuffer([("a", 3), ("b", 0), ("c", 4), ("d", 2)])
    buffer.read_to(4, keep_from=0)
    assert (buffer.begin, buffer.end, buffer.complete) == (0, 7, False)
    assert buffer.slices(2, 5) == (("a", 2, 3), ("c", 0, 2))
    buffer.read_to(100, keep_from=4)
    assert (buffer.begin, buffer.end, buffer.complete) == (3, 9, True), "all of the first block is before row 4"
    assert buffer.slices(4, 9) == (("c", 1, 4), ("d", 0, 2))


@pytest.mark.parametrize("sizes", [(10,), (1,) * 10, (0, 7, 0, 3)])
@pytest.mark.parametrize(("world", "step"), [(1, 4), (3, 6), (4, 4)])
def test_every_row_is_used_once_in_order(sizes: tuple[int, ...], world: int, step: int) -> None:
    shared = dealer(*sizes)
    seen, start = [], 0
    while True:
        asked = [PartRequest((0, 1), start, step, rank, world, pad=False, floor=start) for rank in range(world)]
        dealt = [shared.take(ask) for ask in asked]
        if dealt[0] is None:
            assert dealt == [None] * world, "all ranks reach the end at the same step"
            break
        seen += [row for part in dealt for row in rows(part)]
        start = dealt[0].after
    assert seen == list(range(10)) and Blocks.passes == 1


def test_the_last_step_has_a_row_for_each_rank() -> None:
    last = [dealer(9).take(PartRequest((0, 1), 8, 4, rank, 2)) for rank in range(2)]
    assert [rows(each) for each in last] == [[8], [8]]
    assert [each.fresh for each in last if each] == [True, False]


def test_a_new_generation_continues_at_the_committed_row() -> None:
    """Two ranks had requested rows up to 12, and committed 4. Three ranks continue at row 4 in the same pass."""
    shared = dealer(5, 5, 5, 5)
    for start in (0, 4, 8):
        for rank in (0, 1):
            shared.take(PartRequest((0, 1), start, 4, rank, 2, turn=(1, 1), floor=max(start - 8, 0)))
    again = [shared.take(PartRequest((0, 1), 4, 6, rank, 3, turn=(1, 2), floor=4)) for rank in range(3)]
    assert [rows(each) for each in again] == [[4, 5], [6, 7], [8, 9]]
    assert Blocks.passes == 1


def test_late_requests_change_nothing() -> None:
    shared = dealer(4, 4)
    assert rows(shared.take(PartRequest((0, 1), 0, 4, turn=(2, 1)))) == [0, 1, 2, 3]
    assert shared.take(PartRequest((0, 0), 4, 4, turn=(1, 1))) is None, "a request of an older call"
    assert shared.take(PartRequest((0, 1), 8, 4, turn=(2, 1))) is None, "the end"
    assert rows(shared.take(PartRequest((0, 2), 0, 4, turn=(2, 1)))) == [0, 1, 2, 3]
    assert shared.take(PartRequest((0, 1), 8, 4, turn=(2, 1))) is None, "a slow rank requests the end of the last pass"
    assert shared.take(PartRequest((0, 1), 4, 4, turn=(2, 1))) is None, (
        "a request for a pass that was not read to its end"
    )
    assert Blocks.passes == 2


def test_blocks_that_are_no_longer_held_are_read_again(caplog: pytest.LogCaptureFixture) -> None:
    shared = dealer(4, 4, 4)
    shared.take(PartRequest((0, 1), 8, 4, turn=(1, 1), floor=8))
    assert "skips 8 rows, which have been used" in caplog.text
    assert rows(shared.take(PartRequest((0, 1), 3, 3, turn=(1, 2), floor=3))) == [3, 4, 5]
    assert Blocks.passes == 2


class Broken(Blocks):
    """Fails in its second block, in its first pass only."""

    def iter_internal_ref_bundles(self) -> Iterator[Any]:
        blocks = super().iter_internal_ref_bundles()
        yield next(blocks)
        if type(self).passes == 1:
            raise ZeroDivisionError("planned")
        yield from blocks


def test_every_rank_gets_an_error_and_the_next_call_tries_again() -> None:
    Broken.passes = 0
    shared = Dealer(pickle.dumps(Broken(4, 4)))
    assert rows(shared.take(PartRequest((0, 1), 0, 4, 0, 2, turn=(1, 1)))) == [0, 1]
    for rank in (0, 1, 0):
        with pytest.raises(ZeroDivisionError, match="planned"):
            shared.take(PartRequest((0, 1), 4, 4, rank, 2, turn=(1, 1)))
    assert rows(shared.take(PartRequest((0, 1), 4, 4, 1, 2, turn=(2, 2)))) == [6, 7]


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
    ("make", "message"),
    [
        (lambda: RayData([1, 2]), r"takes a Ray Dataset .*got \[1, 2\]"),
        (lambda: RayData(DATA, batch_size=0), "at least 1, got 0"),
        (lambda: RayData(DATA, features="a"), "pass both features and target"),
        (lambda: RayData(DATA, features=[3], target="a"), "names of columns"),
        (lambda: RayData(DATA, features=[], target="a"), "names of columns"),
        (lambda: RayData(DATA, features="z", target="a").arranged(COLUMNS), "no column z: its columns are a, b, c, s"),
        (lambda: RayData(DATA, features="s", target="a").arranged(COLUMNS), "'s' must hold numbers of equal shapes"),
        (lambda: RayData(DATA).arranged(COLUMNS), "'s' must hold numbers"),
        (lambda: RayData(DATA).sized({}, "*batch_size"), r"put '\*batch_size' into the trainer's config"),
    ],
)
def test_invalid_batches_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_batch_size_comes_from_the_data_or_from_the_config() -> None:
    assert RayData(DATA, batch_size=3).sized({"*batch_size": 8}, "*batch_size").batch_size == 3
    assert RayData(DATA).sized({"*batch_size": 8}, "*batch_size").batch_size == 8
    assert RayData.is_given_as(DATA) and RayData.is_given_as(RayData(DATA)) and not RayData.is_given_as([1])
