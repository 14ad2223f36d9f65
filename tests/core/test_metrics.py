"""Merging the results of ranks and parts: any split of the same work gives the same values."""

import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.measures.average_meters import AverageMeterCollection
from raysgd.core.measures.metrics import Measured, for_all_ranks, merge_call, merge_results, plain

NAN = float("nan")


def row(samples: int, batches: int = 1, **metrics: Any) -> dict[str, Any]:
    return {"batch_count": batches, "num_samples": samples, **metrics}


@pytest.mark.parametrize(
    ("rows", "key", "expected"),
    [
        ([row(10, loss=1.0), row(30, loss=2.0)], "loss", 1.75),
        ([row(10), row(30, loss=2.0)], "loss", 2.0),
        ([row(3), row(4)], "num_samples", 7),
        ([row(3, batches=5), row(4, batches=4)], "batch_count", 5),
        ([{"epoch": 2}, {"epoch": 2}], "epoch", 2),
        ([row(1, right=True), row(3, right=False)], "right", 0.25),
        ([row(1, more={"x": 1}), row(1, more={"x": 2})], "more", {"x": 1}),
        ([row(1, mixed=1.0), row(1, mixed="two")], "mixed", 1.0),
        ([row(1, wave=1j), row(1, wave=2j)], "wave", 1j),
        ([{"loss": 1.0}, {"loss": 3.0}], "loss", 2.0),
        ([row(0, loss=1.0), row(0, loss=3.0)], "loss", 2.0),
        ([row(0, loss=NAN), row(5, loss=3.0)], "loss", 3.0),
    ],
)
def test_of_ranks(rows: list[dict[str, Any]], key: str, expected: Any) -> None:
    assert merge_results(rows, of="ranks")[key] == expected


def test_one_nan_makes_the_mean_nan() -> None:
    for position in range(3):
        rows = [row(4, loss=1.0) for _ in range(3)]
        rows[position] = row(4, loss=NAN)
        assert math.isnan(merge_results(rows, of="ranks")["loss"])
        assert math.isnan(merge_results(rows, of="parts")["loss"])


@pytest.mark.parametrize("of", ["ranks", "parts"])
def test_without_results_the_merged_result_is_empty(of: Any) -> None:
    assert merge_results([], of=of) == merge_results([{}, {}], of=of) == {}


def test_counts_come_first_and_the_rest_keeps_its_order() -> None:
    merged = merge_results([{"b": 1.0, "num_samples": 2, "a": 1.0, "batch_count": 1, "epoch": 3}], of="ranks")
    assert list(merged) == ["epoch", "batch_count", "num_samples", "b", "a"]


@pytest.mark.parametrize(
    ("parts", "key", "expected"),
    [
        ([row(10, loss=1.0), row(30, loss=2.0)], "loss", 1.75),
        ([row(10, batches=2), row(30, batches=3)], "batch_count", 5),
        ([row(10, last_loss=1.0), row(30, last_loss=2.0)], "last_loss", 2.0),
        ([row(10, name="a"), row(30, name="b")], "name", "b"),
        ([row(10, epoch=1, loss=1.0), {"epoch": 1}], "loss", 1.0),
        ([{"own": 1.0}, {"own": 3.0}], "own", 2.0),
    ],
)
def test_of_parts(parts: list[dict[str, Any]], key: str, expected: Any) -> None:
    assert merge_results(parts, of="parts")[key] == expected


def test_merging_does_not_change_its_arguments() -> None:
    rows = [row(1, loss=1.0, more={"x": 1}), row(2, loss=2.0)]
    before = [dict(each) for each in rows]
    merge_results([merge_results(rows, of="ranks")], of="parts")
    assert rows == before


