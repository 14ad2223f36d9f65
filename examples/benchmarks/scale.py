"""What thousands of ranks cost the driver, and how long they are without training after a failure.

No machine here can hold thousands of workers, so each part is measured with as much of the real code as possible:

    engine       the real engine in virtual time, with a simulated group. The driver's own processor time passes in it,
                 too; everything else takes a sampled latency, which the results state
    control      the real control server and worker table in this process, pinned to one core, and real connections, which
                 a few other processes hold: mass joining, training, and a connection that closes
    calls        the real engine and control server in this process, and such connections, which answer calls at once
    rendezvous   the real rendezvous store in this process, and many clients in each of a few processes
    gloo         real processes that form one of gloo's process groups, with and without its lazy connections

    python examples/benchmarks/scale.py
    python examples/benchmarks/scale.py --parts control --ranks 100 1000 4000
"""

import argparse
import asyncio
import contextlib
import datetime
import heapq
import itertools
import logging
import math
import multiprocessing
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from report import claim_stdout, emit, spread

from raysgd.config import ElasticConfig, Limits
from raysgd.core.descriptors import allow_connections
from raysgd.core.frames import HEAD_BYTES, NUMBER_BYTES, PROOF_BYTES, WORKER, Session, new_number, proof
from raysgd.core.messages import Alive, CallAnswer, Hello, Interrupt, Message, PerformCall, ProgressReport
from raysgd.core.outcomes import Interrupted, Ok, Outcome
from raysgd.core.progress import Progress, report_interval_s
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo, SingleWorkerBackend
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.calls import opened, packed_outcome
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.serialization import dumps_without_references

COLUMNS = ("part", "ranks", "case", "resumed_s", "cpu_share", "cpu_ms_per_call", "notified_ms", "joined_s", "note")
Row = dict[str, Any]
PER_NODE, SHARDS, TICK_S, HANG_S = 8, 2, 0.1, 600.0

# -- (a) the engine in virtual time -------------------------------------------------------------------

