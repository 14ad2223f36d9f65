"""The engine in virtual time, under thousands of schedules of faults. The checks would detect a broken engine."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysgd.engine.generation import Generation
from raysgd.errors import HangError, NotActiveError, TrainingFailedError
from tests.simulation.checker import Checker
from tests.simulation.faults import Cancelled, Schedule
from tests.simulation.group import Worker
from tests.simulation.mutants import MUTANTS, seeds_needed
from tests.simulation.plan import Fault, Plan, plan_for
from tests.simulation.scenario import Script, run
from tests.simulation.seeds import simulate
from tests.simulation.shrink import kind_of, shrink
from tests.tiers import NIGHTLY

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = 10_000 if NIGHTLY else 600

# Shortened schedules that broke a guarantee once, by what was wrong.
FOUND = {
    "an error of user code ended the redo of an earlier call, and no later call finished it": Plan(
        seed=33045,
        samples=51,
        step_s=0.01,
        late=0.1,
        script=("fit 1", "apply", "train"),
        faults=(Fault("disconnect", "in apply", count=2, others=16), Fault("raise", "state_dict")),
    ),
    "an error in the user's state_dict counted as a part of a failure, and the worker with it was ended": Plan(
        seed=39891,
        ranks=1,
        nodes=(1,),
        samples=4,
        step_s=0.01,
        late=0.1,
        in_place=False,
        faults=(Fault("raise", "state_dict"), Fault("raise", "forward", count=4)),
    ),
    "a worker that started on a GPU before its failure was known did not count": Plan(
        seed=38567,
        ranks=3,
        nodes=(1, 2),
        samples=1,
        step_s=0.3,
        late=0.1,
        spares=2,
        snapshot_every=None,
        script=("save", "train 10"),
        faults=(Fault("gpu", "forward", pick=61),),
    ),
    "a new worker had taken the only state while a call was cancelled, and was not asked for it": Plan(
        nodes=(2, 1),
        samples=7,
        step_s=0.3,
        script=("fit 5",),
        faults=(Fault("kill", "applied"), Fault("cancel", "in agreement"), Fault("kill", "in rendezvous", count=7)),
    ),
    "a new worker with the only state was ended after an error that user code raised in it": Plan(
        seed=80142,
        ranks=3,
        nodes=(3, 2, 1),
        step_s=0.3,
        late=0.1,
        script=("save", "train"),
        faults=(
            Fault("kill", "applied", count=7),
            Fault("kill", "in start", count=6),
            Fault("raise", "resized", count=2),
            Fault("kill", "in rendezvous", count=10),
            Fault("raise", "hook", count=6),
            Fault("kill", "in agreement"),
        ),
    ),
    "a survivor whose load was interrupted trained with new workers, each from a state of its own": Plan(
        seed=55196,
        ranks=3,
        nodes=(3,),
        samples=7,
        step_s=0.3,
        late=0.1,
        min_workers=3,
        script=("train", "resize 3", "fit 2"),
        faults=(Fault("kill", "in resize", pick=52), Fault("kill", "in agreement", pick=25)),
    ),
    "a call trained the rest of the epoch before it": Plan(
        seed=1425,
        ranks=1,
        nodes=(1,),
        samples=3,
        step_s=0.01,
        late=0.1,
        snapshot_every=1,
        script=("fit 5", "validate", "fit 5"),
        faults=(Fault("kill", "in validate"),),
    ),
    "an interrupted change counted as a failure": Plan(
        seed=262,
        ranks=1,
        nodes=(1,),
        samples=5,
        step_s=0.3,
        script=("fit 4",),
        faults=(Fault("ctrl-c", "in recovery"), Fault("drain", "run ended")),
    ),
    "a set-up that failed in a resize counted as a failure": Plan(
        seed=561,
        ranks=3,
        nodes=(3,),
        samples=1,
        step_s=0.01,
        in_place=False,
        script=("resize 2",),
        faults=(Fault("raise", "hook", count=4),),
    ),
    "work redone from a state that was handed over counted twice": Plan(
        seed=2002,
        ranks=1,
        nodes=(1,),
        samples=8,
        step_s=0.01,
        faults=(Fault("cut", "applied", count=8, seconds=8.0), Fault("drain", "reduced")),
    ),
    "work redone from the beginning after a save counted twice": Plan(
        seed=1, samples=3, step_s=0.01, script=("fit 1",), faults=(Fault("kill", "save", others=16),)
    ),
    "the work of a rank that was ahead and failed counted twice": Plan(
        seed=55,
        ranks=4,
        nodes=(2, 1),
        later=((9.6, 1),),
        samples=33,
        step_s=0.3,
        faults=(
            Fault("kill", "applied", count=26, pick=40),
            Fault("freeze", "join", count=2),
            Fault("kill", "process start", count=4),
        ),
    ),
    "batches from before a load made the ranks look out of step": Plan(
        seed=1893,
        samples=13,
        step_s=0.3,
        late=0.1,
        in_place=False,
        snapshot_every=3,
        script=("save", "train 9", "load", "train"),
        faults=(Fault("reset", "applied", count=29), Fault("drain", "save"), Fault("kill", "prepare", count=4)),
    ),
    "a call ended when a planned stop was due": Plan(
        seed=5776,
        ranks=1,
        nodes=(1,),
        samples=1,
        step_s=0.01,
        late=0.1,
        faults=(Fault("notice", "forward"), Fault("pause", "in train", count=2)),
    ),
    "a resize ended with too many workers after a failure": Plan(
        seed=1882,
        ranks=3,
        nodes=(2, 1),
        samples=1,
        step_s=0.01,
        late=0.1,
        script=("train 19", "train", "train", "resize 1"),
        faults=(
            Fault("kill", "noticed"),
            Fault("raise", "applied"),
            Fault("notice", "run ended", count=11, others=16),
        ),
    ),
    "a replacement that was preempted while it started joined": Plan(
        seed=3498,
        ranks=1,
        nodes=(1, 1),
        samples=2,
        step_s=0.01,
        late=0.1,
        grow="epoch",
        spares=2,
        script=("train", "idle", "train 3"),
        faults=(Fault("notice", "run", others=2),),
    ),
    "a snapshot from before a load arrived after it": Plan(
        seed=1312,
        samples=25,
        global_batch=6,
        step_s=0.3,
        spares=2,
        retries=0,
        script=("train", "resize 1", "save", "train", "load", "fit 1"),
        faults=(Fault("stop", "applied", count=15, seconds=25.0), Fault("kill", "data", count=21)),
    ),
    "a resize that was interrupted was made in the next call": Plan(
        seed=1, samples=4, script=("resize 1", "resize 2"), faults=(Fault("ctrl-c", "in resize", count=4),)
    ),
    "the failure of a member in a planned change was called a preemption": Plan(
        seed=1, samples=4, script=("resize 1", "resize 2"), faults=(Fault("kill", "in resize"),)
    ),
    "healthy workers were killed when the driver's machine had been suspended": Plan(
        seed=6230,
        ranks=3,
        nodes=(3, 2, 1),
        samples=6,
        step_s=0.3,
        late=0.1,
        spares=2,
        script=("fit 2",),
        faults=(Fault("kill", "applied"), Fault("jump", "in growth", seconds=25.0)),
    ),
    "training was lost when a load was interrupted, and then refused": Plan(
        seed=10149,
        samples=1,
        step_s=0.01,
        late=0.1,
        in_place=False,
        retries=1,
        script=("save", "train", "load 0", "train"),
        faults=(Fault("cancel", "in load", count=2),),
    ),
    "training was lost when all workers failed in a load that was refused": Plan(
        seed=21273,
        ranks=1,
        nodes=(1,),
        samples=45,
        batch=2,
        step_s=0.3,
        late=0.1,
        script=("save", "train", "load 1", "train 7"),
        faults=(Fault("kill", "forward", count=30), Fault("kill", "in load")),
    ),
    "failures in a save during training did not count": Plan(
        seed=19836,
        ranks=1,
        nodes=(1,),
        samples=3,
        step_s=0.01,
        late=0.1,
        retries=1,
        script=("idle", "fit 2"),
        faults=(Fault("disconnect", "in idle"), Fault("node", "in save")),
    ),
    "an error of state_dict lost the state of a healthy worker": Plan(
        seed=39891,
        ranks=1,
        nodes=(1,),
        samples=2,
        step_s=0.01,
        late=0.1,
        in_place=False,
        faults=(Fault("raise", "state_dict"), Fault("raise", "forward", count=2)),
    ),
    "a call that was made again up to its error went on into the next epoch": Plan(
        seed=601612,
        nodes=(2, 2),
        samples=31,
        batch=2,
        step_s=0.3,
        late=0.1,
        script=("fit 2", "apply"),
        faults=(
            Fault("kill", "applied", count=5),
            Fault("kill", "offer", count=3),
            Fault("node", "in apply", others=16),
            Fault("cancel", "in growth"),
            Fault("node", "reduced", count=18),
        ),
    ),
    "a worker that its driver had given up copied the state of a step beyond that for a checkpoint": Plan(
        seed=513166,
        nodes=(1, 2, 1),
        ranks=3,
        samples=7,
        step_s=0.01,
        min_workers=3,
        grow="epoch",
        spares=2,
        script=("fit 1",),
        faults=(Fault("cut", "forward", count=6, seconds=8.0),),
    ),
}


@pytest.mark.timeout(3600 if NIGHTLY else 900)
def test_schedules_of_faults_break_no_guarantee() -> None:
    count = os.environ.get("SEEDS", str(SEEDS))
    run = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", count],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{count} seeds" in run.stdout


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "new processes"])
@pytest.mark.parametrize("steps", [0, 1])
def test_all_workers_fail_before_a_snapshot_of_what_was_loaded_arrives(in_place: bool, steps: int) -> None:
    """They load it again."""
    script, faults = (
        ("train 3", "save", "train", "load", "train"),
        (Fault("kill", "data", count=13 + 3 * steps, others=16),),
    )
    result = run(Plan(seed=1, in_place=in_place, shares=True, script=script, faults=faults))
    assert result.error is None and result.redone == steps
    (recovery,) = result.recoveries
    assert recovery.removed_ranks == (0, 1) and recovery.batch == (3 if not steps else 1)


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_what_was_found_once_stays_fixed(plan: Plan) -> None:
    result = run(plan)
    assert result.error is None and result.struck
    assert run(replace(plan, shares=True)).error is None


def test_training_may_continue_from_a_snapshot_of_a_worker_whose_connection_was_lost() -> None:
    """It is a step ahead of the survivor, which is replaced too."""
    faults = (Fault("disconnect", "reduced", count=9, others=2, pick=19), Fault("loader", "data", count=8))
    plan = Plan(
        seed=3675,
        ranks=4,
        nodes=(1, 3),
        samples=1,
        step_s=0.01,
        late=0.1,
        in_place=False,
        snapshot_every=3,
        script=("train 4",),
        faults=faults,
    )
    result = run(plan)
    assert result.error is None and result.struck.total() == 4


def test_a_leaver_that_fails_while_it_hands_over_its_state_is_a_failure() -> None:
    """It was not noticed: training continued from the newest snapshot, and nothing said that batches were redone."""
    faults = (Fault("notice", "applied", count=5), Fault("kill", "state ended"))
    result = run(Plan(seed=1, ranks=1, nodes=(1, 1), samples=12, step_s=0.3, snapshot_every=3, faults=faults))
    assert result.error is None and result.redone
    assert [(each.removed_ranks, each.batches_redone) for each in result.recoveries] == [((0,), result.redone)]


def failing_once(monkeypatch: pytest.MonkeyPatch, method: str, at: int) -> None:
    """Let a method of `Generation` fail once, at this call, as after a fault of the network that is over: no worker has failed."""
    original, calls = getattr(Generation, method), itertools.count(1)

    def once(self: Generation, *args: object) -> bool:
        if next(calls) != at:
            return bool(original(self, *args))
        self._failures = {}
        return False

    monkeypatch.setattr(Generation, method, once)


LEAVES = {"samples": 100, "step_s": 0.3, "script": ("train",), "faults": (Fault("drain", "applied", 4, seconds=25.0),)}


@pytest.mark.parametrize(("method", "at"), [("load", 1), ("_rendezvous", 2)])
def test_the_state_of_the_only_worker_that_leaves_is_never_lost(
    method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_once(monkeypatch, method, at)
    result = run(Plan(ranks=1, nodes=(1, 1), **LEAVES))  # type: ignore[arg-type]
    assert result.error is None
    found = [(each.reason, each.world_size_after, each.batches_redone) for each in result.recoveries]
    assert found == [("preemption", 1, 0)]


@pytest.mark.parametrize("grow", [True, False])
def test_a_resize_is_made_although_the_network_fails_once(grow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_once(monkeypatch, "_rendezvous", 3)
    script = ("train", "resize 2", "resize 4", "train")
    result = run(Plan(ranks=4, nodes=(2, 2), grow=grow, samples=40, script=script))
    found = [(each.reason, each.world_size_before, each.world_size_after) for each in result.recoveries]
    assert result.error is None and found == [("shrink", 4, 2), ("growth", 2, 4)]


def test_a_worker_leaves_only_at_its_deadline_if_too_few_are_left() -> None:
    early = run(Plan(ranks=2, nodes=(1, 1), min_workers=1, **LEAVES))  # type: ignore[arg-type]
    late = run(Plan(ranks=2, nodes=(1, 1), min_workers=2, later=((20.0, 1),), **LEAVES))  # type: ignore[arg-type]
    assert early.recoveries[0].world_size_after == 1
    assert [(each.reason, each.world_size_after) for each in late.recoveries] == [("preemption", 2)]
    assert early.error is late.error is None and late.recoveries[0].step > early.recoveries[0].step


def test_training_waits_again_for_enough_workers_after_ctrl_c_in_such_a_wait() -> None:
    faults = (Fault("node", "applied", 4), Fault("ctrl-c", "in recovery", 4))
    later = ((40.0, 1),)
    result = run(
        Plan(
            nodes=(1, 1),
            min_workers=2,
            samples=60,
            step_s=0.3,
            later=later,
            script=("train", "save", "train"),
            faults=faults,
        )
    )
    assert result.error is None and sum(result.struck.values()) == 2
    found = [(each.reason, each.world_size_before, each.world_size_after) for each in result.recoveries]
    assert found == [("restart", 1, 2)], "and no step was trained with one worker, but it could be saved"


def test_calls_are_run_again_if_a_spare_with_an_older_state_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the state for a growth that was cancelled. Then all workers failed, before the snapshot of the call in between had
    arrived."""

    def once(self: Script, name: str, *given: str) -> None:
        with contextlib.suppress(Cancelled):
            getattr(self, f"_{name}")(*map(int, given))

    monkeypatch.setattr(Script, "_until_done", once)
    faults = (
        Fault("kill", "applied"),
        Fault("cancel", "in agreement", 4),
        Fault("lose", "applied", 5, others=2, seconds=4.0),
        Fault("kill", "applied", 10),
    )
    script = ("train", "resize 1", "train", "train")
    result = run(
        Plan(4, nodes=(2, 2), samples=7, step_s=0.3, late=0.1, spares=1, script=script, faults=faults), tracing=True
    )
    assert result.error is None and sum("<- run train" in line for line in result.trace) == 6
    assert any("<- load" in line for line in result.trace)


