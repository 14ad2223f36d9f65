"""Run one worker in the driver's own process, without Ray, which is easy to debug. Driver."""

from __future__ import annotations

import itertools
import os
import platform
import weakref
from collections.abc import Callable
from typing import Any

from raysgd.core.channel.messages import FunctionReport, Message, ProgressReport, StartDealer
from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.ray_data.reader import RowReader, local_row_reader
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerStarted
from raysgd.workers.replica_host import ReplicaHost
from raysgd.workers.transfer import InlineTransfer
from raysgd.workers.worker_group import WorkerGroupProtocol


class InlineGroup(WorkerGroupProtocol):
    """Owns the worker, which runs each call inside `submit`. Progress goes directly to `listener`,
    because `poll` cannot be called meanwhile."""

    def __init__(self, backend: ProcessGroupBackend) -> None:
        self.listener: Callable[[Event], None] = lambda event: None
        self._worker = "inline"
        self._control = Control(self._publish)
        self._names = itertools.count()
        self._transfers: weakref.WeakValueDictionary[str, InlineTransfer] = weakref.WeakValueDictionary()
        self._control.giving = self._giving
        self._control.ask = lambda name, question: self._transfers[name].answer(question)
        self._control.deliver = self._deliver
        self._host = ReplicaHost(backend, self._control, remote=False)
        self._events: list[Event] = []
        self._calls = 0
        self._launched = False
        self._rows: dict[int, tuple[RowReader, Any]] = {}

    def launch(self, count: int) -> list[str]:
        if self._launched or count != 1:
            raise RuntimeError("an inline group has exactly one worker: this process")
        self._launched = True
        self._events.append(WorkerStarted(self._worker, platform.node(), os.getpid()))
        return [self._worker]

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        self._calls += 1
        outcome = self._host.perform(verb, arguments)
        self._events.append(CallEnded(worker, self._calls, outcome))
        return self._calls

    def transfer(self) -> InlineTransfer:
        transfer = InlineTransfer()
        transfer.name = str(next(self._names))
        self._transfers[transfer.name] = transfer
        return transfer

    def _giving(self, name: str) -> InlineTransfer:
        transfer = self._transfers[name]
        transfer.opened = True
        return transfer

    def rows(self, dataset: Any) -> RowReader:
        if id(dataset) not in self._rows:
            self._rows[id(dataset)] = local_row_reader("given", dataset, None), dataset
        return self._rows[id(dataset)][0]

    def poll(self, timeout: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def send(self, worker: str, message: Message) -> bool:
        return False  # this thread is training, and no other thread could receive the message

    def kill(self, worker: str) -> None:
        raise RuntimeError("the inline worker is this process and cannot be killed")

    def dismiss(self, worker: str) -> None:
        self._host.perform("close", {})
        self._launched = False

    def room(self) -> Room:
        return Room(0 if self._launched else 1, 1)

    def stop(self) -> None:
        if self._launched:
            self.dismiss(self._worker)
        self._rows = {}  # reading a dataset ends with the last reference to its reader

    def _deliver(self, message: FunctionReport | StartDealer, body: Any) -> None:
        self.listener(MessageReceived(self._worker, message, body))

    def _publish(self, progress: Progress, partial: Measured | None) -> None:
        self.listener(MessageReceived(self._worker, ProgressReport(self._calls, progress, partial)))
