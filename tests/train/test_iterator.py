"""Follow a run to its end: which callbacks are called, in which order, and what an error stops. Without Ray or an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import Recovery
from raysgd.callbacks import Callback, CallResult, Run
from raysgd.callbacks.base import TRACES
from raysgd.train import TrainingIterator
from raysgd.train.callbacks import make_callback_list
from raysgd.train.run import RoundResult
from tests.callbacks.recording import Heard

RUN = Run(trainer="Trainer", name="function", num_workers=2, folder=Path("run_001"))


class Executor:
    """Returns these rounds, or raises these errors, in order."""

    is_started = True

    def __init__(self, *rounds: list[dict[str, Any]] | Exception) -> None:
        self.rounds = list(rounds)
        self.recoveries_of_run: list[Any] = []
        self.cancelled: list[BaseException] = []

    def fetch_next_round(self, on_poll: Callable[[], None]) -> RoundResult | None:
        on_poll()
        if not self.rounds:
            return None
        found = self.rounds.pop(0)
        if isinstance(found, Exception):
            raise found
        return RoundResult(found, 7)

    def unfetched_rounds(self) -> list[RoundResult]:
        left, self.rounds = self.rounds, []
        return [RoundResult(rows, 7) for rows in left if isinstance(rows, list)]

    def finish_training(self) -> list[Any]:
        return ["a", "b"]

    def cancel(self, error: BaseException) -> None:
        self.cancelled.append(error)


def follow(executor: Any, *callbacks: Callback, **more: Any) -> TrainingIterator:
    return TrainingIterator(executor, make_callback_list(callbacks), **more)


def begin(ready: Callable[[], None]) -> None:
    ready()


def test_callbacks_are_called_with_each_round_between_start_and_end() -> None:
    heard, recorded = Heard(), []
    rows = [{"epoch": 3, "_training_iteration": 5, "_time_this_iter_s": 0.5, TRACES: {"file": b""}}, {"epoch": 3}]
    executor = Executor(rows, [{"epoch": float("nan")}, {}])
    rounds = follow(executor, heard, record=lambda result: recorded.append((result, list(heard.order))))
    assert rounds.run_to_end(RUN, begin) == ["a", "b"]
    assert heard.order == ["start", "result", "result", "end"]
    assert heard.named("start") == [RUN] and heard.named("end") == [False]
    first, second = heard.named("result")
    assert (first.epoch, first.step, first.seconds, first.world_size) == (3, 5, 0.5, 2)
    assert (second.epoch, second.step, second.seconds) == (None, 2, 0.0)
    assert first.traces == [{"file": b""}, {}] and TRACES not in first.metrics
    assert [order for _, order in recorded] == [["start"], ["start", "result"]], "recorded before the callbacks"
    assert recorded[0][0].checkpoint_id == 7 and TRACES not in recorded[0][0].rows[0]
    assert rounds.is_finished() and executor.cancelled == []


def test_an_error_stops_the_run_and_records_the_rounds_that_were_not_fetched() -> None:
    heard, recorded = Heard(), []
    executor = Executor([{"step": 0}], ZeroDivisionError("planned"), [{"step": 1}])
    with pytest.raises(ZeroDivisionError) as raised:
        follow(executor, heard, record=lambda result: recorded.append(result.rows)).run_to_end(RUN, begin)
    assert heard.order == ["start", "result", "error", "end"]
    assert heard.named("error") == executor.cancelled == [raised.value] and heard.named("end") == [True]
    assert recorded == [[{"step": 0}], [{"step": 1}]]


def test_callbacks_are_not_called_for_an_error_before_the_start() -> None:
    def refuse(ready: Callable[[], None]) -> None:
        raise LookupError("refused")

    heard, executor = Heard(), Executor()
    with pytest.raises(LookupError):
        follow(executor, heard).run_to_end(RUN, refuse)
    assert heard.order == [] and executor.cancelled == []


class Stopping(Callback):
    stops_training = True

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, value: Run | CallResult) -> None:
        raise TimeoutError("enough")


@pytest.mark.parametrize("hook", ["on_start", "on_result"])
def test_a_callback_that_stops_training_ends_the_run(hook: str) -> None:
    heard, executor = Heard(), Executor([{}], [{}])
    with pytest.raises(TimeoutError):
        follow(executor, Stopping(hook), heard).run_to_end(RUN, begin)
    assert heard.order == ["start", *(["result"] if hook == "on_result" else []), "error", "end"]
    assert [str(error) for error in executor.cancelled] == ["enough"]


def test_each_recovery_is_reported_once() -> None:
    heard, executor = Heard(), Executor([{}], [{}])
    rounds = follow(executor, heard)
    first, second = (Recovery(reason, (1,), 2, 1, True, 0, 0.1) for reason in ("first", "second"))
    executor.recoveries_of_run = [first]
    rounds.next_round()
    executor.recoveries_of_run = [first, second]
    rounds.next_round()
    assert [each.reason for each in heard.named("recovery")] == ["first", "second"]


def test_a_stop_iteration_from_the_function_does_not_end_the_rounds() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(follow(Executor(StopIteration())))
