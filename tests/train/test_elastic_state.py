"""A stop at each bytecode of a commit: ranks that have committed as much have the same content."""

import pickle
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest

from raysgd import train
from raysgd.train import elastic_state, replica, sessions
from raysgd.train.sessions import Stopped
from tests.replicas import FunctionRank, Interrupted

FILES = {str(module.__file__) for module in (elastic_state, replica, sessions)}


class Part:
    """An object with a state."""

    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def stopping(after: int) -> Any:
    """Return a trace function that stops before bytecode number `after` of these files."""
    left = after

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left:
            raise Stopped(asked=False)
        return trace

    return trace


def commit_twice(after: int) -> None:
    part = Part()
    sys.settrace(stopping(after))
    state = train.elastic({"part": part, "count": 0})
    for _ in range(2):
        part.number += 1
        state["count"] += 1
        state.commit()
    sys.settrace(None)  # no signal stops a function that has ended


def commit_steps(after: int) -> None:
    part = Part()
    sys.settrace(stopping(after))
    state = train.elastic({"part": part, "count": 0})
    part.number = state["count"] = 1
    state.commit_step()
    state.keep_again()
    sys.settrace(None)


def synchronize(after: int) -> None:
    part = Part()
    state = train.elastic({"part": part, "count": 0})
    sys.settrace(stopping(after))
    state.sync()
    sys.settrace(None)


@pytest.mark.parametrize("function", [commit_twice, commit_steps, synchronize])
def test_ranks_that_have_committed_as_much_have_the_same_content(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pickle.dumps(({"part": {"number": 7}, "count": 7}, False))  # what rank 0 sends
    monkeypatch.setattr(elastic_state, "_broadcast_from_rank_0", lambda content: first)
    contents, after = defaultdict[Any, set[str]](set), 0
    before, outcome = sys.gettrace(), Interrupted(None, "")
    while isinstance(outcome, Interrupted):
        after += 1
        rank = FunctionRank(rank=1, ranks=2)
        try:
            outcome = rank.run(function, after)
        finally:
            sys.settrace(before)
            rank.close()
        contents[rank.progress.order].add(repr(rank.committed()))
    assert after > 50
    assert {order: found for order, found in contents.items() if len(found) > 1} == {}
    assert [*map(repr, (rank.committed(),))] == [*contents[max(contents)]]
