"""B, B2 and W: what NCCL does when a rank is killed, in plain processes of torch, without raysgd's workers and Ray.

The ranks are forks of one process that has imported torch. Each survivor has two threads, as a worker of raysgd has: the
main one, which calls NCCL, and one that aborts when it is told so, with the calls that raysgd makes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.foreign import abort_groups, forget_groups, groups
from raysgd.torch.group.nccl import VARIABLES
from raysgd.torch.group.process_group import SHUT_EVERY_S
from raysgd.torch.group.sockets import Connections
from tools.gpu import common
from tools.gpu.notes import Notes, first_line, spread

KILLED = 1  # the rank that is killed
STUCK_S = 6.0  # a main thread that an abort has not freed by then stays where it is
LATE_S = 75.0  # torch's watchdog ends a process 60 s after it has seen an error


class Rank:
    """One rank of a case, in its own process, with its connection to this phase."""

    def __init__(self, pipe: Connection, rank: int, size: int, port: int) -> None:
        self.rank, self.size, self._port = rank, size, port
        self._pipe, self._lock, self.aborted = pipe, threading.Lock(), threading.Event()
        self.device, self.connections = common.device(rank), Connections(listening=True)
        self.abort: Callable[[Sequence[Any]], None] = abort_groups

    def tell(self, kind: str, **values: Any) -> None:
        with self._lock:
            self._pipe.send({"kind": kind, "at": time.monotonic(), **values})

    def order(self) -> Any:
        return self._pipe.recv()

    def there(self, *, takes_part: bool = False) -> None:
        """Say that the next call is the one in which the survivors will wait. The rank that is killed makes it only if it
        takes part."""
        self.tell("there")
        if self.rank == KILLED and not takes_part:
            threading.Event().wait()

    def abort_when_told(self) -> None:
        """Start the thread that aborts the group as soon as this phase says so."""

        def obey() -> None:
            self.order()
            began, error = time.monotonic(), ""
            try:
                self.abort(groups())
            except Exception as caught:
                error = first_line(caught)
            self.tell("aborted", seconds=time.monotonic() - began, error=error)
            self.aborted.set()

        threading.Thread(target=obey, daemon=True).start()

    def shut_after_abort(self) -> None:
        self.aborted.wait()
        while self.connections.shut():
            time.sleep(SHUT_EVERY_S)

    def form(self, name: str, *, blocking: bool = True, eager: bool = False) -> None:
        """Form the default group. With `eager`, NCCL connects the ranks now, and otherwise in the first collective."""
        given: dict[str, Any] = {"device_id": self.device} if eager and common.gpus() else {}
        if common.gpus():
            given["pg_options"] = options = dist.ProcessGroupNCCL.Options()
            options.config.blocking = int(blocking)
        store = dist.TCPStore("127.0.0.1", self._port, None, False)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if common.gpus() else "emulated_nccl",
            store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=120),
            **given,
        )

    def is_right(self) -> bool:
        """Return whether an all-reduce has the sum of all ranks."""
        given = torch.full((1 << 14,), self.rank + 1.0, device=self.device)
        dist.all_reduce(given)
        return bool((given == self.size * (self.size + 1) / 2).all().item())

    def form_again(self) -> None:
        """Form a group of the survivors in the same process."""
        self.aborted.wait()
        began, kept = time.monotonic(), groups()  # as raysgd keeps them: a group's end waits for torch's watchdog
        if kept:  # not if torch was still forming it
            forget_groups()
        self.rank, self.size = self.rank - (self.rank > KILLED), self.size - 1
        self.connections.forget()
        self.form("again")
        self.tell("again", right=self.is_right(), seconds=time.monotonic() - began)
        kept.clear()


# -- what the main thread does until it is free -------------------------------------------------------------------


def in_item(own: Rank) -> str:
    """Read a result of a long all-reduce. Return what its buffer holds afterwards."""
    given = torch.full((1 << 27 if common.gpus() else 1 << 20,), own.rank + 1.0, device=own.device)
    own.there(takes_part=common.gpus() == 1)  # between GPUs, and on the emulation, it would be over before the kill
    dist.all_reduce(given)
    given[0].item()
    whole = (given == own.size * (own.size + 1) / 2).double().mean().item()
    mine = (given == own.rank + 1).double().mean().item()
    return f"{whole:.1%} whole, {mine:.1%} own, {1 - whole - mine:.1%} partial"


def in_launches(own: Rank) -> str:
    """Launch kernels behind an all-reduce until the queue is full."""
    given = torch.ones(1 << 20, device=own.device)
    own.there()
    dist.all_reduce(given)
    while not own.aborted.is_set():
        given.mul_(1)
    return ""


def in_backward(own: Rank) -> str:
    """Make a model's first backward pass, and read a gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(20)]
    wrapped = DistributedDataParallel(nn.Sequential(*layers).to(own.device), bucket_cap_mb=4)
    loss = wrapped(torch.ones(32, 512, device=own.device)).sum()
    own.there()
    loss.backward()
    gradient = layers[0].weight.grad
    assert gradient is not None
    gradient[0, 0].item()
    return ""


