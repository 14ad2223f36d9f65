"""The contract of `train_batch`: which calls of the helpers follow it in a part of a batch."""

import itertools
from typing import Any

import pytest

from raysgd.torch.step.parts.contract import (
    CLEARED_LATE,
    NOT_CLEARED,
    NOT_STEPPED,
    SEVERAL_ROUNDS,
    STEPPED_ALONE,
    STEPPED_TWICE,
    Calls,
    later,
    notice,
)


def first_found(calls: list[Any]) -> Any:
    """Return what the first call violates. A number is a step of this optimizer."""
    checked = Calls()
    for call in calls:
        found = {"zero": checked.cleared, "back": checked.passed}.get(call, lambda at=call: checked.stepped(at))()
        if found is not None:
            return found
    return checked.ended()


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        (["zero", "back", 1], None),
        (["zero", "zero", "back", "back", 1, 2], None),
        (["zero", "back", 2], None),
        ([], NOT_STEPPED),
        (["zero", "back"], NOT_STEPPED),
        (["back", 1], NOT_CLEARED),
        (["back", 1, "zero"], NOT_CLEARED),
        (["zero", 1], STEPPED_ALONE),
        (["zero", "back", "zero", 1], CLEARED_LATE),
        (["zero", "back", 1, "zero", "back", 2], SEVERAL_ROUNDS),
        (["zero", "back", 1, "back", 2], SEVERAL_ROUNDS),
        (["zero", "back", 1, 2, 1], STEPPED_TWICE),
    ],
)
def test_which_calls_follow_the_contract(calls: list[Any], found: Any) -> None:
    assert first_found(calls) == found


@pytest.mark.parametrize("calls", [*itertools.permutations(["zero", "back", 1])])
def test_only_one_order_follows_the_contract(calls: tuple[Any, ...]) -> None:
    assert (first_found([*calls]) is None) == (calls == ("zero", "back", 1))


def test_texts_say_what_to_do() -> None:
    for text in (notice(SEVERAL_ROUNDS, 4), later(SEVERAL_ROUNDS, 4)):
        assert "as in a GAN" in text and "4" in text and "batch='per_worker'" in text
