"""Breaks things in a local cluster on a seeded schedule: processes, connections, nodes, a disk, and the driver itself."""

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traces
from harming import why_no_memory_limit
from subjects import order

# Each kind, and how often it is chosen in relation to the others. Those that hit by waiting are rare, because they take long.
KINDS = {
    "collective": 8,
    "exception": 8,
    "loader": 6,
    "kill": 4,
    "disk": 4,
    "segfault": 2,
    "abort": 2,
    "exit": 2,
    "memory": 2,
    "slow": 1,
    "two at once": 1,
    "stop": 1,
    "gil": 1,
    "half-open": 1,
    "node": 1,
    "raylet": 1,
    "driver": 1,
}
ORDERED = ("segfault", "abort", "exit", "memory", "gil", "half-open", "collective", "exception")
STEPPED_LATELY_S = 2.0
LOOK_S = 0.05
# What nothing here needs: each of these is one more Python process to start.
PLAIN = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
FULL_S = 2.0
PAUSES = "kill -STOP {0}; sleep {1}; kill -CONT {0}"


class LocalNodes:
    """A Ray cluster of several nodes on this machine. The head holds no workers; others come and go. Without others, it does.

    It keeps its files, and its address, in a folder of its own: nobody else's `ray.init()` finds it.
    """

    def __init__(self, folder: str, *, cpus: int, at_least: int, at_most: int) -> None:
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        # Ray sets a signal handler when it starts a node, which only a main thread may do; ours is training.
        ray._private.utils.set_sigterm_handler = lambda handler: None
        self._cpus, self.at_least, self.at_most, self._trace = cpus, at_least, at_most, folder
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0 if at_most else cpus, **PLAIN})
        self._nodes: list[Any] = []
        self._without_raylet: list[int] = []  # workers
        for _ in range(at_most):
            self.add()
        ray.init(address=self.cluster.address, log_to_driver=False)

    @property
    def count(self) -> int:
        return len(self._nodes)

    def add(self) -> None:
        self._nodes.append(self.cluster.add_node(num_cpus=self._cpus, include_log_monitor=False))

    def remove(self, number: int) -> list[int]:
        """As if a machine's plug was pulled: its processes go with it, stopped ones too. Returns the workers."""
        node = self._nodes.pop(number)
        workers = self._workers(node)
        self.cluster.remove_node(node, allow_graceful=False)
        for worker in workers:
            send(worker, signal.SIGKILL)
        return workers

    def kill_raylet(self, number: int) -> list[int]:
        """Kill only Ray's own process of a node. The node is gone for Ray; its workers, returned, must end themselves.
        Those that are stopped cannot: the cluster ends them when it shuts down."""
        node = self._nodes.pop(number)
        workers = self._workers(node)
        self._without_raylet += workers
        send(raylet(node), signal.SIGKILL)
        return workers

    def _workers(self, node: Any) -> list[int]:
        """Forks of another process are not children of their raylet, but they have noted which one it is."""
        return sorted({*children(raylet(node)), *traces.workers_of(self._trace, raylet(node))})

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()
        for worker in self._without_raylet:
            if state(worker) == "T":
                send(worker, signal.SIGKILL)


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


class Disk:
    """A small file system for logs and checkpoints, which can be filled. Without the right to mount one, it is a
    folder that cannot."""

    def __init__(self, folder: Path, megabytes: int = 64) -> None:
        folder.mkdir()
        self.folder, self._filler = folder, folder / "filler"
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.why_not = f"no file system can be mounted: {done.stderr.strip()}" if done.returncode else ""

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if not self.why_not:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@dataclass(frozen=True)
class Fault:
    """When it was injected (monotonic), what it was, and the processes that it hit."""

    at: float
    kind: str
    hit: tuple[int, ...] = ()


