"""What the first step of a run means for the batch: the decision, and what ranks agree on."""

import itertools
from dataclasses import replace

import pytest

from raysgd.core.batch_mode import GLOBAL, ONCE, PER_WORKER, BatchMode, FirstStep, agreed, decide

USUAL = FirstStep(calls=[ONCE])


@pytest.mark.parametrize(
    ("changes", "reason", "advice"),
    [
        ({"direct": True}, "calls optimizer.step() itself", "self.backward(loss)"),
        ({"scheduled": True}, "steps a scheduler", "scheduler_step_freq"),
        ({"sized": True}, "reads self.world_size", "batch='global'"),
        ({"divided": False}, "not divided by index", "DataLoader"),
        ({"changed": ("seen", "ema")}, "changes self.seen, self.ema", "batch='global'"),
        ({"calls": [[]]}, "none of the operator's helpers", "self.zero_grad()"),
        ({"calls": [ONCE, ONCE * 2]}, "self.step(), self.zero_grad()", "once each"),
        *(
            ({"calls": [list(each)]}, "calls self.", "in this order")
            for each in itertools.permutations(ONCE)
            if [*each] != ONCE
        ),
        *(({"calls": [list(each)]}, "calls self.", "once each") for each in itertools.combinations(ONCE, 2)),
    ],
)
def test_what_cannot_be_decided_surely_is_per_worker(changes: dict[str, object], reason: str, advice: str) -> None:
    found = decide(replace(USUAL, **changes))  # type: ignore[arg-type]
    assert found.mode == PER_WORKER and reason in found.reason and advice in found.advice


def test_ranks_agree() -> None:
    none, one, parts = BatchMode(), BatchMode(GLOBAL), BatchMode(GLOBAL, in_parts=True)
    refused = decide(replace(USUAL, direct=True))
    for modes, expected in (
        ([], none),
        ([none, none], none),
        ([none, one], one),
        ([one, parts, none], parts),
        ([one, none, refused], refused),
        ([refused, parts], refused),
    ):
        for each in itertools.permutations(modes):
            assert agreed(each) == expected
