"""If a replacement is overdue, a second one is started, and the first that is ready is used."""

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.config import Limits
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import GpuFault, WorkerFailed
from raysgd.engine.replacements import OVERDUE_S, Replacements
from raysgd.workers.events import CallEnded
from tests.engine.fake_group import FakeGroup, Ok, WorkerEnded, started

START_S = 100.0


class Scenario:
    """Replacements with a fake group and a clock that the test moves."""

    def __init__(self, room: int, spares: int = 0) -> None:
        self.now = 1000.0
        self.group = FakeGroup(room)
        self.table = self.group.table(lambda: self.now)
        limits = Limits(start_s=START_S, setup_s=60, join_s=60, collective_s=60, hang_s=60)
        generation: Any = SimpleNamespace(limits=limits, in_place=True, warm_up_arguments=dict)
        self.replacements = Replacements(self.table, generation, spares=spares)

    def after(self, seconds: float, *events: Any) -> None:
        self.now += seconds
        self.group.events += events
        for _ in range(2):  # the first starts the set-up, and the second one sees its end
            self.table.pump(0)
            self.replacements.tick()


@pytest.fixture
def scenario() -> Scenario:
    return Scenario(room=2)


def test_an_overdue_replacement_is_not_counted_while_there_is_room_for_another(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S - 1)
    assert scenario.replacements.starting == 1
    scenario.after(2)
    assert scenario.replacements.starting == 0, "a second one may be started"
    assert scenario.group.dismissed == [], "it may still start"


def test_without_room_for_another_it_is_only_awaited(scenario: Scenario) -> None:
    scenario.replacements.launch(2)
    scenario.after(OVERDUE_S + 1)
    assert scenario.replacements.starting == 2


def test_one_that_has_taken_the_state_of_the_group_joins_before_others(scenario: Scenario) -> None:
    scenario.group.outcomes = {"warm": Ok(progress=Progress(lacks_state=True)), "load": Ok(progress=Progress(step=3))}
    scenario.replacements.launch(2)
    scenario.after(3, started("w1"), started("w2"))
    assert scenario.replacements.ready_workers == ["w1", "w2"]
    scenario.table.expect("w2", scenario.group.submit("w2", "load", {}))  # for a generation that was not formed
    scenario.table.pump(0)
    assert scenario.replacements.take(1) == ["w2"] and scenario.group.dismissed == ["w1"]


