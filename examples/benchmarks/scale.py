"""How long thousands of ranks are without training after a failure, in virtual time.

The engine is the real one, with a simulated group: the driver's own processor time passes in the virtual time, and everything
else takes a sampled latency (below). A call and its answer cost the driver CALL_S of processor time for each rank, and the
rendezvous store STORE_S, as measured once with real connections.

    python examples/benchmarks/scale.py
"""

import argparse
import contextlib
import heapq
import itertools
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

from report import claim_stdout, emit

from raysgd.config import ElasticConfig, Limits
from raysgd.core.channel.messages import Interrupt, Message
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Interrupted, Ok, Outcome
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.workers.events import CallEnded, Event, WorkerEnded, WorkerStarted

PHASES = ("detect_s", "agree_s", "rendezvous_s", "call_s")
COLUMNS = ("ranks", *PHASES, "resumed_s")
Row = dict[str, Any]
PER_NODE, HANG_S = 8, 600.0

# Latencies of the simulation: median seconds and the sigma of a log-normal distribution, except for the last two, which
# are seconds of the driver for each rank.
CLOSED = (0.001, 0.5)  # from the end of a process to the end of its connection on the driver
MESSAGE = (0.0005, 0.5)  # a control message
DISPATCH = (0.002, 0.5)  # from a call to its start on the worker, and from its end to the driver
UNWIND = (0.005, 0.5)  # from a closed connection of gloo to the end of the interrupted batch
LEAVE = (0.003, 0.5)  # to leave a process group
CALL_S = 0.00007  # the control channel's processor time for one call of one rank and its answer
STORE_S = 0.0002  # the store's processor time for one rank's requests


class Rest:
    """What the engine needs from a group, and what nothing happens in here."""

    elastic = True

    def silent_for(self, worker: str) -> float:
        return 0.0

    def kill(self, worker: str) -> None: ...

    def dismiss(self, worker: str) -> None: ...

    def stop(self) -> None: ...

    def pack(self, value: Any) -> Any:
        return value

    def room(self) -> int:
        return 1 << 20

    def capacity(self) -> int:
        return 1 << 20

    def can_grow(self) -> bool:
        return False

    def demand(self, count: int) -> str:
        return f"{count} CPU"

    def draining(self) -> dict[str, float | None]:
        return {}

    def is_node_alive(self, node: str) -> bool:
        return True

    def releasing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class VirtualGroup(Rest):
    """Simulated workers behind the protocol through which the engine calls them. Time passes while the engine waits, and
    while this process computes."""

    def __init__(self, seed: int) -> None:
        self.listener: Callable[[Event], None] = lambda event: None
        self._random = random.Random(seed)
        self._skipped, self._began = 1000.0, time.process_time()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._events = itertools.count(1), list[Event]()
        self.nodes: dict[str, str] = {}
        self._training: dict[str, int] = {}
        self._joining: list[tuple[str, int]] = []
        self._joined_at = 0.0
        self.failed: set[str] = set()
        self.failed_at = self.released_at = self.resumed_at = 0.0
        self.joins_at = self.formed_at = math.nan

    def clock(self) -> float:
        return self._skipped + time.process_time() - self._began

    def at(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.clock() + delay, next(self._numbers), do))

    def sample(self, latency: tuple[float, float]) -> float:
        return latency[0] * math.exp(self._random.gauss(0.0, latency[1]))

    # -- the protocol ---------------------------------------------------------------------------------

    def launch(self, count: int) -> list[str]:
        names = [f"w{next(self._numbers)}" for _ in range(count)]
        for number, name in enumerate(names):
            self.nodes[name] = f"node{number // PER_NODE}"
            self._events.append(WorkerStarted(name, self.nodes[name], number + 1))
        return names

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        call = next(self._numbers)
        self._skipped += CALL_S
        if worker in self.failed:
            return call
        arrives = self.sample(DISPATCH)
        if verb == "join":
            self.joins_at = self.joins_at if self._joining else self.clock()
            self._joining.append((worker, call))
            self._joined_at = max(self._joined_at, self.clock() + arrives + self.sample(LEAVE))
            if len(self._joining) == arguments["rank_info"].world_size:
                self._form()
        elif verb == "run" and arguments["call"].name == "train":
            self._training[worker] = call
            self.resumed_at = max(self.resumed_at, self.clock() + arrives)
        else:
            self._end(worker, call, Ok(Probe()), arrives + self.sample(DISPATCH))
        return call

    def _form(self) -> None:
        formed = self._joined_at - self.clock() + STORE_S * len(self._joining)
        for worker, call in self._joining:
            self._end(worker, call, Ok(), formed + self.sample(DISPATCH))
        self.formed_at, self._joining, self._joined_at = self.clock() + formed, [], 0.0

    def _end(self, worker: str, call: int, outcome: Outcome, delay: float) -> None:
        self._emit(delay, CallEnded(worker, call, outcome))

    def _emit(self, delay: float, event: Event) -> None:
        self.at(delay, lambda: self._events.append(event))

    def poll(self, timeout: float) -> list[Event]:
        deadline = self.clock() + timeout
        while True:
            while self._queue and self._queue[0][0] <= self.clock():
                heapq.heappop(self._queue)[2]()
            if self._events or self.clock() >= deadline:
                events, self._events = self._events, []
                return events
            until = min(self._queue[0][0] if self._queue else deadline, deadline)
            self._skipped += max(until - self.clock(), 1e-6)

    def send(self, worker: str, message: Message) -> bool:
        if isinstance(message, Interrupt) and worker in self._training and worker not in self.failed:
            call = self._training.pop(worker)
            delay = self.sample(MESSAGE) + self.sample(UNWIND) + self.sample(DISPATCH)
            self._end(worker, call, Interrupted(None, "a peer failed", Progress(step=1)), delay)
            self.released_at = max(self.released_at, self.clock() + delay)
        return True

    # -- what happens to the workers ------------------------------------------------------------------

    def fail(self, worker: str) -> None:
        """End this process now."""
        self.failed.add(worker)
        self.failed_at = self.clock()
        self._training.pop(worker, None)
        self._emit(self.sample(CLOSED), WorkerEnded(worker, "its process ended"))

    def end_call(self) -> None:
        for worker, call in self._training.items():
            self._end(worker, call, Ok(Probe(), Progress(step=2, finished=True)), self.sample(DISPATCH))
        self._training.clear()


