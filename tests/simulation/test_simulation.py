"""The engine in virtual time, under thousands of schedules of faults. The checks would detect a broken engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysgd.core.sampling_plan import SamplingPlan
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_table import WorkerInfo
from raysgd.training.feed import Feed
from tests.simulation.seeds import Summary, simulate

ROOT = Path(__file__).resolve().parent.parent.parent


def test_two_thousand_schedules_of_faults_break_no_guarantee() -> None:
    seeds = os.environ.get("SEEDS", "2000")
    run = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", seeds],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{seeds} seeds" in run.stdout


def test_a_seed_always_gives_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for _ in range(2):
        simulate(0, 20, tracing=True)
        runs.append(capsys.readouterr().out)
    assert runs[0] == runs[1] and "FAULT" in runs[0]


# Each of these breaks the engine in a way that a few hundred seeds must detect.


def _skip_agreement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "_agree_on_state", lambda self, workers: True)


def _forget_what_was_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Feed, "cut_short", lambda self: False)


def _use_samples_twice(patch: pytest.MonkeyPatch) -> None:
    original = SamplingPlan.parts_of
    patch.setattr(SamplingPlan, "parts_of", lambda self, rank, offset: original(self, 0, offset))


def _rescue_no_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "rescue_state", lambda self, worker, call: True)


def _forget_who_holds_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerInfo, "holds_state", property(lambda self: False, lambda self, value: None), raising=False)


def _tell_of_a_preemption_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_untold", lambda self: [w for w, e in self._leaving.items() if e.reason == "preemption"])


def _let_spares_join(patch: pytest.MonkeyPatch) -> None:
    original = Replacements.take
    patch.setattr(Replacements, "take", lambda self, most: original(self, most + 1))


@pytest.mark.parametrize(
    "breakage",
    [
        _skip_agreement,
        _forget_what_was_applied,
        _use_samples_twice,
        _rescue_no_state,
        _forget_who_holds_the_state,
        _tell_of_a_preemption_again,
        _let_spares_join,
    ],
)
def test_a_broken_engine_is_detected(breakage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)  # type: ignore[operator]
    total = Summary()
    for first in range(0, 600, 20):
        total.add(simulate(first, 20))
        if total.failed:
            return
    pytest.fail(f"no violation in {total.seeds} seeds")
