"""Processes that user code forks in a worker: they end with the worker, and not with the thread that forked them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd.torch import TorchTrainer
from tests.faults import alive, ended
from tests.torch.small import Line

pytestmark = pytest.mark.elastic


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=Line, num_workers=2) as trainer:
        yield trainer


def first_folders(operator: Any) -> list[Any]:
    """Return the socket folder of each new process, beginning with the first one that this worker creates."""
    return [multiprocessing.get_context(kind).Process()._config.get("tempdir") for kind in ("fork", "spawn")]  # type: ignore[attr-defined]


def test_loader_processes_keep_their_sockets_in_the_workers_folder(trainer: TorchTrainer) -> None:
    """The worker removes its folder before it is killed. Otherwise each process that Python starts would make its own."""
    folders = trainer.apply_all_operators(first_folders)
    assert all(len(set(each)) == 1 and Path(each[0]).name.startswith("raysgd-worker-") for each in folders)
    assert len({each[0] for each in folders}) == 2, "one for each worker"


def sleep_in_a_fork() -> int:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(120,), daemon=True)
    process.start()
    assert process.pid is not None
    return process.pid


def sleep_in_a_program(**options: Any) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], **options).pid


def fork_and_execute() -> int:
    """With a `preexec_fn`, subprocess forks and runs Python in the child before the program."""
    return sleep_in_a_program(preexec_fn=os.getpid)


def in_a_helper_thread(start: Callable[[], int]) -> Callable[[Any], int]:
    def call(operator: Any) -> int:
        found: list[int] = []

        def run() -> None:
            found.append(start())
            time.sleep(0.2)  # the process is up before the thread ends

        helper = threading.Thread(target=run)
        helper.start()
        helper.join()
        return found[0]

    return call


def in_the_main_thread(start: Callable[[], int]) -> Callable[[Any], int]:
    return lambda operator: start()


@pytest.mark.parametrize(
    "start", [sleep_in_a_fork, sleep_in_a_program, fork_and_execute], ids=["fork", "program", "preexec_fn"]
)
def test_a_process_outlives_the_helper_thread_that_started_it(trainer: TorchTrainer, start: Callable[[], int]) -> None:
    pids = trainer.apply_all_operators(in_a_helper_thread(start))
    try:
        time.sleep(0.5)  # the threads have ended before the answers arrived
        assert all(alive(pid) for pid in pids), "a process was killed when the thread that started it ended"
        # Threads that start and end later do not end it either.
        trainer.apply_all_operators(in_a_helper_thread(os.getpid))
        time.sleep(0.2)
        assert all(alive(pid) for pid in pids)
    finally:
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_sigterm_ends_a_forked_process(trainer: TorchTrainer) -> None:
    """SIGTERM is a preemption notice for a worker, but not for a process that was forked from it."""
    for where in (in_the_main_thread, in_a_helper_thread):
        for pid in trainer.apply_all_operators(where(sleep_in_a_fork)):
            os.kill(pid, signal.SIGTERM)
            assert ended(pid)
    assert trainer.train()["num_samples"] > 0 and trainer.recoveries == []


def signal_during_forks(operator: Any) -> int:
    """Send SIGTERM to many new processes at once, before they have run any Python. Return how many do not end."""
    left = 0
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        left += os.waitstatus_to_exitcode(status) != -signal.SIGTERM
    return left


def test_sigterm_is_not_lost_while_a_process_is_forked(trainer: TorchTrainer) -> None:
    assert trainer.apply_all_operators(signal_during_forks) == [0, 0]
    assert trainer.train()["num_samples"] > 0 and trainer.recoveries == []


def test_forked_processes_end_with_a_killed_worker(trainer: TorchTrainer) -> None:
    """This holds for every thread that forked them: their copies of the worker's sockets would let its peers wait."""
    main = trainer.apply_all_operators(in_the_main_thread(sleep_in_a_fork))
    helper = trainer.apply_all_operators(in_a_helper_thread(sleep_in_a_fork))
    assert all(alive(pid) for pid in (*main, *helper))
    for worker in trainer.apply_all_workers(os.getpid):
        os.kill(worker, signal.SIGKILL)
    assert ended(*main), "a process that the main thread forked outlived its worker"
    assert ended(*helper), "a process that a helper thread forked outlived its worker"
