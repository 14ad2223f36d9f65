"""With a count, a step's gradient is the mean over all that its losses are means over, on any number of workers."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raysgd import ConfigError, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.local.runs import train
from tests.torch.counted import Counting, Default, Weighted, by_hand, entered

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")

ROWS = 23


def options(**given: Any) -> TrainingOptions:
    return TrainingOptions(parallel="ddp", **given)


def check(
    operator: type[TrainingOperator],
    size: int,
    schedule: list[tuple[int | None, int]],
    *,
    rows: int = ROWS,
    accumulate: int = 1,
    clip_norm: float | None = None,
    weight: Any = None,
    full: int = 0,
    **more: Any,
) -> None:
    """Compare an epoch with one that was written by hand."""
    workers = more.get("num_workers") or schedule[0][1]
    found: list[torch.Tensor] = []

    def look(trainer: Any, _: Any) -> None:
        found[:] = trainer.apply_all_operators(entered) if issubclass(operator, Counting) else []

    given = options(accumulate=accumulate, clip_norm=clip_norm)
    freq = "epoch" if accumulate > 1 else "batch"
    mine = train(
        operator, {"rows": rows, "batch": size}, schedule, options=given, scheduler_step_freq=freq, look=look, **more
    )
    theirs, weights = by_hand(rows, size * workers * accumulate, clip=clip_norm, weight=weight, full=full)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for each in found:
        torch.testing.assert_close(each, weights, rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 0.05]), st.integers(1, 3))
@example(3, 2, 0.05, 1)
@example(2, 2, None, 2)
def test_ragged_tokens(workers: int, batch: int, clip_norm: float | None, accumulate: int) -> None:
    if workers * batch * accumulate in (1, 2, 4):
        return  # a step without a token, which is 0/0 by hand
    check(Counting, batch, [(None, workers)], accumulate=accumulate, clip_norm=clip_norm)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 0.05]))
@example(3, 2, None)
def test_parts_of_missing_workers(fewer: int, batch: int, clip_norm: float | None) -> None:
    check(Counting, batch + 1, [(1, 4), (None, fewer)], clip_norm=clip_norm, batch="auto")


@pytest.mark.parametrize("kind", [Default, Weighted])
@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_default_methods_count_what_the_criterion_counts(kind: Any, workers: int, accumulate: int) -> None:
    check(kind, 3, [(None, workers)], weight=kind.weight, accumulate=accumulate)


class Full(Default):
    full = ROWS


class Late(Default):
    full = 14


def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each tensor that ranks add."""
    from tests.local.group import Cluster

    made: list[int] = []
    original = Cluster._reduce

    def reduce(self: Cluster, tensor: torch.Tensor, *given: Any) -> None:
        made.append(tensor.numel())
        original(self, tensor, *given)

    monkeypatch.setattr(Cluster, "_reduce", reduce)
    return made


def test_where_nothing_is_ignored_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sums(monkeypatch)
    check(Full, 3, [(None, 2)], full=ROWS)
    assert made == [4, 4], "both ranks agree once that counts are not needed"


def test_counts_travel_from_the_first_batch_on_that_ignores_something(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sums(monkeypatch)
    check(Late, 3, [(None, 2)], full=14)
    assert made == [4, 4] * 2 + [1, 1] * 2, "the batches are 6, 6, 6 and 5 rows"


def test_ranks_that_do_not_agree_are_told() -> None:
    class Disagrees(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return kept.sum() if self.world_rank else None

    with pytest.raises(
        ConfigError, match=r"1 of 2 ranks have passed count to self.backward, and the others have not: pass"
    ):
        train(Disagrees, {"rows": 12, "batch": 3}, [(None, 2)])


@pytest.mark.parametrize(
    ("first", "text"), [(True, "without a count after others with one"), (False, "with a count after")]
)
def test_a_rank_that_changes_its_mind_is_told(first: bool, text: str) -> None:
    class Changes(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return kept.sum() if (self.global_step == 0) == first else None

    with pytest.raises(ConfigError, match=text):
        train(Changes, {"rows": 12, "batch": 3}, [(None, 2)])


@pytest.mark.parametrize("count", [-1, float("nan"), "many", torch.ones(2)])
def test_a_count_is_a_number(count: Any) -> None:
    class Wrong(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return count

    with pytest.raises(ConfigError, match="count must be a number of 0 or more"):
        train(Wrong, {"rows": 6, "batch": 3}, [(None, 1)])


def test_counts_need_means_over_samples() -> None:
    with pytest.raises(ConfigError, match=r"count=\.\.\.\) cannot be combined with gradients='ranks'"):
        train(Counting, {"rows": 12, "batch": 3}, [(None, 2)], options=options(gradients="ranks"))


def test_two_losses_in_a_batch_of_several() -> None:
    class Twice(Counting):
        def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
            super().backward(0.5 * loss, *given, **named)
            super().backward(self.witness([0]), *given, **named)

    with pytest.raises(ConfigError, match="was called twice in a batch that shares its step"):
        train(Twice, {"rows": 12, "batch": 3}, [(None, 2)], options=options(accumulate=2), scheduler_step_freq="epoch")
