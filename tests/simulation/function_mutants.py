"""Break what users can see of training functions, in named ways. The simulation of functions must detect each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raysgd.train.backends import Backend
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.executor import BackendExecutor
from raysgd.train.run.rounds import FunctionRun, OpenRound, Round, RoundResult
from raysgd.train.sessions import Attempt, Session
from tests.simulation.functions import function_plan_for, run_function

__all__ = ["MUTANTS", "seeds_needed"]

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(breaks: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS[breaks.__name__] = breaks
    return breaks


def seeds_needed(name: str, most: int) -> int | None:
    """Return within how many seeds the simulation detects a mutant, None if it does not."""
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        return next((seed + 1 for seed in range(most) if run_function(function_plan_for(seed)).error is not None), None)


def after(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Return what changes the values that a method returns."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *given, **named: change(original(*given, **named)))


# -- rounds -------------------------------------------------------------------------------------------


@mutant
def show_the_rows_of_a_round_in_another_order(patch: Patch) -> None:
    after(OpenRound, "add", lambda complete: complete and complete[::-1])(patch)


@mutant
def lose_a_round_that_has_come_when_the_function_ends(patch: Patch) -> None:
    original = FunctionRun.next_round

    def next_round(self: FunctionRun, on_poll: Callable[[], None]) -> RoundResult | None:
        result = original(self, on_poll)
        return result if result is None or not self.values else original(self, on_poll)

    patch.setattr(FunctionRun, "next_round", next_round)


@mutant
def show_a_round_twice(patch: Patch) -> None:
    original, last = FunctionRun.next_round, {}  # type: Any, dict[int, RoundResult]

    def next_round(self: FunctionRun, on_poll: Callable[[], None]) -> RoundResult | None:
        if last.get(self.number) is not None:
            return last.pop(self.number)
        result: RoundResult | None = original(self, on_poll)
        if result is not None and result.rows[0]["step"] == 1:
            last[self.number] = result
        return result

    patch.setattr(FunctionRun, "next_round", next_round)


@mutant
def accept_reports_of_an_earlier_attempt(patch: Patch) -> None:
    begin, receive = FunctionRun.begin_attempt, FunctionRun.receive
    newest: dict[FunctionRun, Attempt] = {}

    def begin_attempt(self: FunctionRun, world_size: int, nodes: Any = ()) -> Attempt:
        newest[self] = begin(self, world_size, nodes)
        return newest[self]

    def received(self: FunctionRun, message: Any, body: Any, acknowledge: Any) -> None:
        late = message.run == self.number and message.attempt < newest[self].number
        receive(self, replace(message, attempt=newest[self].number) if late else message, body, acknowledge)

    patch.setattr(FunctionRun, "begin_attempt", begin_attempt)
    patch.setattr(FunctionRun, "receive", received)


@mutant
def count_the_reports_of_each_attempt_from_zero(patch: Patch) -> None:
    after(FunctionRun, "begin_attempt", lambda attempt: replace(attempt, reports=0))(patch)


# -- waiting ------------------------------------------------------------------------------------------


@mutant
def let_a_report_return_before_its_round_is_complete(patch: Patch) -> None:
    original = FunctionRun.receive

    def receive(self: FunctionRun, message: Any, body: Any, acknowledge: Any) -> None:
        original(self, message, body)
        acknowledge()

    patch.setattr(FunctionRun, "receive", receive)


@mutant
def let_a_report_return_before_it_is_stored(patch: Patch) -> None:
    original = FunctionRun._close_round

    def close_round(self: FunctionRun, round_: Round) -> None:
        original(self, round_)
        self._let_everyone_continue()

    patch.setattr(FunctionRun, "_close_round", close_round)


@mutant
def take_waiting_for_the_storage_for_a_hang(patch: Patch) -> None:
    patch.setattr(FunctionRun, "waits_for_storage", lambda self: False)


# -- checkpoints --------------------------------------------------------------------------------------


@mutant
def begin_again_from_the_first_checkpoint(patch: Patch) -> None:
    original = CheckpointManager.register

    def register(self: CheckpointManager, payload: bytes) -> int:
        first = self.payload
        number = original(self, payload)
        self.payload = first or payload
        return number

    patch.setattr(CheckpointManager, "register", register)


@mutant
def begin_again_without_a_checkpoint(patch: Patch) -> None:
    patch.setattr(Session, "checkpoint", lambda self: None)


@mutant
def keep_one_checkpoint_too_many(patch: Patch) -> None:
    original = CheckpointManager.store

    def store(self: CheckpointManager, *given: Any) -> None:
        kept = self.strategy
        if kept.num_to_keep:
            self.strategy = replace(kept, num_to_keep=kept.num_to_keep + 1)
        original(self, *given)
        self.strategy = kept

    patch.setattr(CheckpointManager, "store", store)


# -- workers and results ------------------------------------------------------------------------------


@mutant
def return_the_results_in_another_order(patch: Patch) -> None:
    original = BackendExecutor.finish_training
    patch.setattr(BackendExecutor, "finish_training", lambda self: original(self)[::-1])


@mutant
def set_up_the_backend_for_the_first_workers_only(patch: Patch) -> None:
    patch.setattr(Backend, "handle_failure", lambda self, group, failed, config: None)