def test_new_workers_with_the_only_state_are_kept_if_they_cannot_connect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They have taken it from a member that then failed, and the network between them fails once. Before, both were ended, and
    training continued from the snapshot. The log says what happened."""
    original, calls = Generation._rendezvous, itertools.count(1)

    def rendezvous(self: Generation, workers: list[str], *given: Any) -> bool:
        number, self._failures = next(calls), {}
        if number == 3:  # the growth, after a recovery
            assert len(workers) == 3
            self._table.group.workers[workers[0]].die()  # type: ignore[attr-defined]
        return number != 4 and original(self, workers, *given)

    monkeypatch.setattr(Generation, "_rendezvous", rendezvous)
    faults = (Fault("kill", "applied", 12, others=1),)
    result = run(Plan(ranks=3, nodes=(3,), samples=200, step_s=0.3, script=("train",), faults=faults))
    assert result.error is None and next(calls) > 5
    assert [each.batches_redone for each in result.recoveries if each.reason == "worker death"] == [0, 0]
    begins = [text for text in caplog.messages if "worker death: training continues" in text]
    assert ["in place" in begins[0], "with the state of a new worker, 0 batches redone" in begins[1]] == [True, True]


def test_a_shutdown_in_a_callback_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "recovered", lambda self, recovery: self.engine.stop())
    error = run(Plan(seed=1, ranks=2, nodes=(2,), samples=12, faults=(Fault("kill", "applied", count=4),))).error
    assert isinstance(error, NotActiveError)
    assert "shut the trainer down while the call 'train' has been running" in str(error)


@pytest.mark.parametrize(("at", "failures"), [((5, 5), 2), ((5, 7), None)])
def test_code_that_hangs_again_at_the_same_batch_is_not_tried_again(
    at: tuple[int, ...], failures: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank hangs before these steps, and answers where it is."""
    left, original = list(at), Worker.point

    def point(self: Worker, name: str) -> None:
        original(self, name)
        group = self.backend.group
        is_last = name == "forward" and group is not None and group.members[-1] is self
        if left and is_last and self.replica is not None and len(self.replica.steps) == left[0]:
            left.pop(0)
            self.sleep(1e6)

    monkeypatch.setattr(Worker, "point", point)
    monkeypatch.setattr(Script, "_until_done", lambda self, *given: self._train())
    faults = (Fault("slow", "applied", seconds=0.05),)  # otherwise the checks expect no failure at all
    result = run(Plan(ranks=3, nodes=(4,), samples=40, faults=faults))
    assert [each.reason for each in result.recoveries if each.reason != "growth"] == ["hang", "hang"] and not left
    if failures is None:
        assert result.error is None
    else:
        assert isinstance(result.error, HangError)
        assert f"hung {failures} times in a row at the same place" in str(result.error)