# Latencies of the simulation: median seconds and the sigma of a log-normal distribution, except for the last two, which
# are seconds of the driver for each rank.
CLOSED = (0.001, 0.5)  # from the end of a process to the end of its connection on the driver
MESSAGE = (0.0005, 0.5)  # a control message
DISPATCH = (0.002, 0.5)  # from a call to its start on the worker, and from its end to the driver
UNWIND = (0.005, 0.5)  # from a closed connection of gloo to the end of the interrupted batch
LEAVE = (0.003, 0.5)  # to leave a process group
CALL_S = 0.00007  # the control channel's processor time for one call of one rank and its answer (part "calls", less the engine)
STORE_S = 0.0002  # the store's processor time for one rank's requests (part "rendezvous")


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

    def checkpoint_server(self) -> None:
        return None

    def reference(self, worker: str, verb: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError

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
        self._nodes: dict[str, str] = {}
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
            self._nodes[name] = f"node{number // PER_NODE}"
            self._events.append(WorkerStarted(name, self._nodes[name], number + 1))
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

    def fail(self, workers: Sequence[str]) -> None:
        """End these processes now."""
        self.failed.update(workers)
        self.failed_at = self.clock()
        for worker in workers:
            self._training.pop(worker, None)
            self._emit(self.sample(CLOSED), WorkerEnded(worker, "its process ended"))

    def report_for(self, seconds: float) -> None:
        """Let the ranks report their progress while they train, and end the call after these seconds."""
        ranks = len(self._training)
        interval_s = report_interval_s(ranks)
        for number, (worker, call) in enumerate(self._training.items()):
            first = interval_s * number / ranks
            for turn in range(max(math.ceil((seconds - first) / interval_s), 0)):
                message = ProgressReport(call, Progress(step=turn + 2), {"train_loss": 0.5, "num_samples": 32})
                self._emit(first + turn * interval_s, MessageReceived(worker, message))
            self._end(worker, call, Ok(Probe(), Progress(step=10_000, finished=True)), seconds + self.sample(DISPATCH))
        self._training.clear()

    def members(self) -> list[str]:
        return [name for name in self._nodes if name not in self.failed]


class Probe:
    """What a simulated rank measured."""


def train(replica: Any, **arguments: Any) -> None:
    """A call that simulated workers only recognize by its name."""


def nothing(replica: Any) -> None:
    """A call that ends at once."""


def engine_rows(ranks: Sequence[int], seconds: float) -> Iterator[Row]:
    logging.getLogger("raysgd").setLevel(logging.ERROR)
    for count in ranks:
        cases = {"one rank": 1, "1 %": max(count // 100, 1), "one rack": min(4 * PER_NODE, count - 1)}
        for case, failing in cases.items():
            yield failure(count, case, failing)
        yield calm(count, seconds)


def started(ranks: int) -> tuple[Engine, VirtualGroup]:
    group = VirtualGroup(ranks)
    return engine_of(group, ranks, group.clock), group


def engine_of(group: Any, ranks: int, clock: Callable[[], float]) -> Engine:
    limits = Limits.derive(timeout_s=1800.0, hang_timeout_s=HANG_S, start_s=100.0)
    engine = Engine(
        group,
        SingleWorkerBackend(),
        lambda rank_info, control: None,
        target=ranks,
        elastic=ElasticConfig(grow=False),
        limits=limits,
        clock=clock,
    )
    engine.start()
    return engine


def failure(ranks: int, case: str, failing: int) -> Row:
    """Let ranks fail in a call of `train`. Return the seconds from then to when the last survivor begins to train again,
    and the share of each phase."""
    engine, group = started(ranks)
    victims = group.members()[-failing:]
    group.at(1.0, lambda: group.fail(victims))
    formed: list[float] = []

    def again() -> dict[str, Any]:
        """Called before each fan-out: the second one is that after the failure."""
        formed.append(group.clock())
        if len(formed) == 2:
            group.at(CALL_S, lambda: group.report_for(0.5))
        return {}

    engine.run(Job(Call(train), again="resume", max_failures=-1, prepare=again))
    engine.stop(force=True)
    phases = {
        "detect and release": group.released_at - group.failed_at,
        "agree, assign": group.joins_at - group.released_at,
        "leave, rendezvous": formed[1] - group.joins_at,
        "call": group.resumed_at - formed[1],
    }
    return {
        "part": "engine",
        "ranks": ranks,
        "case": f"{case} fails",
        "resumed_s": round(group.resumed_at - group.failed_at, 4),
        "phases_s": {name: round(value, 4) for name, value in phases.items()},
    }


def calm(ranks: int, seconds: float) -> Row:
    """Measure the driver's processor time for a call that does nothing, and for each second of training. That of the control
    channel is not in it, but that of the simulation is."""
    engine, group = started(ranks)
    calls = 5
    began = time.process_time()
    for _ in range(calls):
        engine.run(Job(Call(nothing)))
    per_call = (time.process_time() - began) / calls
    group.at(1.0, lambda: group.report_for(seconds))
    began = time.process_time()
    engine.run(Job(Call(train), again="resume"))
    share = (time.process_time() - began - per_call) / (seconds + 1.0)
    engine.stop(force=True)
    return {
        "part": "engine",
        "ranks": ranks,
        "case": "no failure",
        "cpu_share": round(max(share, 0.0), 4),
        "cpu_ms_per_call": round(per_call * 1000, 3),
    }


def exponent(rows: Sequence[Row], case: str, figure: str) -> float | None:
    """Return the slope of log(figure) over log(ranks), fitted by least squares over the points from 100 ranks on."""
    points = [
        (math.log(row["ranks"]), math.log(row[figure]))
        for row in rows
        if row["case"] == case and row["ranks"] >= 100 and row.get(figure)
    ]
    if len(points) < 2:
        return None
    middle, height = (sum(each) / len(points) for each in zip(*points, strict=True))
    return round(sum((x - middle) * (y - height) for x, y in points) / sum((x - middle) ** 2 for x, _ in points), 2)


# -- (b) the control server ---------------------------------------------------------------------------


class Served(Rest):
    """A group in front of a real control server."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.control = ControlServer(self.events, "127.0.0.1")
        self.listener: Callable[[Event], None] = lambda event: None
        self.send, self.silent_for = self.control.send, self.control.silent_for
        self.names: list[str] = []
        self._calls, self._newest = itertools.count(1), (dict[str, Any](), b"")

    def launch(self, count: int) -> list[str]:
        self.names = [f"w{number}" for number in range(count)]
        return self.names

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        call = next(self._calls)
        if self._newest[0] is not arguments:
            self._newest = arguments, dumps_without_references((verb, arguments))
        self.control.send(worker, PerformCall(call, generation, self._newest[1]))
        return call

    def poll(self, timeout: float) -> list[Event]:
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            found.append(self.events.get(timeout=timeout))
            while True:
                found.append(self.events.get_nowait())
        return [opened(event) for event in found]


class Client:
    """One rank's end of a control connection. It notes when it was interrupted, and answers calls if it is to do so."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session, answers: bool
    ) -> None:
        self.reader, self.writer, self.session, self.answers = reader, writer, session, answers
        self.interrupted_at = 0.0

    def send(self, message: Message) -> None:
        self.writer.write(self.session.framed(message))

    async def receive(self) -> Message:
        head = await self.reader.readexactly(HEAD_BYTES)
        return self.session.opened(head, await self.reader.readexactly(self.session.sizes(head).message))

    async def read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = await self.receive()
                if isinstance(message, Interrupt):
                    self.interrupted_at = time.monotonic()
                elif isinstance(message, PerformCall) and self.answers:
                    self.send(CallAnswer(message.call, packed_outcome(Ok()) or b""))


def hold(pipe: Any, address: Any, numbers: Sequence[int], ranks: int, answers: bool) -> None:
    """Run in a process of its own: hold the connections of these ranks, and do what the benchmark asks for."""
    asyncio.run(Holder(pipe, address, numbers, ranks, answers).serve())


class Holder:
    def __init__(self, pipe: Any, address: Any, numbers: Sequence[int], ranks: int, answers: bool) -> None:
        self._pipe, self._address, self._numbers, self._ranks, self._answers = pipe, address, numbers, ranks, answers
        self._clients: dict[int, Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        allow_connections(len(self._numbers), each=1)
        await asyncio.gather(*map(self._join, self._numbers))
        self._pipe.send("joined")
        while (asked := await asyncio.to_thread(self._pipe.recv)) is not None:
            kind, number = asked
            if kind == "close":
                at = time.monotonic()
                client = self._clients.pop(number)
                client.writer.close()
                self._pipe.send(at)
            elif kind == "notified":
                self._pipe.send(max((client.interrupted_at for client in self._clients.values()), default=0.0))
            else:
                self._pipe.send(min((client.interrupted_at for client in self._clients.values()), default=math.inf))

    async def _join(self, number: int) -> None:
        key, mine = self._address.key, new_number()
        for pause_s in (0.1, 0.3, 1.0, 3.0, 3.0, 3.0, 3.0):  # as a worker does
            try:
                reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
                numbers = await reader.readexactly(NUMBER_BYTES) + mine
                client = Client(reader, writer, Session(key, WORKER, numbers), self._answers)
                writer.write(mine + proof(key, WORKER, numbers))
                client.send(Hello(f"w{number}", f"node{number // PER_NODE}", number + 1))
                await reader.readexactly(PROOF_BYTES)
                await client.receive()
            except (asyncio.IncompleteReadError, OSError):
                await asyncio.sleep(pause_s)
                continue
            self._clients[number] = client
            for work in (client.read(), self._beat(client, number)):
                self._tasks.add(asyncio.create_task(work))
            return
        raise ConnectionError(f"rank {number} was not admitted")

    async def _beat(self, client: Client, number: int) -> None:
        """Send "alive" every second, and progress when it is this rank's turn."""
        interval_s = report_interval_s(self._ranks)
        await asyncio.sleep(number / self._ranks)
        report_at, step = time.monotonic() + interval_s * number / self._ranks, 0
        while not client.writer.is_closing():
            client.send(Alive())
            if time.monotonic() >= report_at:
                report_at, step = report_at + interval_s, step + 1
                partial = {"train_loss": 0.5, "num_samples": 32, "batch_count": step, "epoch": 1}
                client.send(ProgressReport(number + 1, Progress(step=step, phase="train"), partial))
            await asyncio.sleep(1.0)


def on_one_core(ranks: Sequence[int], measure: Callable[..., Row], *given: Any) -> Iterator[Row]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the control thread starts later, and inherits this
    try:
        for count in ranks:
            yield measure(count, *given, cores - {min(cores)} or cores)
    finally:
        os.sched_setaffinity(0, cores)


def calls_on(ranks: int, calls: int, other_cores: set[int]) -> Row:
    """Measure the driver's processor time for calls that do nothing: the engine's, and that of the control channel."""
    allow_connections(ranks, each=1)
    group = Served()
    group.control.expected_workers = ranks
    pipes, holders = started_holders(group, ranks, other_cores, True)
    try:
        engine = engine_of(group, ranks, time.monotonic)
        spent, took = [], []
        for _ in range(calls):
            busy, began = time.process_time(), time.monotonic()
            engine.run(Job(Call(nothing)))
            spent.append((time.process_time() - busy) * 1000)
            took.append((time.monotonic() - began) * 1000)
        assert all(pipe.recv() == "joined" for pipe in pipes)
        engine.stop(force=True)
    finally:
        group.control.close()
        for holder in holders:
            holder.kill()
            holder.join()
    return {
        "part": "calls",
        "ranks": ranks,
        "case": "a call that does nothing",
        "cpu_ms_per_call": spread(spent, 3),
        "answer_ms": spread(took, 3),
    }


def control(ranks: int, seconds: float, closes: int, other_cores: set[int]) -> Row:
    allow_connections(ranks, each=1)
    group: Any = Served()
    group.control.expected_workers = ranks
    table = WorkerTable(group)
    workers = table.launch(ranks)
    pipes, holders = started_holders(group, ranks, other_cores, False)
    try:
        first_at = joined_at = 0.0
        began, deadline = time.process_time(), time.monotonic() + 120
        while any(not table[worker].started for worker in workers) and time.monotonic() < deadline:
            if table.pump(0.05):
                joined_at = time.monotonic()
                first_at = first_at or joined_at
        joining_cpu = time.process_time() - began
        assert all(table[worker].started for worker in workers), "all ranks join within two minutes"
        table.enter_group(workers)
        calls = table.open_calls()
        for worker in workers:
            calls.expect(worker, table.submit(worker, "run", {}, generation=1))
        assert all(pipe.recv() == "joined" for pipe in pipes)
        share = train_for(table, workers, seconds)
        spent = [closed(table, group, pipes, ranks, number) for number in range(min(closes, ranks // 2))]
    finally:
        group.control.close()
        for holder in holders:
            holder.kill()
            holder.join()
    slowest = sorted(spent)[min(math.ceil(0.99 * len(spent)), len(spent)) - 1]
    return {
        "part": "control",
        "ranks": ranks,
        "case": "one connection closes",
        "cpu_share": round(share, 4),
        "notified_ms": spread([each * 1000 for each in spent], 2),
        "p99_ms": round(slowest * 1000, 2),
        "joined_s": round(joined_at - first_at, 3),
        "joining_cpu_s": round(joining_cpu, 3),
    }


def started_holders(group: Any, ranks: int, cores: set[int], answers: bool) -> tuple[list[Any], list[Any]]:
    """Start the processes that hold the ranks' connections, on these cores. With `answers`, the ranks answer calls. Return the
    pipes to them, and the processes."""
    context = multiprocessing.get_context("spawn")
    pipes, holders = [], []
    for shard in range(SHARDS):
        mine, theirs = context.Pipe()
        given = (theirs, group.control.address_for_workers(), range(shard, ranks, SHARDS), ranks, answers)
        holders.append(context.Process(target=hold, args=given, daemon=True))
        holders[-1].start()
        os.sched_setaffinity(holders[-1].pid, cores)
        pipes.append(mine)
    return pipes, holders


def train_for(table: WorkerTable, workers: list[str], seconds: float) -> float:
    """Do what the engine does while all ranks train. Return the processor time of each second."""
    watchdog = Watchdog(table, workers, HANG_S)
    began, busy, tick_at = time.monotonic(), time.process_time(), 0.0
    while time.monotonic() - began < seconds:
        table.pump(TICK_S)
        if time.monotonic() >= tick_at:
            watchdog.tick(workers)
            tick_at = time.monotonic() + TICK_S
    return (time.process_time() - busy) / (time.monotonic() - began)


def closed(table: WorkerTable, group: Served, pipes: list[Any], ranks: int, number: int) -> float:
    """Close one rank's connection. Return the seconds until every other rank has been interrupted."""
    time.sleep(0.05)
    while table.pump(0.0):
        pass
    worker, pipe = f"w{number}", pipes[number % SHARDS]
    pipe.send(("close", number))
    while table[worker].ended is None:
        table.pump(TICK_S)
    message = Interrupt(1)
    for other in group.names:
        if table[other].ended is None:
            group.send(other, message)
    closed_at = pipe.recv()
    while True:
        for each in pipes:
            each.send(("all", 0))
        if min(each.recv() for each in pipes) > closed_at:
            break
        table.pump(0.01)
    for each in pipes:
        each.send(("notified", 0))
    return float(max(each.recv() for each in pipes) - closed_at)


# -- (c) the rendezvous store -------------------------------------------------------------------------


def rendezvous_rows(ranks: Sequence[int]) -> Iterator[Row]:
    from raysgd.torch.store import open_store

    for count in ranks:
        allow_connections(count, each=2)
        store, settings = open_store("127.0.0.1", limit_s=300)
        context = multiprocessing.get_context("spawn")
        barrier, answers = context.Barrier(SHARDS + 1), context.Queue()
        args = (settings, count, barrier, answers)
        shards = [context.Process(target=meet, args=(shard, *args), daemon=True) for shard in range(SHARDS)]
        for each in shards:
            each.start()
        barrier.wait(300)
        began, busy = time.monotonic(), time.process_time()
        clients_cpu = [answers.get(timeout=300) for _ in shards]
        wall, cpu = time.monotonic() - began, time.process_time() - busy
        for each in shards:
            each.join(30)
            each.kill()
        del store
        yield {
            "part": "rendezvous",
            "ranks": count,
            "case": "all ranks meet, and exchange addresses",
            "joined_s": round(wall, 3),
            "store_cpu_ms_per_rank": round(cpu * 1000 / count, 4),
            "client_cpu_ms_per_rank": round(sum(clients_cpu) * 1000 / count, 4),
        }


def meet(shard: int, settings: Any, ranks: int, barrier: Any, answers: Any) -> None:
    """Run in a process of its own: be many ranks at the store. Each has a client of torch's in a thread, already
    connected, when the time begins."""
    import threading

    import torch.distributed as dist

    from raysgd.torch.store import exchange_addresses, wait_for_all

    allow_connections(ranks, each=2)
    threading.stack_size(1 << 18)
    limit = datetime.timedelta(seconds=300)
    mine = range(shard, ranks, SHARDS)
    clients = [dist.TCPStore(settings["host"], settings["port"], None, False, timeout=limit) for _ in mine]
    stores = [dist.PrefixStore(settings["secret"], client) for client in clients]

    def rank(number: int, store: Any) -> None:
        rank_info = RankInfo(world_rank=number, world_size=ranks)
        wait_for_all(store, rank_info, limit_s=300)
        assert len(exchange_addresses(store, rank_info, [("127.0.0.1", number)], limit_s=300)) == ranks

    threads = [threading.Thread(target=rank, args=each) for each in zip(mine, stores, strict=True)]
    barrier.wait(300)
    busy = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(time.process_time() - busy)


# -- (d) gloo -----------------------------------------------------------------------------------------


def gloo_rows(ranks: Sequence[int], rounds: int) -> Iterator[Row]:
    import torch.distributed as dist

    for count, lazy in itertools.product(ranks, (False, True)):
        store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])  # imported once, not once in each process
        answers = context.Queue()
        args = [(rank, count, store.port, lazy, rounds, answers) for rank in range(count)]
        processes = [context.Process(target=form, args=each, daemon=True) for each in args]
        for each in processes:
            each.start()
        found = [answers.get(timeout=300) for _ in processes]
        for each in processes:
            each.join(60)
            each.kill()
        slowest = [max(times[number] for times, _ in found) for number in range(rounds)]
        yield {
            "part": "gloo",
            "ranks": count,
            "case": "lazy" if lazy else "eager",
            "joined_s": spread(slowest, 4),
            "cpu_ms_per_rank": spread([cpu * 1000 / rounds for _, cpu in found], 2),
        }


def form(rank: int, ranks: int, port: int, lazy: bool, rounds: int, answers: Any) -> None:
    """Run in a process of its own: form a group with the others, several times, each with one all_reduce."""
    import torch
    import torch.distributed as dist

    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))  # read when a group is made
    torch.set_num_threads(1)
    client: Any = dist.TCPStore("127.0.0.1", port, None, False)
    times, busy = [], 0.0
    for number in range(rounds):
        store: Any = dist.PrefixStore(f"{number}", client)
        if store.add("here", 1) == ranks:
            store.set("all", "")
        store.wait(["all"])
        began, cpu = time.monotonic(), time.process_time()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.all_reduce(torch.zeros(1))
        times.append(time.monotonic() - began)
        busy += time.process_time() - cpu
        dist.destroy_process_group()
    answers.put((times, busy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("engine", "control", "calls", "rendezvous", "gloo")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--ranks", nargs="+", type=int, help="instead of those of each part")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    parser.add_argument("--closes", type=int, default=30, help="how many connections are closed")
    parser.add_argument("--smoke", action="store_true", help="a few ranks")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.ranks, args.seconds, args.closes = [4], 1.0, 2

    rows: list[Row] = []
    for part in args.parts:
        if part == "engine":
            rows += engine_rows(args.ranks or [10, 100, 1000, 10_000], args.seconds)
            own = [row for row in rows if row["part"] == "engine"]
            for row in own:
                figure = "resumed_s" if "resumed_s" in row else "cpu_ms_per_call"
                row["exponent"] = exponent(own, row["case"], figure)
        elif part == "control":
            rows += on_one_core(args.ranks or [100, 1000, 4000], control, args.seconds, args.closes)
        elif part == "calls":
            rows += on_one_core(args.ranks or [10, 100, 1000, 4000], calls_on, 2 if args.smoke else 20)
        elif part == "rendezvous":
            rows += rendezvous_rows(args.ranks or [32, 100, 1000])
        else:
            rows += gloo_rows(args.ranks or [8, 16, 32], 1 if args.smoke else 5)
        print(f"{part} done", file=sys.stderr)
    emit(out, "scale", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