class Disturber:
    """Owns the schedule and one thread. Strikes only while `allowed` is set: not while results are read."""

    def __init__(
        self, nodes: LocalNodes, disk: Disk, trace: str, *, seed: int, every_s: float, at_most: int, hang_s: float
    ) -> None:
        self._nodes, self._disk, self._trace = nodes, disk, Path(trace)
        self._random = random.Random(seed)
        self._every_s, self._at_most, self._hang_s = every_s, at_most, hang_s
        self._until = 0.0
        self._ended, self._stopped = threading.Event(), threading.Event()
        self.allowed = threading.Event()
        self.striking = threading.Lock()
        self.faults: list[Fault] = []
        self.troubles: list[str] = []
        self.broken: list[str] = []
        lacking = {"memory": why_no_memory_limit(), "disk": disk.why_not}
        if not nodes.at_most:
            lacking |= dict.fromkeys(("node", "raylet"), "all workers are on the node of the driver")
        self.left_out = {kind: why for kind, why in lacking.items() if why}
        self._thread = threading.Thread(target=self._stay, name="disturber", daemon=True)

    @property
    def done(self) -> bool:
        return len(self.faults) >= self._at_most or time.monotonic() > self._until

    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.faults))

    def start(self, seconds: float) -> None:
        """Strike for so long at most: what is left of the last epoch is calm."""
        self._until = time.monotonic() + seconds
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
        kinds = [kind for kind in KINDS if kind not in self.left_out]
        kind = self._random.choices(kinds, [KINDS[name] for name in kinds])[0]
        began = time.monotonic()
        try:
            if self._nodes.count < self._nodes.at_most and self._random.random() < 0.5:
                self._nodes.add()
            if kind in ("node", "raylet") and self._nodes.count <= self._nodes.at_least:
                kind = "kill"
            hit = self._actions()[kind]()
        except Exception as error:  # a fault that could not be injected is reported; it does not end the run
            self.troubles.append(f"{kind}: {type(error).__name__}: {error}")
            return
        if hit is not None:
            self.faults.append(Fault(began, kind, tuple(hit)))

    def _actions(self) -> dict[str, Callable[[], list[int] | None]]:
        """What each kind does. It returns the processes that it hit, or None if it could not be done."""
        ordered: dict[str, Callable[[], list[int] | None]] = {kind: self._order(kind) for kind in ORDERED}
        return ordered | {
            "kill": lambda: self._signal(signal.SIGKILL, 1),
            "stop": lambda: self._signal(signal.SIGSTOP, 1),
            "two at once": lambda: self._signal(signal.SIGKILL, 2),
            "slow": self._slow,
            "loader": self._loader,
            "disk": self._fill,
            "node": lambda: self._nodes.remove(self._random.randrange(self._nodes.count)),
            "raylet": lambda: self._nodes.kill_raylet(self._random.randrange(self._nodes.count)),
            "driver": self._pause,
        }

    def _active(self) -> list[int]:
        """The workers that have taken a step just now, in a random order."""
        workers = sorted(worker for worker in traces.active(self._trace, STEPPED_LATELY_S) if state(worker) in "RSD")
        self._random.shuffle(workers)
        return workers

    def _signal(self, number: signal.Signals, count: int) -> list[int] | None:
        workers = self._active()[:count]
        if len(workers) < count:
            return None
        return [worker for worker in workers if send(worker, number)] or None

    def _order(self, kind: str) -> Callable[[], list[int] | None]:
        def ordered() -> list[int] | None:
            workers = self._active()[:1]
            done = workers and order(str(self._trace), workers[0], kind, 2 * self._hang_s)
            return workers if done else None

        return ordered

    def _slow(self) -> list[int] | None:
        """A worker runs one fifth of the time, for less than the limit, and must not be ended for it."""
        workers = self._active()[:1]
        if not workers:
            return None
        until = time.monotonic() + self._hang_s / 2
        while time.monotonic() < until and send(workers[0], signal.SIGSTOP):
            time.sleep(0.2)
            send(workers[0], signal.SIGCONT)
            time.sleep(0.05)
        ended = not alive(workers[0])
        if ended and not any(workers[0] in fault.hit for fault in self.faults):
            self.broken.append(f"process {workers[0]} was ended because it was slow")
        return []

    def _loader(self) -> list[int] | None:
        """Kill the process in which a worker's DataLoader reads."""
        for worker in self._active():
            forks = [child for child in children(worker) if name_of(child) == name_of(worker)]
            if forks:
                send(forks[0], signal.SIGKILL)
                return []
        return None

    def _fill(self) -> list[int] | None:
        """For two seconds. Whoever trains may make room earlier."""
        self._disk.fill()
        self._ended.wait(FULL_S)
        self._disk.make_room()
        return []

    def _pause(self) -> list[int] | None:
        """Stop this process, in which the trainer is, for longer than a worker may be silent."""
        pause_s = 1.4 * self._hang_s
        subprocess.run(["sh", "-c", PAUSES.format(os.getpid(), pause_s)], check=True)
        return []


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


def name_of(process: int) -> str:
    """A fork of a process has the same command line."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""