def test_a_gpu_that_stays_broken_is_used_twice() -> None:
    """A replacement has got it again. The third one keeps it from others, and a fourth joins when a machine is added."""
    plan = Plan(ranks=3, nodes=(3,), samples=120, step_s=0.3, faults=(Fault("gpu", "forward", 5, pick=1),))
    result = run(plan, tracing=True)
    assert result.error is None
    assert [each.reason for each in result.recoveries] == ["gpu failure", "growth"], "the second one is in a set-up"
    assert result.recoveries[-1].world_size_after == 3 and result.redone == 0
    assert [line.split()[1] for line in result.trace if "<- warm" in line] == ["w4", "w6"], "w5 is not set up"


def test_the_call_ends_with_an_error_when_no_gpu_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one breaks, in each process that gets it, and no machine is added."""
    monkeypatch.setattr(Schedule, "_replace", lambda self, node: None)
    monkeypatch.setattr(Script, "_until_done", lambda self, *given: self._train())
    plan = Plan(ranks=1, nodes=(1,), max_attempts=10, samples=20, faults=(Fault("gpu", "forward", 5, pick=1),))
    result = run(plan, tracing=True)
    assert isinstance(result.error, TrainingFailedError) and "the cluster has room for 0 more" in str(result.error)
    assert [line.split()[1] for line in result.trace if "<- warm" in line] == ["w2"], "w3 only holds the GPU"


def test_a_seed_always_gives_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for _ in range(2):
        simulate(0, 20, tracing=True)
        runs.append(capsys.readouterr().out)
    assert runs[0] == runs[1] and "FAULT" in runs[0]


def test_a_plan_prints_as_what_makes_it() -> None:
    plan = plan_for(17)
    assert plan.faults and eval(repr(plan), {"Plan": Plan, "Fault": Fault}) == plan


def test_a_schedule_that_fails_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS["raise_a_copy_of_the_users_error"](monkeypatch)
    faults = (Fault("kill", "formed", count=3), Fault("raise", "forward", count=9), Fault("slow", "applied"))
    plan = Plan(ranks=3, nodes=(3, 3), samples=20, script=("validate", "train", "save"), faults=faults)
    shorter = shrink(plan)
    assert kind_of(run(shorter).error) == kind_of(run(plan).error) != ""
    assert [fault.kind for fault in shorter.faults] == ["raise"] and shorter.script == ("train",)
    assert shorter.ranks == 1 and shorter.samples < plan.samples


# Each mutant breaks the protocol in one way, which its name says.


@pytest.mark.parametrize("name", ["discard_the_most_advanced_state", "merge_a_metric_twice"])
def test_a_broken_engine_is_detected(name: str) -> None:
    assert seeds_needed(name, 400)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_engine_is_detected_within_ten_thousand_seeds(name: str) -> None:
    """Most are detected within a hundred. A group rarely has workers that have loaded a state and others that have not."""
    assert seeds_needed(name, 10_000)
