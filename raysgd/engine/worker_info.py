"""Define what the driver knows about one worker. Driver."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from raysgd.core.decisions.gpu_failures import Gpu
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import WorkerFailed
from raysgd.workers.events import WorkerEnded

RAY_ID_LENGTH = 56  # of the ids of Ray's nodes, whose first 8 characters are enough for users


class Stage(IntEnum):
    """How far a worker is in its life. One that has failed stays in its stage until it is
    dismissed.

    STARTING  its process was launched
    OVERDUE   the same, so long ago that another one was launched in its place
    UP        its process runs
    WARMING   it sets up its replica, alongside the group
    READY     it can join the group. Where a process can join only one process group, it is set up
              after that
    JOINING   it was taken for the next generation
    MEMBER    it belongs to the current generation, and hosts a replica
    """

    STARTING = 0
    OVERDUE = 1
    UP = 2
    WARMING = 3
    READY = 4
    JOINING = 5
    MEMBER = 6


@dataclass(frozen=True)
class Leaver:
    """Why a member is to leave, when its machine will be stopped (None: unknown), when it must have
    left, what has announced that (its SIGTERM, or Ray, which drains its node), and whether its
    operator knows it."""

    reason: Literal["preemption", "shrink"]
    deadline: float | None = None
    leave_by: float = -math.inf
    sigterm: bool = False
    drained: bool = False
    notified: bool = False


@dataclass(eq=False)
class WorkerInfo:
    """What the driver knows about one worker. Only `WorkerTable` changes it.

    since       when it was launched, or became ready
    address     of its machine, as the driver sees it
    local       whether it is on the driver's node
    rank        its rank in the current generation, or the one that it will have in the next
    leaver      why and when it is to leave, if it is
    notice      whether it received SIGTERM, because its node will be removed
    moved_at    when it last made progress
    ended       how it failed
    broken      the outcome with which it said that its GPU is broken
    gpus        the GPUs that Ray has given to it, and how often they had failed before its set-up
    killed_for  why the driver killed it, as the outcome of its call
    unfinished  what it did not finish in time, with its stack; empty if its process is stopped and
                shows none
    busy        the call that it has not answered yet
    last_call   the newest call that it was given
    is_exact    whether `progress` is that of its replica: it came with the answer to the newest
                call
    """

    worker: str
    stage: Stage = Stage.STARTING
    since: float = 0.0
    node: str = ""
    pid: int = 0
    address: str = ""
    local: bool = False
    rank: int | None = None
    leaver: Leaver | None = None
    notice: bool = False
    progress: Progress = field(default_factory=Progress)
    partial: Measured | None = None
    moved_at: float = 0.0
    ended: WorkerEnded | None = None
    broken: WorkerFailed | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_failures: int = 0
    killed_for: WorkerFailed | None = None
    unfinished: str = ""
    busy: int | None = None
    last_call: int = -1
    is_exact: bool = False

    @property
    def in_group(self) -> bool:
        return self.stage is Stage.MEMBER

    @property
    def machine(self) -> str:
        """What users know its machine by."""
        return self.address or (self.node[:8] if len(self.node) == RAY_ID_LENGTH else self.node)

    def name_gpu(self, uuid: str = "") -> str:
        """Say which GPU it has, on which node, for messages."""
        numbers = ", ".join(number for _, number in self.gpus)
        return f"{f'GPU {numbers}' if numbers else 'a GPU'}{f' ({uuid})' if uuid else ''} on node {self.machine}"