def in_two_groups(own: Rank, abort: Callable[[Sequence[Any]], None] = abort_groups) -> str:
    """Wait for an all-reduce of each of two groups, of which one can be the user's."""
    own.abort = abort
    second, given = dist.new_group(), [torch.ones(1 << 20, device=own.device) for _ in range(2)]
    dist.all_reduce(given[1], group=second)
    given[1][0].item()
    own.there()
    calls = [
        dist.all_reduce(each, group=group, async_op=True) for each, group in zip(given, (None, second), strict=True)
    ]
    for call in calls:
        call.wait()
    for each in given:
        each[0].item()
    return ""


def bracketed(found: Sequence[Any]) -> None:
    """Abort groups one after the other, in the bracket of torch's own function for all groups."""
    nccl: Any = found[0]._get_backend(torch.device("cuda"))
    nccl._group_start()
    for group in reversed(found):
        group.abort()
    nccl._group_end()


def forming(own: Rank, *, shut: bool = False, **how: bool) -> str:
    """Form a group that one rank does not join. With `shut`, all its sockets are shut, as raysgd does."""
    own.there()
    if shut:
        own.connections.opening()
        threading.Thread(target=own.shut_after_abort, daemon=True).start()
    own.form("first", **how)
    own.is_right()
    return ""


FORMING, HOLDS = "while forming", "in .item()"
CASES: dict[str, Callable[[Rank], str]] = {
    HOLDS: in_item,
    "in a full launch queue": in_launches,
    "in a first backward pass": in_backward,
    "in calls of two groups": in_two_groups,
    "in calls of two groups, one after the other": partial(in_two_groups, abort=bracketed),
    FORMING: partial(forming, blocking=True),
    f"{FORMING} with device_id": partial(forming, blocking=True, eager=True),
    f"{FORMING} with device_id, as raysgd does it": partial(forming, blocking=True, eager=True, shut=True),
    f"{FORMING} with blocking=0": partial(forming, blocking=False),
    f"{FORMING} with blocking=0, device_id": partial(forming, blocking=False, eager=True),
}
EMULATED = (HOLDS, "in a first backward pass", "in calls of two groups", FORMING)


def be_rank(case: str, variables: bool, *connected: Any) -> None:
    """Be one rank of a case, in a process of its own."""
    own = Rank(*connected)
    common.prepare_rank()
    if common.gpus():
        torch.cuda.set_device(own.device)
        torch.zeros(1, device=own.device)  # the context, which takes a second, is not what is measured
    else:
        torch.set_num_threads(1)
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"  # the emulation's watchdog sleeps for 2 s, not 60
    if variables:
        os.environ.update(VARIABLES)
    try:
        began, right = time.monotonic(), True
        if not case.startswith(FORMING):
            own.form("first")
            right = own.is_right()
        own.tell("formed", seconds=time.monotonic() - began, right=right)
        own.order()
        own.abort_when_told()
        held = error = ""
        try:
            held = CASES[case](own)
        except Exception as caught:
            error = first_line(caught)
        own.tell("free", error=error or "no error", held=held)
        own.form_again()
    except Exception as caught:
        own.tell("failed", error=first_line(caught))
    threading.Event().wait()  # until the phase ends this process


# -- the phase's side ---------------------------------------------------------------------------------------------


