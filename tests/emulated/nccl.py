"""NCCL's semantics on CPU tensors, as a process group in Python: for tests of recovery without a GPU.

    install()                 # in each process, as in a trainer's `initialization_hook`
    TorchTrainer(..., backend="nccl", use_gpu=False)      # with RAYSGD_NCCL_ANYWHERE=1

It behaves as torch's ProcessGroupNCCL where that matters for recovery:

* A call is queued to a stream, which is a thread, and raises nothing for a peer that has failed.
* `wait()` waits for the stream, and never raises. An aborted collective ends with a part of its result in its tensors.
* `abort()` frees what waits, from any thread. It returns when the device has ended all calls that were queued, those of other
  groups too, as it frees memory. Calls after it raise a DistBackendError.
* The first call connects the ranks, and waits until all are there.
* The end of a peer's connection is an asynchronous error with `network`, as over InfiniBand or sockets. Without, as over NVLink,
  the stream waits until the abort. The watchdog finds an error, sleeps, and ends the process, unless torch's variables forbid it.

The connections are sockets of this machine. Tensors of another device than the CPU are computed there: `launch` queues a call to
that device's own stream, and `content` returns a tensor's content in that call. Then the host runs ahead of the device.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

NAME = "emulated_nccl"
LOOK_S = 0.005
Call = Callable[[], None]
Tensors = Sequence[torch.Tensor]
Sent = Mapping[int, Tensors]  # by rank
Receive = Callable[[Sent], None]


@dataclass(frozen=True)
class Settings:
    """How the emulation behaves in this process.

    network        whether a peer's end is an asynchronous error
    poll_s         how often the watchdog looks for errors
    hanging_ranks  the ranks whose abort hangs: for ever if it is one, and otherwise until the other ones of them have ended
    point          called on the stream with an operation's name, and "before" it sends anything, "in" it, when it has sent to one
                   peer at most, and "after" it
    launch         queues a call to the device's stream; None for a thread of its own
    content        returns the content of a tensor when the device has come there
    """

    network: bool = False
    poll_s: float = 0.1
    hanging_ranks: Collection[int] = ()
    point: Callable[[str, str], None] = lambda operation, place: None
    launch: Callable[[Call], None] | None = None
    content: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach


settings = Settings()
noticed: list[str] = []  # by watchdogs
queued: set[Work] = set()  # what the device has not ended


def install(device: str = "cpu", **given: Any) -> None:
    """Let NCCL be the emulation in this process, with these of the `Settings`. Another call changes some of them."""
    import raysgd.torch.group.nccl

    global settings
    settings = replace(settings, **given)
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, EmulatedNccl, devices=[device])
    raysgd.torch.group.nccl.NAME = NAME


class Work(dist._Work):
    """A call that was queued. `ordered` is True if what uses its result is queued to the same stream."""

    def __init__(self, result: list[torch.Tensor], *, ordered: bool) -> None:
        super().__init__()
        self._result, self._done, self._future = result, threading.Event(), torch.futures.Future[Any]()
        if ordered:
            self.end()

    def end(self) -> None:
        if not self._done.is_set():
            self._done.set()
            self._future.set_result(self._result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._done.wait()
        return True

    def get_future(self) -> Any:
        return self._future


class EmulatedNccl(dist.ProcessGroup):
    group_name = group_desc = ""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._ranks = store, rank, range(size)
        self._made = 0  # collective calls
        self._aborted = threading.Event()
        self._error, self._lost = "", set[int]()  # what NCCL has noticed, and the peers whose connection has ended
        self._connecting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        self._connections: dict[int, socket.socket] = {}
        self._inboxes: dict[int, queue.SimpleQueue[bytearray | None]] = {}
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._launch = settings.launch or self._calls.put
        store.set(f"port-{rank}", str(self._listener.getsockname()[1]))
        self._start_thread(self._stream)
        if settings.network:
            self._start_thread(self._watch)

    def _start_thread(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True, name=NAME).start()

    # -- life -----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:  # a process group without backends of C++ has no place for both
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def _get_sequence_number_for_group(self) -> int:
        return self._made

    def abort(self) -> None:
        hanging = set(settings.hanging_ranks)
        while self._rank in hanging and (hanging == {self._rank} or not hanging - {self._rank} <= self._lost):
            time.sleep(LOOK_S)
        self.shutdown()
        while queued:
            time.sleep(LOOK_S)

    def shutdown(self) -> None:
        self._aborted.set()
        for connection in [self._listener, *self._connections.values()]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for waiting in [self._calls, *self._inboxes.values()]:
            waiting.put(None)

    def _check(self) -> None:
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")

    def _watch(self) -> None:
        kills = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("1", "3")
        kills = kills and os.environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1") != "0"
        dump_s = 4 * int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")) / 1000
        while not self._aborted.wait(settings.poll_s):
            if self._error:
                noticed.append(self._error)
                time.sleep(dump_s)  # an abort does not end this
                if kills:
                    os.abort()
                return

    # -- connections ----------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to all peers, when they are there: one after another, because each of them may fail before."""
        with self._connecting:
            for peer in self._ranks[: self._rank] if not self._connections else ():
                while peer not in self._connections:
                    self._check()
                    time.sleep(LOOK_S)
                    with contextlib.suppress(OSError):
                        if self._store.check([f"port-{peer}"]):
                            port = int(self._store.get(f"port-{peer}"))
                            self._add(peer, socket.create_connection(("127.0.0.1", port)), bytes([self._rank]))
            while len(self._connections) < len(self._ranks) - 1:
                self._check()
                self._listener.settimeout(LOOK_S)
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    connection.settimeout(None)
                    self._add(connection.recv(1)[0], connection)

    def _add(self, peer: int, connection: socket.socket, greeting: bytes = b"") -> None:
        connection.sendall(greeting)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[peer], self._inboxes[peer] = connection, queue.SimpleQueue()
        self._start_thread(self._read, peer, connection)

    def _read(self, peer: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as file:
            while len(length := file.read(8)) == 8:
                content = file.read(int.from_bytes(length, "big"))
                if len(content) < int.from_bytes(length, "big"):
                    break
                self._inboxes[peer].put(bytearray(content))
        self._lost.add(peer)
        if settings.network:
            self._error = f"rank {peer} has closed its connection"

    # -- the stream -----------------------------------------------------------------------------------

    def _stream(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _queue(self, operation: str, sends: Sent, sources: Sent, receive: Receive, result: Tensors) -> Work:
        """Queue an operation, which sends tensors to ranks, and receives some of ranks, which are like those in `sources`. Both
        can include this rank itself. Then `receive` gets what has arrived."""
        self._check()
        self._connect()
        self._made += operation not in ("send", "recv")
        work = Work(list(result), ordered=settings.launch is not None)
        peers = [each for each in sends if each != self._rank]

        @torch.no_grad()
        def perform() -> None:
            settings.point(operation, "before")
            for peer in peers[:1]:
                self._send(peer, sends[peer])
            settings.point(operation, "in")
            for peer in peers[1:]:
                self._send(peer, sends[peer])
            found = {rank: self._receive(rank, like, sends.get(rank, ())) for rank, like in sources.items()}
            receive({rank: tensors for rank, tensors in found.items() if tensors})
            if not self._aborted.is_set():
                settings.point(operation, "after")
            work.end()
            queued.discard(work)

        queued.add(work)
        self._launch(perform)
        return work

    def _send(self, peer: int, tensors: Tensors) -> None:
        raw = [settings.content(each).contiguous().reshape(-1).view(torch.uint8).numpy() for each in tensors]
        content = b"".join(each.tobytes() for each in raw)
        with contextlib.suppress(OSError):  # the peer has failed, or this rank has aborted
            self._connections[peer].sendall(len(content).to_bytes(8, "big") + content)

    def _receive(self, rank: int, like: Tensors, own: Tensors) -> Tensors:
        """Return the tensors of a rank; none after an abort."""
        if rank == self._rank:
            return [settings.content(each) for each in own]
        content = None if self._aborted.is_set() else self._inboxes[rank].get()
        if content is None:
            return ()
        together = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        parts = together.split([each.numel() * each.element_size() for each in like])
        return [part.clone().view(each.dtype).reshape(each.shape) for part, each in zip(parts, like, strict=True)]

    # -- operations -----------------------------------------------------------------------------------

    def _to_all(self, tensors: Tensors) -> Sent:
        return dict.fromkeys(self._ranks, tensors)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        every, op = self._to_all(tensors), ReduceOp.SUM if opts is None else opts.reduceOp
        return self._queue("all_reduce", every, every, lambda found: _reduce(tensors, found, op), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self.allreduce([torch.ones(1)])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        sends = self._to_all(tensors) if opts.rootRank == self._rank else {}
        return self._from_one("broadcast", sends, opts.rootRank, tensors)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        sends = dict(enumerate([each] for each in inputs[0])) if opts.rootRank == self._rank else {}
        return self._from_one("scatter", sends, opts.rootRank, outputs)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Work:
        return self._queue("send", {target: tensors}, {}, lambda found: None, tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        return self._from_one("recv", {}, source, tensors)

    def _from_one(self, operation: str, sends: Sent, source: int, tensors: Tensors) -> Work:
        return self._queue(
            operation, sends, {source: tensors}, lambda found: _copy(found.get(source), tensors), tensors
        )

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        def receive(found: Sent) -> None:
            for rank in self._ranks:
                _copy(found.get(rank), [each[rank] for each in outputs])

        every = self._to_all(inputs)
        return self._queue("all_gather", every, every, receive, [each for several in outputs for each in several])


def _copy(contents: Tensors | None, tensors: Tensors) -> None:
    for content, tensor in zip(contents or (), tensors, strict=False):
        settings.content(tensor).copy_(content)


def _reduce(tensors: Tensors, found: Sent, op: Any) -> None:
    """Reduce what has arrived in the order of ranks, so that all have the same bits."""
    for index, tensor in enumerate(tensors):
        every = torch.stack([found[rank][index] for rank in sorted(found)])
        if op == ReduceOp.MIN or op == ReduceOp.MAX:
            total = every.amin(0) if op == ReduceOp.MIN else every.amax(0)
        else:
            total = every.sum(0, dtype=every.dtype)
        settings.content(tensor).copy_(total / len(every) if op == ReduceOp.AVG else total)