def test_if_the_second_one_is_first_the_overdue_one_is_dismissed(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.launch(1)
    scenario.after(3, started("w2"))
    assert scenario.replacements.ready == 1
    assert scenario.replacements.take(1) == ["w2"]
    assert scenario.group.dismissed == ["w1"]


def test_an_overdue_replacement_is_kept_while_the_group_has_places(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.launch(1)
    scenario.after(3, started("w2"))
    assert scenario.replacements.take(2) == ["w2"]
    scenario.after(3, started("w1"))
    assert scenario.replacements.take(1) == ["w1"]
    assert scenario.group.dismissed == []


def test_if_the_overdue_one_is_first_the_second_one_is_dismissed(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.look(1)
    scenario.after(1, started("w1"))
    scenario.replacements.look(1)
    assert scenario.group.dismissed == ["w2"] and scenario.replacements.take(1) == ["w1"]


def test_if_both_come_up_between_two_looks_the_second_one_is_dismissed(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.look(1)
    scenario.after(1, started("w1"), started("w2"))
    scenario.replacements.look(1)
    assert scenario.group.dismissed == ["w2"] and scenario.replacements.ready_workers == ["w1"]


def test_if_the_overdue_one_joins_in_a_recovery_the_second_one_is_dismissed(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.launch(1)
    scenario.after(1, started("w1"))
    assert scenario.replacements.take(1) == ["w1"] and scenario.group.dismissed == ["w2"]


def test_a_replacement_that_exceeds_the_limit_is_dismissed(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    scenario.replacements.launch(1)
    scenario.after(START_S + 1)
    assert scenario.replacements.starting == 0
    assert scenario.group.dismissed == ["w1"]
    assert "did not start within 100 s" in caplog.text


def test_the_second_one_is_overdue_later_than_the_first(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.group.free = 2
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    assert scenario.replacements.starting == 1, "the machine may just be slow"
    scenario.after(OVERDUE_S)
    assert scenario.replacements.starting == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_replacement_that_fails_while_it_starts_is_dismissed(scenario: Scenario, late: bool) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1 if late else 1)
    scenario.after(1, WorkerEnded("w1", "killed"))
    assert scenario.replacements.starting == 0
    assert scenario.group.dismissed == ["w1"]


def test_dismissing_all_includes_overdue_ones(scenario: Scenario) -> None:
    scenario.replacements.launch(1)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.dismiss_all()
    assert scenario.group.dismissed == ["w1"]


# -- hot spares ---------------------------------------------------------------------------------------


def test_an_overdue_spare_is_dismissed_if_the_second_one_is_ready() -> None:
    scenario = Scenario(room=2, spares=1)
    scenario.replacements.look(0)
    scenario.after(OVERDUE_S + 1)
    scenario.replacements.look(0)
    scenario.after(1, started("w2"))
    scenario.replacements.look(0)
    assert scenario.replacements.ready_workers == ["w2"] and scenario.group.dismissed == [], "w1 may still start"
    scenario.after(1, started("w1"))
    scenario.replacements.look(0)
    assert scenario.group.dismissed == ["w1"]


def test_spares_that_are_starting_stay_if_others_join() -> None:
    scenario = Scenario(room=2, spares=1)
    scenario.replacements.look(1)
    scenario.after(1, started("w1"))
    assert scenario.replacements.take(1) == ["w1"] and scenario.group.dismissed == []


def spares(room: int, count: int) -> Scenario:
    """Return a scenario with this many spares, of which those that have room are ready."""
    scenario = Scenario(room, spares=count)
    scenario.replacements.look(0)
    have_room = min(room, count)
    scenario.after(1, *(started(f"w{1 + number}") for number in range(have_room)))
    assert scenario.replacements.ready == have_room
    return scenario


def test_spares_are_ready_before_they_are_needed_and_are_started_again() -> None:
    scenario = spares(room=3, count=2)
    assert scenario.group.free == 1
    assert not scenario.replacements.should_join(missing=0), "no rank waits for them"
    assert scenario.replacements.should_join(missing=1)
    assert scenario.replacements.take(1) == ["w1"]
    assert scenario.group.dismissed == [], "the other one stays"
    scenario.after(1)
    scenario.replacements.look(0)
    assert (scenario.replacements.ready, scenario.replacements.starting, scenario.group.free) == (1, 1, 0)


def test_a_cluster_without_room_for_the_spares_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    scenario = spares(room=1, count=2)
    for _ in range(3):
        scenario.after(1)
        scenario.replacements.look(0)
    assert caplog.text.count("training runs without 1 of 2 hot spares until there is room for 1 CPU (0 free)") == 1
    scenario.group.free = 1
    scenario.after(1)
    scenario.replacements.look(0)
    assert scenario.replacements.starting == 1


def test_a_spare_that_dies_is_replaced_after_a_pause_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    scenario = spares(room=9, count=1)
    scenario.after(1, WorkerEnded("w1", "killed"))
    assert "a replacement worker was lost while it waited (its process ended); trying again in 1.0 s" in caplog.text
    scenario.replacements.look(0)
    assert scenario.replacements.starting == 0, "not yet"
    scenario.after(1.1)
    scenario.replacements.look(0)
    assert scenario.replacements.starting == 1
    scenario.after(1, WorkerEnded("w2", "killed"))
    assert "trying again in 2.0 s" in caplog.text


def test_a_spare_on_a_machine_that_will_be_stopped_is_replaced_at_once() -> None:
    scenario = spares(room=9, count=1)
    scenario.replacements.dismiss_preempted({"another node"})
    assert scenario.group.dismissed == []
    scenario.replacements.dismiss_preempted({"node"})
    assert scenario.group.dismissed == ["w1"]
    scenario.after(1)
    scenario.replacements.look(0)
    assert scenario.replacements.starting == 1


# -- broken GPUs --------------------------------------------------------------------------------------

BROKEN = WorkerFailed("CUDA error: uncorrectable ECC error", "gpu failure", fault=GpuFault("GPU-5f1c"))
ASSERTED = WorkerFailed(
    "CUDA error: device-side assert triggered", "gpu failure", fault=GpuFault("GPU-5f1c", by_kernel=True)
)


def test_a_replacement_on_a_gpu_that_has_failed_twice_only_holds_it(caplog: pytest.LogCaptureFixture) -> None:
    """The GPU breaks in the set-up of two replacements. Ray gives it to a third, which must not use it, and must not end."""
    scenario = Scenario(room=3)
    scenario.group.outcomes = {"warm": BROKEN}
    for worker in ("w1", "w2"):
        scenario.replacements.launch(1)
        scenario.after(1, started(worker, "10.0.0.7", gpu="3"))
        assert scenario.group.dismissed[-1] == worker and scenario.replacements.starting == 0
    cause = "GPU 3 (GPU-5f1c) on node 10.0.0.7: CUDA error: uncorrectable ECC error"
    assert caplog.text.count(f"a replacement worker did not start ({cause})") == 2
    assert caplog.text.count("GPU 3 on node 10.0.0.7 has failed 2 times: raysgd starts no more workers on it") == 1
    scenario.group.outcomes = {}
    scenario.replacements.launch(1)
    scenario.after(1, started("w3", "10.0.0.7", gpu="3"))
    assert (scenario.replacements.ready, scenario.replacements.starting) == (0, 0)
    assert scenario.group.dismissed == ["w1", "w2"], "otherwise Ray would give its GPU to the next one"
    assert "GPU 3 on node 10.0.0.7 has failed too often, and a new worker was started on it" in caplog.text
    scenario.replacements.dismiss_all()
    assert scenario.group.dismissed == ["w1", "w2"]
    scenario.replacements.launch(1)
    scenario.after(1, started("w4", "10.0.0.7", gpu="2"))
    assert scenario.replacements.ready_workers == ["w4"]


def test_the_end_of_a_broken_worker_does_not_hide_why(scenario: Scenario) -> None:
    scenario.group.outcomes = {"warm": BROKEN}
    scenario.table.launch(1)
    scenario.group.events += [started("w1", gpu="3")]
    scenario.table.pump(0)
    scenario.table.expect("w1", scenario.group.submit("w1", "warm", {}))
    scenario.group.events += [WorkerEnded("w1", "its process ended with exit code 79")]
    scenario.table.pump(0)
    failure = scenario.table.failure_of(scenario.table["w1"])
    assert (failure.reason, failure.cause.partition(" on ")[0]) == ("gpu failure", "GPU 3 (GPU-5f1c)")


def test_errors_that_a_kernel_may_have_caused_exclude_no_gpu(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken kernel fails on each GPU."""
    for number in (1, 2):
        (worker,) = scenario.table.launch(1)
        scenario.group.events += [started(worker, gpu="3"), CallEnded(worker, number, ASSERTED)]
        scenario.table.pump(0)
        scenario.table.dismiss(worker)
    assert not scenario.table.gpu_failures.exclude([("node", "3")]) and "failed 2 times" not in caplog.text
