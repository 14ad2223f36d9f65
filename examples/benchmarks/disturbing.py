"""Breaks things in a local cluster on a seeded schedule: kills and stops workers, removes and adds nodes."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traces

__all__ = ["Disturber", "LocalNodes", "alive", "children", "send", "state"]

WEIGHTS = {"kill": 6, "stop": 2, "remove node": 2, "add node": 2}
STEPPED_LATELY_S = 2.0
LOOK_S = 0.05


class LocalNodes:
    """A Ray cluster of several nodes on this machine. The head holds no workers; others come and go.

    It keeps its files, and its address, in a folder of its own: nobody else's `ray.init()` finds it.
    """

    def __init__(self, folder: str, *, cpus: int, at_least: int, at_most: int) -> None:
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        # Ray sets a signal handler when it starts a node, which only a main thread may do; ours is training.
        ray._private.utils.set_sigterm_handler = lambda handler: None
        self._cpus, self.at_least, self.at_most = cpus, at_least, at_most
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: list[Any] = []
        for _ in range(at_most):
            self.add()
        ray.init(address=self.cluster.address, log_to_driver=False)

    @property
    def count(self) -> int:
        return len(self._nodes)

    def add(self) -> None:
        self._nodes.append(self.cluster.add_node(num_cpus=self._cpus))

    def remove(self, number: int) -> None:
        """As if a machine's plug was pulled: its processes go with it, stopped ones too."""
        node = self._nodes.pop(number)
        workers = children(node.all_processes["raylet"][0].process.pid)
        self.cluster.remove_node(node, allow_graceful=False)
        for worker in workers:
            send(worker, signal.SIGKILL)

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@dataclass(frozen=True)
class Fault:
    """When it was injected (monotonic), what it was, and whom it hit."""

    at: float
    kind: str
    target: str


class Disturber:
    """Owns the schedule and one thread. Strikes only while `allowed` is set: not while results are read."""

    def __init__(self, nodes: LocalNodes, trace: str, *, seed: int, every_s: float, at_most: int) -> None:
        self._nodes, self._trace = nodes, Path(trace)
        self._random = random.Random(seed)
        self._every_s, self._at_most = every_s, at_most
        self._ended, self._stopped = threading.Event(), threading.Event()
        self.allowed = threading.Event()
        self.striking = threading.Lock()
        self.faults: list[Fault] = []
        self.troubles: list[str] = []
        self._thread = threading.Thread(target=self._stay, name="disturber", daemon=True)

    @property
    def done(self) -> bool:
        return len(self.faults) >= self._at_most

    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.faults))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._stopped.wait(timeout=60)

    def _stay(self) -> None:
        """Ray ends the processes of a node with the thread that started them: this one stays to the end."""
        self._run()
        self._stopped.set()
        threading.Event().wait()

    def _run(self) -> None:
        while not self.done:
            # Between half and one and a half of the mean: some faults also hit recoveries under way.
            if self._ended.wait(self._every_s * (0.5 + self._random.random())):
                return
            while not self.allowed.wait(LOOK_S):
                if self._ended.is_set():
                    return
            with self.striking:
                if self.allowed.is_set():
                    self._strike()

    def _strike(self) -> None:
        kinds = list(WEIGHTS)
        kind = self._random.choices(kinds, [WEIGHTS[name] for name in kinds])[0]
        if kind == "remove node" and self._nodes.count <= self._nodes.at_least:
            kind = "add node"
        if kind == "add node" and self._nodes.count >= self._nodes.at_most:
            kind = "kill"
        try:
            target = self._actions()[kind]()
        except Exception as error:  # a fault that could not be injected is reported; it does not end the run
            self.troubles.append(f"{kind}: {type(error).__name__}: {error}")
            return
        if target:
            self.faults.append(Fault(time.monotonic(), kind, target))

    def _actions(self) -> dict[str, Callable[[], str]]:
        return {
            "kill": lambda: self._signal(signal.SIGKILL),
            "stop": lambda: self._signal(signal.SIGSTOP),
            "remove node": self._remove,
            "add node": self._add,
        }

    def _signal(self, number: signal.Signals) -> str:
        """One of the workers that have taken a step just now."""
        workers = sorted(traces.active(self._trace, STEPPED_LATELY_S))
        if not workers:
            return ""
        worker = self._random.choice(workers)
        return f"process {worker}" if send(worker, number) else ""

    def _remove(self) -> str:
        number = self._random.randrange(self._nodes.count)
        self._nodes.remove(number)
        return f"node {number}"

    def _add(self) -> str:
        self._nodes.add()
        return f"node {self._nodes.count - 1}"


def send(process: int, number: signal.Signals) -> bool:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return False
    return True


def state(process: int) -> str:
    """The kernel's letter for it: R and S run, T is stopped, Z is a zombie; X: there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(process: int) -> bool:
    return state(process) not in "ZX"


def children(parent: int) -> list[int]:
    """The processes that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found