BATCHES = st.lists(
    st.tuples(st.integers(1, 64), st.floats(-1e3, 1e3), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_any_split_over_parts_and_ranks_gives_the_same_values(batches: list[tuple[int, float, int, int]]) -> None:
    """Each batch (samples, loss) belongs to some part and some rank."""
    meters: dict[int, dict[int, AverageMeterCollection]] = {}
    for samples, loss, part, rank in batches:
        meter = meters.setdefault(part, {}).setdefault(rank, AverageMeterCollection())
        meter.update({"loss": loss}, n=samples)
    parts = [merge_results([meter.summary() for meter in ranks.values()], of="ranks") for ranks in meters.values()]
    merged = merge_results(parts, of="parts")

    total = sum(samples for samples, *_ in batches)
    assert merged["num_samples"] == total
    direct = math.fsum(samples * loss for samples, loss, *_ in batches) / total
    assert merged["loss"] == pytest.approx(direct, rel=1e-9, abs=1e-6)


def test_numpy_and_torch_scalars_are_numbers() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    given = [numpy.float32(1.5), numpy.array(1.5), numpy.array([1.5]), torch.tensor(1.5), torch.tensor([[1.5]])]
    assert [plain(value) for value in given] == [1.5] * 5
    assert all(type(plain(value)) is float for value in given)
    assert plain(torch.tensor(1.5, requires_grad=True)) == 1.5
    assert merge_results([row(1, m=torch.tensor(1.0)), row(3, m=numpy.float64(3.0))], of="ranks")["m"] == 2.5
    assert type(merge_results([row(1, m=numpy.int64(2))], of="ranks")["m"]) is float
    several = torch.tensor([1.0, 2.0])
    assert plain(several) is several
    assert merge_results([row(1, m=several), row(1, m=several)], of="ranks")["m"] is several


class Table:
    """Has the shape of a single number, but is not a number."""

    shape = (1, 1)


@pytest.mark.parametrize("value", [True, 3, None, "1", {"shape": 1}, [1.0], Table()])
def test_other_values_are_unchanged(value: Any) -> None:
    assert plain(value) is value


@pytest.mark.parametrize(
    ("own", "committed", "expected"),
    [
        # Three ranks divided batches of 4 samples into 2, 1 and 1, five times.
        (10, 20, 20),
        (10, 30, 30),
        # Nobody knows how many there were, or the user counts other things.
        (0, 0, 30),
        (7, 20, 30),
    ],
)
def test_one_rank_stands_for_all(own: int, committed: int, expected: int) -> None:
    result = {"num_samples": 10, "batch_count": 5}
    assert for_all_ranks(result, 3, own, committed) == {**result, "num_samples": expected}
    assert for_all_ranks({"num_samples": "many"}, 2, 0, 0) == {"num_samples": "many"}


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(0, 2))
def test_a_metric_with_weights_of_its_own(batches: list[tuple[int, float, int, int]], rare: int) -> None:
    """One has a weight in each batch, and one is returned by some batches only."""
    meters: dict[int, dict[int, AverageMeterCollection]] = {}
    for number, (tokens, loss, part, rank) in enumerate(batches):
        meter = meters.setdefault(part, {}).setdefault(rank, AverageMeterCollection())
        some = {"some": loss} if number % 3 == rare else {}
        meter.update({"loss": (loss, tokens), **some}, n=2)
    parts = [[Measured(meter.summary()) for meter in ranks.values()] for ranks in meters.values()]
    merged = merge_call(pickle.loads(pickle.dumps(parts)))

    total = sum(tokens for tokens, *_ in batches)
    assert merged["loss"] == pytest.approx(
        math.fsum(tokens * loss for tokens, loss, *_ in batches) / total, rel=1e-9, abs=1e-6
    )
    those = [loss for number, (_, loss, *_) in enumerate(batches) if number % 3 == rare]
    assert ("some" in merged) == bool(those)
    if those:
        assert merged["some"] == pytest.approx(math.fsum(those) / len(those), rel=1e-9, abs=1e-6)
    assert all(type(value) in (int, float) for value in merged.values())


def test_a_metric_can_have_its_weight_as_an_attribute() -> None:
    """The loss of default methods has one: code that reads it gets a number or tensor, and no pair."""

    class Loss(float):
        _raysgd_weight = 3

    meters = AverageMeterCollection()
    meters.update({"loss": Loss(2.0)}, n=1)
    meters.update({"loss": Loss(6.0)}, n=5)
    assert meters.summary()["loss"] == 4.0


def one(samples: Any, drawn: int, committed: int) -> Measured:
    return Measured({"num_samples": samples, "loss": 1.0}, committed, drawn)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # Samples of the data set: also those of a rank that had not reported.
        ([[one(8, 8, 16), one(4, 4, 12)], [one(8, 8, 24)]], 24),
        # Tokens, of which all are there, or not.
        ([[one(80, 8, 16), one(80, 8, 16)], [one(80, 8, 24)]], 240),
        ([[one(80, 8, 16), one(40, 4, 12)], [one(80, 8, 24)]], "lacks"),
        ([[one(80, 8, 16), Measured()], [one(80, 8, 24)]], "lacks"),
        # A loop of the user's has measured nothing before the change.
        ([[one(0, 8, 16), one(0, 8, 16)], [one(8, 8, 24)]], 24),
        ([[one(0, 8, 16), one(0, 8, 16)], [one(80, 8, 24)]], "lacks"),
        # Nobody knows how many there were, or no worker has changed.
        ([[one(8, 0, 0)], [one(4, 0, 0)]], 12),
        ([[one(80, 0, 24)]], 80),
    ],
)
def test_a_sum_in_other_units_than_samples_is_complete_or_left_out(parts: Any, expected: Any) -> None:
    assert merge_call(parts).get("num_samples", "lacks") == expected
