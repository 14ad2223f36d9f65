"""Which partial results still count when a call continues from a snapshot."""

from typing import Any

import pytest

from raysgd.core.outcomes import Failed, Interrupted, Ok, WorkerFailed
from raysgd.core.progress import Progress
from raysgd.core.snapshot import Snapshot
from raysgd.engine.partial_results import PartialResults, partial_results_since

CALL = 4


def part(batches: int, end: int) -> PartialResults:
    """Return a part that was interrupted after `batches` more batches, at step `end`."""
    return PartialResults(
        (Interrupted({"batch_count": batches}, "a peer failed", Progress(step=end)), WorkerFailed("killed"))
    )


def snapshot(step: int, partial: dict[str, Any] | None, call: int = CALL) -> Snapshot:
    return Snapshot(b"state", Progress(step=step), call=call, partial=partial)


PARTS = [part(10, 10), part(7, 17), part(5, 22)]


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        pytest.param(snapshot(4, {"batch_count": 4}), [4], id="in the first part"),
        pytest.param(snapshot(10, {"batch_count": 10}), [10], id="at the end of the first"),
        pytest.param(snapshot(10, {"epoch": 1}), [10, 0], id="at the beginning of the second"),
        pytest.param(snapshot(13, {"batch_count": 3}), [10, 3], id="in the second"),
        pytest.param(snapshot(20, {"batch_count": 3}), [10, 7, 3], id="in the last"),
        pytest.param(snapshot(23, {"batch_count": 6}), [10, 7, 6], id="newer than the last known step"),
        pytest.param(snapshot(0, {}), [0], id="before the first step"),
        pytest.param(snapshot(22, None), [10, 7, 5], id="handed over by a survivor"),
        pytest.param(snapshot(20, {"batch_count": 20}, call=3), [], id="of an earlier call"),
    ],
)
def test_results_that_count(taken: Snapshot, expected: list[int]) -> None:
    kept = partial_results_since(taken, PARTS, call=CALL)
    assert [values[0].get("batch_count", 0) if (values := each.values) else 0 for each in kept] == expected


def test_the_end_of_a_part_is_the_last_known_step() -> None:
    ranks = (Ok({}, Progress(step=3)), WorkerFailed("killed", progress=Progress(step=5)), Failed(ValueError()))
    assert PartialResults(ranks).end == 5
    assert PartialResults(()).end == 0