class Probe:
    """What a simulated rank measured."""


def train(replica: Any, **arguments: Any) -> None:
    """A call that simulated workers only recognize by its name."""


def failure(ranks: int) -> Row:
    """Let a rank fail in a call of `train`. Return the seconds from then to when the last survivor begins to train again,
    and those of each phase."""
    group = VirtualGroup(ranks)
    limits = Limits.derive(timeout_s=1800.0, hang_timeout_s=HANG_S, start_s=100.0)
    engine = Engine(
        group,
        SingleWorkerBackend(),
        lambda rank_info, control: None,
        target=ranks,
        elastic=ElasticConfig(grow=False),
        limits=limits,
        clock=group.clock,
    )
    engine.start()
    group.at(1.0, lambda: group.fail(list(group.nodes)[-1]))
    formed: list[float] = []

    def again() -> dict[str, Any]:
        """Called before each fan-out: the second one is that after the failure."""
        formed.append(group.clock())
        if len(formed) == 2:
            group.at(CALL_S, group.end_call)
        return {}

    engine.run(Job(Call(train), again="resume", max_failures=-1, prepare=again))
    engine.stop(force=True)
    ends = (group.released_at, group.joins_at, formed[1], group.resumed_at)
    phases = [end - begin for begin, end in itertools.pairwise((group.failed_at, *ends))]
    return {
        "ranks": ranks,
        "resumed_s": round(group.resumed_at - group.failed_at, 4),
        **{name: round(value, 4) for name, value in zip(PHASES, phases, strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[10, 100, 1000, 10_000])
    parser.add_argument("--smoke", action="store_true", help="a few ranks")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.ranks = [4]
    logging.getLogger("raysgd").setLevel(logging.ERROR)
    emit(out, "scale", vars(args), [failure(count) for count in args.ranks], COLUMNS)


if __name__ == "__main__":
    main()
