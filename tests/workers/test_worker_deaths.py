"""Ray's own paragraph about a worker's end is not shown, because raysgd logs two lines. Ray's other messages are shown."""

import io
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd import ElasticConfig
from raysgd.config import WorkerResources
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.progress import Progress
from raysgd.core.protocols import SingleWorkerBackend
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop, _Case
from raysgd.workers.cluster.foreign import DeathFilter, hide_deaths_of
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.cluster.processes import LocalProcess
from raysgd.workers.events import Event, WorkerStarted
from raysgd.workers.ray_group import RayGroup
from tests.faults import Fault, Ground

PARAGRAPH = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, check the "
    "logs for the dead worker. Lease ID: 01 Worker ID: 02 Node ID: {node} Worker IP address: 10.0.0.7 Worker port: 10007 "
    "Worker PID: {pid} Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits."
)


@pytest.mark.parametrize(
    ("text", "source", "is_shown"),
    [
        (PARAGRAPH.format(node="ab12", pid=7), "raylet", False),
        (PARAGRAPH.format(node="ab12", pid=8), "raylet", True),
        (PARAGRAPH.format(node="cd34", pid=7), "raylet", True),
        (PARAGRAPH.format(node="ab12", pid=7), 7, True),  # a worker's own output
        ("The actor cannot be scheduled. Node ID: ab12 Worker PID: 7", "raylet", True),
    ],
)
def test_only_the_paragraph_about_our_worker_is_hidden(text: str, source: Any, is_shown: bool) -> None:
    shown: list[Any] = []
    hide = DeathFilter(lambda data, **more: shown.append((data, more)))
    hide.workers["ab12", 7] = math.inf
    data = {"lines": [text], "pid": source, "is_err": False}
    hide(data, ignore_prefix=False)
    assert shown == ([(data, {"ignore_prefix": False})] if is_shown else [])


def test_a_process_with_the_id_of_an_earlier_worker_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    shown: list[Any] = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, **more: shown.append(data["lines"][0]))
    hide_deaths_of("ab12", 7)
    hide_deaths_of("ab12", 8)
    hide_deaths_of("ab12", 7, for_s=-1.0)  # it was dismissed, and has ended
    lines = [PARAGRAPH.format(node="ab12", pid=pid) for pid in (7, 8)]
    for line in lines:
        worker.print_to_stdstream({"lines": [line], "pid": "raylet"})
    assert shown == lines[:1]
    hide_deaths_of("ab12", 9)
    assert set(worker.print_to_stdstream.workers) == {("ab12", 9)}


class Shown(float):
    """A time limit. While it is compared, Ray's thread shows the death of that worker, as the interpreter may let it."""

    def __gt__(self, other: object) -> bool:
        from ray._private import worker

        worker.print_to_stdstream({"lines": [PARAGRAPH.format(node="ab12", pid=8)], "pid": "raylet"})
        return True

    def __le__(self, other: object) -> bool:
        return not self > other


def test_a_death_that_is_shown_while_another_one_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, **more: None)
    hide_deaths_of("ab12", 7)
    hide_deaths_of("ab12", 8)
    worker.print_to_stdstream.workers["ab12", 7] = Shown(math.inf)
    hide_deaths_of("ab12", 9)
    assert set(worker.print_to_stdstream.workers) == {("ab12", 7), ("ab12", 9)}


class Plain:
    """An actor of the user's own."""

    def pid(self) -> int:
        return os.getpid()


def deaths_shown(shown: io.StringIO, *, expected: int) -> list[int]:
    """Kill a worker and then an actor of the user's. Return the processes in Ray's paragraphs, the latter as 0."""
    import ray

    actor: Any = ray.remote(Plain).options(num_cpus=1).remote()
    users = ray.get(actor.pid.remote())
    group = RayGroup(SingleWorkerBackend(), WorkerResources(cpus=1))
    found: list[int] = []
    try:
        group.launch(1)
        started: list[Event] = []
        while not started:
            started = [event for event in group.poll(1.0) if isinstance(event, WorkerStarted)]
        # The group does not look again. Otherwise it would let Ray end the worker, possibly before Ray knows that it has ended.
        for pid in (started[0].pid, users):  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 60
        while (users not in found or len(found) < expected) and time.monotonic() < until:
            time.sleep(0.1)
            found = [int(pid) for pid in re.findall(r"A worker died.*?Worker PID: (\d+)", shown.getvalue())]
    finally:
        group.stop()
    return [0 if pid == users else 1 for pid in found]


