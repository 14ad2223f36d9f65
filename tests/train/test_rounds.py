"""Reports of several ranks become rounds; who disagrees is named."""

import pytest

from raysgd.train.errors import ReportMismatchError
from raysgd.train.rounds import Report, Rounds, checkpoint_of


def test_a_round_is_complete_when_every_rank_has_reported() -> None:
    rounds = Rounds(2)
    assert rounds.add(Report(1, metrics={"a": 1})) is None
    complete = rounds.add(Report(0, metrics={"a": 0}))
    assert complete is not None
    assert [report.metrics["a"] for report in complete] == [0, 1], "in rank order"
    assert rounds.leftovers() == []


def test_a_fast_rank_may_run_ahead() -> None:
    rounds = Rounds(2)
    assert [rounds.add(Report(0, metrics={"step": step})) for step in range(3)] == [None, None, None]
    complete = [rounds.add(Report(1, metrics={"step": step})) for step in range(3)]
    assert [[r.metrics["step"] for r in round_ or ()] for round_ in complete] == [[0, 0], [1, 1], [2, 2]]


def test_one_rank_is_a_round() -> None:
    assert Rounds(1).add(Report(0)) == (Report(0),)


def test_different_kinds_are_an_error_that_names_the_ranks() -> None:
    rounds = Rounds(3)
    rounds.add(Report(0, "checkpoint", checkpoint=b""))
    with pytest.raises(ReportMismatchError, match=r"rank\(s\) 2 called train.report.*rank\(s\) 0 called train.save_checkpoint"):
        rounds.add(Report(2, "report"))


def test_kinds_are_compared_round_by_round() -> None:
    rounds = Rounds(2)
    rounds.add(Report(0, "report"))
    rounds.add(Report(0, "checkpoint"))
    assert rounds.add(Report(1, "report")) is not None
    assert rounds.add(Report(1, "checkpoint")) is not None


def test_more_calls_than_the_others_are_an_error() -> None:
    rounds = Rounds(3)
    rounds.add(Report(0))
    rounds.add(Report(1))
    with pytest.raises(ReportMismatchError, match=r"rank\(s\) 0, 1 called train.report\(\) more often than rank\(s\) 2"):
        rounds.check_all_said()


def test_leftovers_are_what_was_not_complete_in_order() -> None:
    rounds = Rounds(2)
    for step in range(2):
        rounds.add(Report(1, "checkpoint", checkpoint=bytes([step])))
    left = rounds.leftovers()
    assert [checkpoint_of(round_) for round_ in left] == [b"\0", b"\1"]
    assert rounds.leftovers() == []


def test_the_lowest_rank_with_a_checkpoint_counts() -> None:
    assert checkpoint_of((Report(0, checkpoint=b"a"), Report(1, checkpoint=b"b"))) == b"a"
    assert checkpoint_of((Report(0), Report(1, checkpoint=b"b"))) == b"b"
    assert checkpoint_of((Report(0), Report(1))) is None
