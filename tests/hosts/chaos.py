"""Random faults of hosts and of the workers on them, while three workers train, and whether each sample was used once.

    python -m tests.hosts.chaos --faults 200 --seed 1

The first of four hosts runs the script, and has no worker. A host that has failed is started again before the next fault. After
each epoch, the samples that the weights have seen are compared with the data set, and the weights of the ranks with each
other. At the end, the history of all steps is checked.

Exit status 1: a sample was lost or used twice, weights differed, the history is wrong, training failed, or not all faults
could be injected.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.histories import Line, checked, write
from tests.hosts.hosts import Host, Hosts
from tests.hosts.parts import begin, found_by

# Each kind, and how often it is chosen in relation to the others. `hang_timeout_s` is 20: a host that acknowledges nothing for 10 s
# has failed.
KINDS = {
    "a worker is killed": 6,
    "two workers are killed": 2,
    "a host loses its power": 3,
    "a host ends": 2,
    "a host is unplugged for 4 s": 3,
    "a host is unplugged for 15 s": 2,
    "what a host sends is lost for 15 s": 1,
    "the script's host is unplugged for 4 s": 1,
    "a host stops for 4 s": 2,
    "a host loses 5 % of the packets for 8 s": 2,
    "a host sends 2 Mbit/s for 8 s": 2,
    "Ray's process on a host is killed": 1,
    "a worker is stopped": 1,
    "a worker reads address 0": 1,
    "a worker calls abort()": 1,
    "a worker ends silently": 1,
    "a worker holds Python's lock for 40 s": 1,
    "nothing reaches a worker": 1,
    "a worker's connections to the others end": 3,
    "an exception is raised anywhere in a worker": 3,
}
HARMS = (
    "segfault",
    "abort",
    "exit",
    "gil",
    "half-open",
    "collective",
    "exception",
)  # the same, as tests/harming.py names them
OBEYS_S = 5.0  # in a batch of its training
EVERY_S = 3.0  # from the end of a fault to the next one, on average
SAMPLES = 2000  # of an epoch, as driver.py has them
END_S = 300.0  # for the first epoch and the last one


class Disturber:
    """Owns the schedule, which the seed decides, and a thread. Ends the training after its last fault."""

    def __init__(self, hosts: Hosts, *, faults: int, seed: int, minutes: float) -> None:
        self._hosts, self._count, self._random = hosts, faults, random.Random(seed)
        self._until = time.monotonic() + 60 * minutes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disturber")
        self.faults: Counter[str] = Counter()
        self.steps: list[Line] = []  # the history of hosts that have ended
        self.troubles: list[str] = []

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        actions = self._actions()
        try:
            while self.faults.total() < self._count and time.monotonic() < self._until:
                if self._ended.wait(EVERY_S * (0.5 + self._random.random())):
                    return
                kind = self._random.choices([*KINDS], [*KINDS.values()])[0]
                try:
                    self._start_missing()
                    actions[kind](self._random.choice(self._hosts.all[1:]))
                    self.faults[kind] += 1
                    print(f"{self.faults.total()}: {kind}", file=sys.stderr, flush=True)
                except Exception as error:  # a fault that could not be injected is reported, and does not end the run
                    self.troubles.append(f"{kind}: {type(error).__name__}: {error}")
            self._ended.wait(4 * EVERY_S)  # what the last one does is seen
        finally:
            self._hosts[0].call("touch", "/tmp/last")

    def _start_missing(self) -> None:
        for host in self._hosts.all[1:]:
            if not host.runs:
                host.boot()
                self._hosts.name_all()
                host.start_ray(head=self._hosts[0])

    def _actions(self) -> dict[str, Callable[[Host], None]]:
        others = self._hosts.all
        actions: list[Callable[[Host], None]] = [
            lambda host: send(host, "ray::WorkerActor", signal.SIGKILL),
            self._kill_two,
            lambda host: self._lose(host, host.kill),
            lambda host: self._lose(host, host.end),
            lambda host: self._during(host.unplugged(), 4),
            lambda host: self._during(host.unplugged(), 15),
            lambda host: self._during(host.without_route_to(*(each for each in others if each is not host)), 15),
            lambda host: self._during(self._hosts[0].unplugged(), 4),
            lambda host: self._during(host.paused(), 4),
            lambda host: self._during(host.losing(0.05), 8),
            lambda host: self._during(host.rate(2), 8),
            self._kill_raylet,
            lambda host: send(host, "ray::WorkerActor", signal.SIGSTOP),
            *(functools.partial(order, kind=kind) for kind in HARMS),
        ]
        return dict(zip(KINDS, actions, strict=True))

    def _during(self, fault: AbstractContextManager[None], seconds: float) -> None:
        with fault:
            self._ended.wait(seconds)

    def _kill_two(self, host: Host) -> None:
        other = self._random.choice([each for each in self._hosts.all[1:] if each is not host])
        for each in (host, other):
            send(each, "ray::WorkerActor", signal.SIGKILL)

    def _kill_raylet(self, host: Host) -> None:
        """Ray counts the host as failed then, so it is started again, after its workers have had time to end."""
        send(host, "raylet/raylet ", signal.SIGKILL)
        self._ended.wait(5)
        self._lose(host, host.end)

    def _lose(self, host: Host, end: Callable[[], None]) -> None:
        """End a host, after its steps were read: its files go with it."""
        self.steps += steps_on(host)
        end()


def send(host: Host, name: str, number: signal.Signals) -> None:
    """Send this signal to each process of this name on a host."""
    found = host.processes(name)
    if not found:
        raise ProcessLookupError(f"there is no {name} on {host.name}")
    for each in found:
        each.send_signal(number)


def order(host: Host, kind: str) -> None:
    """Have a worker on this host do this to itself. `ObeyingOperator` reads the file."""
    host.call("sh", "-c", f"echo {kind} 40 > /tmp/order.new && mv /tmp/order.new /tmp/order")
    deadline = time.monotonic() + OBEYS_S
    while time.monotonic() < deadline:
        if host.call("sh", "-c", "ls /tmp/order 2> /dev/null || true") == "":
            return
        time.sleep(0.1)
    host.call("rm", "-f", "/tmp/order")
    raise ProcessLookupError(f"no worker on {host.name} trains")


def steps_on(host: Host) -> list[Line]:
    """Return the steps that the workers of this host have applied. A killed one may have left half a line."""
    lines = host.call("sh", "-c", "cat /tmp/history.jsonl 2> /dev/null || true").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def wrong_in(steps: list[Line], state: str, snapshots: list[int]) -> str:
    """Return what is wrong in the history of all hosts together, which have one clock. The last state is that of the
    script's last epoch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        write(path, event="begin", samples=SAMPLES)
        for each in sorted(steps, key=lambda line: line["time"]):
            write(path, **each)
        write(path, event="end", state=state, snapshots=snapshots)
        return checked(path)[1]