class Ranks:
    """The ranks of one case."""

    def __init__(self, case: str, *, variables: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.case, size = case, common.rank_count()
        self._store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes: list[Any] = [mine for mine, _ in pairs]
        self._heard: list[list[dict[str, Any]]] = [[] for _ in pairs]
        self._processes: list[Any] = [
            context.Process(target=be_rank, args=(case, variables, theirs, rank, size, self._store.port), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.all, self.survivors = list(range(size)), [rank for rank in range(size) if rank != KILLED]

    def hear(self, ranks: list[int], kind: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
        """Return what the ranks tell, and what is wrong with those that do not tell it within this time."""
        limit = time.monotonic() + seconds
        found = [self._hear(rank, kind, limit) for rank in ranks]
        return found, "; ".join(sorted({each["error"] for each in found if each["kind"] != kind}))

    def _hear(self, rank: int, kind: str, limit: float) -> dict[str, Any]:
        heard = self._heard[rank]
        while not (found := [each for each in heard if each["kind"] in (kind, "failed", "ended")]):
            if not self._pipes[rank].poll(max(0.0, limit - time.monotonic())):
                return {"kind": "nothing", "error": "nothing happens"}
            try:
                heard.append(self._pipes[rank].recv())
            except EOFError:
                self._processes[rank].join()
                heard.append({"kind": "ended", "error": f"ended with status {self._processes[rank].exitcode}"})
        return found[0]

    def begin(self) -> tuple[list[dict[str, Any]], str]:
        """Let all ranks form a group, and come to where they will wait. Return what they tell of it, and what is wrong."""
        told, wrong = self.hear(self.all, "formed", 60)
        if not wrong:
            for pipe in self._pipes:
                pipe.send("go")
            _, wrong = self.hear(self.all, "there", 60)
        return told, wrong

    def kill_and_abort(self, pause_s: float) -> float:
        """Kill a rank, and let the others abort after a pause. Return when they were told."""
        time.sleep(0.3)
        self._processes[KILLED].kill()
        time.sleep(pause_s)
        now = time.monotonic()
        for rank in self.survivors:
            self._pipes[rank].send("abort")
        return now

    def endings(self) -> list[str]:
        codes = [self._processes[rank].exitcode for rank in self.survivors]
        return [f"status {code}" for code in codes if code is not None]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def ranks(case: str, *, variables: bool = True) -> Iterator[Ranks]:
    own = Ranks(case, variables=variables)
    try:
        yield own
    finally:
        own.end()


def aborts(notes: Notes) -> None:
    """B: kill a rank while the others wait, in each place where they can; abort; form a new group."""
    for case in CASES:
        if notes.left() < STUCK_S or (notes.small and case not in EMULATED):
            notes.add(f"abort {case}", "not run")
            continue
        with ranks(case) as own:
            told, wrong = own.begin()
            if case == HOLDS:
                formed = "refused" if wrong else spread([each["seconds"] for each in told])
                notes.add(f"{len(told)} ranks form a group, first all-reduce", formed, "s", wrong)
            if wrong and case == HOLDS:
                return
            if wrong:
                notes.add(f"abort {case}", "not run", note=wrong)
                continue
            notes.add(f"all-reduce is right, {case}", all(each["right"] for each in told), detail=case != HOLDS)
            survive(notes, own)


def survive(notes: Notes, own: Ranks) -> None:
    """Note how the survivors of a case get free, and form a group."""
    name, at = f"abort {own.case}", own.kill_and_abort(0.1)
    told, wrong = own.hear(own.survivors, "aborted", STUCK_S)
    seconds = [1000 * each["seconds"] for each in told if not each["error"]]
    errors = "; ".join(sorted({each["error"] for each in told if each["error"]}))
    notes.add(f"{name}: the call", spread(seconds, 1) if seconds else "not done", "ms", errors)
    free, wrong = own.hear(own.survivors, "free", STUCK_S)
    if wrong:
        return notes.add(f"{name}: the main thread", "not free", note=wrong)
    times = [1000 * (each["at"] - at) for each in free]
    notes.add(f"{name}: the main thread is free", spread(times, 1), "ms", "; ".join({each["error"] for each in free}))
    if own.case == HOLDS:
        notes.add("after the abort, the buffer holds", "; ".join(each["held"] for each in free))
    again, wrong = own.hear(own.survivors, "again", 2 * STUCK_S)
    if wrong:
        return notes.add(f"{name}: new group", "failed", note=wrong)
    right = all(each["right"] for each in again)
    seconds = [each["seconds"] for each in again]
    notes.add(f"{name}: new group, first all-reduce", spread(seconds), "s", "right" if right else "wrong sum")


def long_after(notes: Notes) -> None:
    """W: kill a rank, abort a second later, and see who is alive 75 s after that, with and without torch's variables."""
    late_s = 5.0 if notes.small else LATE_S
    with ranks(HOLDS) as with_them, ranks(HOLDS, variables=False) as without:
        both = {"with": with_them, "without": without}
        wrong = [each.begin()[1] for each in both.values()]
        if any(wrong):
            return notes.add("survivors", "not run", note="; ".join(wrong))
        for own in both.values():
            own.kill_and_abort(1.0)
        time.sleep(late_s)
        for name, own in both.items():
            ended, count = own.endings(), len(own.survivors)
            seen = f"{count - len(ended)} of {count} alive"
            notes.add(f"survivors {late_s:.0f} s later, {name} torch's variables", seen, note="; ".join(ended))


def cycles(notes: Notes) -> None:
    """B2: one rank forms, uses and aborts a group again and again: milliseconds, and what stays behind."""
    common.prepare_rank()
    os.environ.update(VARIABLES)
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    (pipe, _), times, first = multiprocessing.Pipe(), list[float](), dict[str, float]()
    own = Rank(pipe, 0, 1, store.port)
    while notes.left() > 2 and len(times) < (10 if notes.small else 200):
        began = time.monotonic()
        own.form(f"cycle {len(times)}", eager=True)
        own.is_right()
        abort_groups([dist.group.WORLD])
        forget_groups()
        times.append(1000 * (time.monotonic() - began))
        if len(times) == 5:
            first = held_by_process()
    notes.add("a cycle of forming, all-reduce and abort, 1 rank", spread(times, 1), "ms")
    count = max(1, len(times) - 5)
    for name, value in held_by_process().items():
        notes.add(
            f"more {name} for each cycle", round((value - first.get(name, value)) / count, 3), note=f"{count} cycles"
        )


def held_by_process() -> dict[str, float]:
    with open("/proc/self/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file)
    found = {
        "threads": float(status["Threads"]),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "MiB of memory": int(status["VmRSS"].split()[0]) / 1024,
    }
    if common.gpus():
        free, total = torch.cuda.mem_get_info()
        found["MiB of the GPU"] = (total - free) / 2**20
    return found