def test_rays_own_messages(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Ray's prints them. capsys loses what is printed while it is read, so this test reads another stream."""
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    assert deaths_shown(shown, expected=1) == [0]
    monkeypatch.setenv("RAYSGD_RAY_MESSAGES", "1")
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    assert sorted(deaths_shown(shown, expected=2)) == [0, 1]


@pytest.mark.elastic
def test_the_lines_name_rank_address_and_cause(
    ray_cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    here = re.escape(ray.util.get_node_ip_address())
    ground = Ground(tmp_path, num_workers=3, use_gpu=False, elastic=ElasticConfig(grow=False))
    with ground.trainer as trainer:
        for fault in (Fault(2, 2, "term"), Fault(1, 3)):
            ground.arm(fault)
            trainer.train()
            assert ground.fired() == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    expected = [
        rf"preemption: rank 2 on node {here} received SIGTERM, so its machine will be stopped",
        r"preemption: rank 2 left, training continues with 2 workers \(3 before\), in place, .*",
        rf"worker death in epoch 2, batch \d+: rank 1 of 2 failed on node {here} \((its process (was )?ended |ActorDiedError).*\)",
        r"worker death: training continues with 1 worker \(2 before\), in place, .*",
    ]
    found = [line for line in lines if line.startswith(("preemption", "worker death"))]
    assert len(found) == len(expected), found
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("os.abort()", "was ended by SIGABRT"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_the_system_tells_how_a_process_has_ended(end: str, how: str) -> None:
    script = f"import os; os.read(0, 1); {end}"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        seen = LocalProcess(process.pid)
        assert seen.how_it_ended() == "", "it has not ended"
        process.communicate(b"1")
        linux = tuple(map(int, platform.release().split(".")[:2])) if sys.platform == "linux" else (0, 0)
        assert seen.how_it_ended() == (how if linux >= (6, 15) else "")
    assert seen.how_it_ended() == (how if linux >= (6, 15) else ""), "also when the process is gone"


def test_waiting_for_new_workers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """All workers failed, and four are starting: every look at them was a line of the log."""
    group = SimpleNamespace(room=lambda: Room(0, 0, grows=True, needs={"CPU": (1, 0)}))
    parts: Any = SimpleNamespace(
        group=group, in_place=True, clock=lambda: 0.0, pump=lambda seconds: 0, on_wait=lambda what: None
    )
    loop = RecoveryLoop(parts, parts, parts, parts, parts, elastic=ElasticConfig(), jitter=lambda: 0.0)
    seen: Any = SimpleNamespace(survivors=0, starting=4, ready=0, free=0)
    case = _Case(parts, parts, Progress(), 4, 0.0)
    for _ in range(3):
        loop._wait(0.0, seen, case)
    assert caplog.messages == ["waiting for 4 new workers to start, which need 4 CPU (0 free)"]


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (Progress(), "growth: no new worker joined, training continues with 2 workers (2 before), after 20.20 s"),
        (
            Progress(epoch=1),
            "growth: no new worker joined, training continues with 2 workers (2 before), in place, 0 batches redone, after 20.20 s",
        ),
    ],
)
def test_the_line_of_a_growth_in_which_no_worker_could_join(
    at: Progress, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a batch or a commit, nothing could be redone: a training function starts again."""
    log = RecoveryLog(lambda recovery: None)
    log.record(Recovery("growth", (), 2, 2, True, 0, 20.2, epoch=at.epoch, batch=at.batches, step=at.step))
    assert caplog.messages == [said]