def chaos(*, faults: int, seed: int, minutes: float = 60.0) -> dict[str, Any]:
    """Return what was done, and what was found."""
    began = time.monotonic()
    with Hosts(4) as hosts:
        hosts.start_ray(head_cpus=0)
        with begin(hosts[0], "storm", limit_s=60 * minutes + END_S) as script:
            script.until("now epoch 1")
            with Disturber(hosts, faults=faults, seed=seed, minutes=minutes) as disturber:
                found = found_by(script)
                steps = [*disturber.steps, *(line for host in hosts.all[1:] if host.runs for line in steps_on(host))]
    recoveries = found.get("recoveries", [])
    broken = wrong_in(steps, found.get("newest", ""), found.get("snapshots", []))
    return {
        "seed": seed,
        "faults": disturber.faults.total(),
        "kinds": dict(disturber.faults),
        "troubles": disturber.troubles,
        "epochs": len(found.get("epochs", [])),
        "lost": sum(each[0] for each in found.get("epochs", [])),
        "doubled": sum(each[1] for each in found.get("epochs", [])),
        "differing": sum(each[2] for each in found.get("epochs", [])),
        "raised": found.get("raised", 0),
        "recoveries": dict(Counter(each["reason"] for each in recoveries)),
        "in_place": sum(each["in_place"] for each in recoveries),
        "from_a_snapshot": [each for each in recoveries if not each["in_place"]],
        "batches_redone": sum(each["batches_redone"] for each in recoveries),
        "longest_recovery_s": round(max((each["seconds"] for each in recoveries), default=0.0), 1),
        "steps": len(steps),
        "wrong": broken,
        "seconds": round(time.monotonic() - began),
        "error": found.get("error", ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault begins after this time")
    args = parser.parse_args()
    row = chaos(faults=args.faults, seed=args.seed, minutes=args.minutes)
    print(json.dumps(row, indent=1))
    sys.exit(
        bool(
            row["lost"]
            or row["doubled"]
            or row["differing"]
            or row["wrong"]
            or row["error"]
            or row["faults"] < args.faults
        )
    )


if __name__ == "__main__":
    main()
