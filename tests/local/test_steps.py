"""What the weights have seen can be read from the steps that ranks have committed, whatever fails."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from tests.local.group import Cluster, Fault
from tests.local.test_faults import POINTS, ROWS, seen, trainer
from tests.peek import add_policy


class Ledger(Policy):
    """Notes how the steps of its rank have ended, and of those that are committed, which range of the epoch's order all ranks took."""

    def __init__(self) -> None:
        self.committed: set[tuple[int, int]] = set()
        self.outcomes: list[str] = []

    def end_step(self, step: Step) -> None:
        self.outcomes.append(step.outcome)
        assert step.committed == (step.outcome != "undone")
        if step.committed:
            assert step.current.rows is not None
            self.committed.add((step.current.offset - step.current.rows, step.current.offset))


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(operator: Any) -> Ledger:
        operator.ledger = Ledger()
        return operator.ledger  # type: ignore[no-any-return]

    add_policy(monkeypatch, made)


@pytest.mark.parametrize("batch", ["auto", "per_worker"])
@pytest.mark.parametrize("at", ["", *POINTS])
def test_the_committed_steps_of_the_survivors_are_what_the_weights_have_seen(
    at: str, batch: str, ledgers: None
) -> None:
    with Cluster([Fault("kill", at, rank=0, step=2)] if at else []) as cluster, trainer(batch) as run:
        run.train(max_retries=-1)
        assert not cluster.left
        if batch == "auto":  # otherwise a step that is made again has other samples, and the operator counts both
            assert Counter(seen(run)) == Counter(range(ROWS))
        found = run.apply_all_operators(lambda operator: (operator.ledger.committed, operator.ledger.outcomes))
    ranges = sorted({each for committed, _ in found for each in committed})
    assert [ranges[0][0], ranges[-1][1]] == [0, ROWS]
    assert all(before[1] == after[0] for before, after in pairwise(ranges)), ranges
    outcomes = {each for _, own in found for each in own}
    assert outcomes == {"applied", "undone"} if at in ("begun", "logged") else outcomes <= {"applied", "undone"}
