"""Trainers whose workers are simulated processes in this one: the real engine with real replicas, in virtual time.

    with Cluster(faults=[Fault("kill", "reduced", rank=1, step=3)]):
        trainer = TorchTrainer(training_operator_cls=Digits, num_workers=2)
        trainer.train()

One rank runs at a time, so a seed decides everything. The network, the time, the processes and the random states are those of
`tests.simulation`; gradients are averaged in memory, as are the collective calls of torch.distributed that raysgd and torchmetrics make.
DistributedDataParallel, FSDP and Horovod need real processes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from ray import cloudpickle

from raysgd.core.channel.messages import SnapshotUpload
from raysgd.core.decisions.lease import Lease
from raysgd.core.outcomes import Outcome
from raysgd.engine.engine import Engine
from raysgd.replica.calls import notice_preemption
from raysgd.replica.snapshots import Snapshotter
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.group.sharing import share_state
from raysgd.torch.group.strategies import Strategy
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.trainer import choose_strategy
from raysgd.trainer.description import RunDescription, make_engine
from raysgd.workers.calls import with_value
from raysgd.workers.orphan import NamedHost
from tests.local.tasks import Task, current
from tests.simulation.faults import Schedule
from tests.simulation.group import SimGroup, Worker
from tests.simulation.network import NetworkError, SimBackend
from tests.simulation.plan import Fault as Disturbance
from tests.simulation.plan import Plan
from tests.simulation.world import World

__all__ = ["Cluster", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A fault of this `kind` (see `tests.simulation.plan.Fault`), when this rank reaches a point of its first step that is not
    before `step`:

    forward   it has computed its gradients
    reduced   it has those of all ranks; with `heirs`, only they and the ranks before it have them
    applied   its optimizer has made a step

    or any other point at which a worker of the simulation can be hit, or which the operator names by calling `Cluster.point`.
    """

    kind: str
    at: str
    rank: int = 0
    step: int = 0
    seconds: float = 1.0


class Unchecked:
    """A checker for runs that the test itself checks."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Faults(Schedule):
    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        plan = Plan(faults=())
        checker: Any = Unchecked()
        super().__init__(world, plan, checker)
        self.left, self.recoveries = list(faults), lambda: 0

    def strike(self, worker: Any, point: str) -> None:
        control = worker.client.control
        for fault in [each for each in self.left if each.at == point]:
            if worker.host.rank == fault.rank and control.begun >= fault.step:
                self.left.remove(fault)
                self._hit(worker, Disturbance(fault.kind, point, seconds=fault.seconds))

    def driver_waits(self) -> None:
        """Nothing happens to the driver."""


class Host(NamedHost):
    """Copies what other processes would get as copies."""

    rank = -1

    def perform(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        if verb == "join":
            self.rank = arguments["rank_info"].world_rank
        if "factory" in arguments:
            arguments = {**arguments, "factory": copy.deepcopy(arguments["factory"])}
        return with_value(pickle.loads(cloudpickle.dumps(super().perform(verb, arguments))))


class LocalWorker(Worker):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.host = Host(self.backend, self.client.control)
        self.client.control.upload = self._send_snapshot

    def _send_snapshot(self, message: SnapshotUpload, *content: Any) -> None:
        self.upload(message, b"".join(map(bytes, content)))


class LocalGroup(SimGroup):
    worker_class = LocalWorker

    def renew(self) -> None:
        """Renew the lease, which no other script has."""
        self.keeper.renew(self.term, None, self.world.now)
        self.renewed_at = self.world.clock()


class LocalTenure:
    """The term of a script that begins when the one before it has ended."""

    superseded, leaves = False, True

    def __init__(self, group: LocalGroup, name: str, orphan_s: float) -> None:
        self.name, self.orphan_s, self._group = name, orphan_s, group
        while not (grant := group.keeper.take(group.world.now)).term:
            group.world.run(1.0, lambda: False)
        self.term, self.record = grant.term, dict(grant.record)
        group.term, group.tenure = self.term, self

    def commit(self, parts: Mapping[str, bytes]) -> None:
        self.record.update(parts)
        self._group.keeper.renew(self.term, parts, self._group.world.now)

    def begin_again(self) -> None:
        self.record = {}
        self._group.keeper.begin_again(self.term, self._group.launched, self._group.world.now)


class Mean(Exchange):
    """Averages gradients over the ranks when a backward pass ends, as DistributedDataParallel does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._arrived, self._held = cluster, False, False

    def prepare(self, models: list[Any], optimizers: list[Any]) -> None:
        self._parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)
        for each in optimizers:
            each.register_step_post_hook(lambda *_: self._cluster.point("applied"))

    def hold(self, on: bool) -> None:
        self._held = on

    def _note(self, parameter: torch.Tensor) -> None:
        if not self._arrived and not self._held:
            self._arrived = True
            run_after_backward(self._exchange)

    def _exchange(self) -> None:
        self._arrived = False
        cluster = self._cluster
        cluster.here.compute()
        cluster.point("forward")
        brought = cluster.together([None if p.grad is None else p.grad.clone() for p in self._parameters])
        cluster.point("reduced")
        with torch.no_grad():
            for parameter, each in zip(self._parameters, zip(*brought, strict=True), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(sum(each[1:], each[0]) / len(each))  # also if they are sparse


class Cluster:
    """A context in which the workers of new trainers are simulated. `room` is how many its machine can hold, and `step_s` how long
    a step takes. Operators find it in `Cluster.running`, and can add to its `notes`."""

    running: Cluster

    def __init__(self, faults: Sequence[Fault] = (), *, seed: int = 0, room: int = 8, step_s: float = 0.05) -> None:
        self.world = World(seed, task=Task, current=current)
        self._schedule = Faults(self.world, faults)
        self._plan = Plan(seed=seed, nodes=(room,), step_s=step_s)
        self._stack = ExitStack()
        self._group: Any = None
        self.notes: list[Any] = []

    @property
    def left(self) -> list[Fault]:
        return self._schedule.left

    def faults(self, *faults: Fault) -> None:
        self._schedule.left += faults

    @property
    def here(self) -> LocalWorker:
        """Return the worker whose code runs."""
        worker: Any = self._group.current[current()]
        return worker

    @property
    def workers(self) -> list[LocalWorker]:
        """Return the workers that live, of the trainer that was made last."""
        every: Any = self._group.workers.values()
        return [worker for worker in every if worker.alive]

    def point(self, name: str) -> None:
        """Let faults happen in the worker whose code runs."""
        self.here.point(name)

    def hit(self, kind: str) -> None:
        """Let a fault of this kind happen to the worker whose code runs."""
        self._schedule._hit(self.here, Disturbance(kind, ""))
        self.point("")  # where a worker that was killed ends

    def together(self, value: Any) -> list[Any]:
        """Return what all ranks bring."""
        backend = self.here.backend
        if backend.group is None:
            raise NetworkError("this rank has left its process group")
        return backend.group.collective(self.here, value, backend.collective_s)

    def __enter__(self) -> Cluster:
        Cluster.running = self
        self.replace(
            {
                "raysgd.trainer.description.make_engine": self._make_engine,
                "raysgd.trainer.trainer_base.pack": lambda value: value,
                "raysgd.torch.trainer.choose_strategy": self._strategy,
                "raysgd.torch.group.sharing.share_state": self._share_state,
                "torch.distributed.is_initialized": lambda: self._has_group(),
                "torch.distributed.get_rank": lambda group=None: self.here.host.rank,
                "torch.distributed.get_world_size": lambda group=None: len(self.here.backend.group.members),
                "torch.distributed.get_backend": lambda group=None: "gloo",
                "torch.distributed.barrier": lambda group=None, device_ids=None: self.together(None),
                "torch.distributed.broadcast": self._broadcast,
                "torch.distributed.broadcast_object_list": self._broadcast_objects,
                "torch.distributed.all_reduce": self._reduce,
                "torch.distributed.all_gather": self._all_gather_tensors,
                "torch.distributed.all_gather_object": self._all_gather,
                "torch.distributed.gather_object": self._gather,
                "torch.distributed.scatter_object_list": self._scatter,
            }
        )

        # In the rank's own turn, instead of a thread of its own.
        def sent(snapshotter: Any, message: SnapshotUpload, measured: Any, copied: Any, size: int) -> None:
            with copied as buffers:
                snapshotter._control.upload(replace(message, partial=measured()), *buffers)

        self._stack.enter_context(patch.object(Snapshotter, "send", sent))
        threads = torch.get_num_threads()
        self._stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        return self

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Let the worker of a new trainer be this process."""
        with (
            patch("raysgd.trainer.description.make_engine", make_engine),
            patch("raysgd.torch.trainer.choose_strategy", choose_strategy),
        ):
            yield

    def replace(self, given: dict[str, Any]) -> None:
        """Replace what has these names, until the context ends."""
        for name, value in given.items():
            self._stack.enter_context(patch(name, value))

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.world.close()

    # -- the trainer's parts --------------------------------------------------------------------------

    def _strategy(self, *_: Any, **__: Any) -> Strategy:
        return Strategy(make_backend=SimBackend, make_exchange=lambda: Mean(self), wraps=False)

    def _make_engine(self, described: RunDescription, calls: Any) -> Engine:
        plan, world, named = self._plan, self.world, described.named
        factory, elastic, limits = described.factory, described.settings.elastic, described.limits
        plan.__dict__.update(elastic=elastic, limits=limits, orphan_s=named[1] if named else 0.0)
        before = self._group if named else None
        self._group = group = LocalGroup(world, plan, Unchecked(), self._schedule, before)
        self._schedule.group = group
        if named:
            group.keeper = group.keeper or Lease()
            calls.tenure = LocalTenure(group, *named)
        times = {"join_s": limits.join_s, "collective_s": limits.collective_s}
        return Engine(
            group,
            SimBackend(world, group.network, in_place=True, **times),
            factory,
            hook=described.hook,
            notice=notice_preemption,
            target=factory.settings.num_workers,
            elastic=elastic,
            limits=limits,
            clock=world.clock,
            jitter=world.random.random,
            on_progress=calls.on_progress,
            on_recovery=calls.on_recovery,
            on_wait=calls.on_wait,
        )

    def _share_state(self, state: Any, giver: int, **options: Any) -> Any:
        self.point("state" if state is not None else "load")
        return share_state(state, giver, **options)

    # -- torch.distributed ----------------------------------------------------------------------------

    def _has_group(self) -> bool:
        worker = self._group.current.get(current())
        return worker is not None and worker.backend.group is not None

    def _broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None) -> None:
        tensor.copy_(self.together(tensor.clone())[src])

    def _reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        every = torch.stack(self.together(tensor.clone()))
        kinds = {dist.ReduceOp.SUM: every.sum, dist.ReduceOp.MIN: every.amin, dist.ReduceOp.MAX: every.amax}
        tensor.copy_(kinds[op](0))

    def _broadcast_objects(self, object_list: list[Any], src: int = 0, group: Any = None) -> None:
        object_list[:] = copy.deepcopy(self.together(list(object_list))[src])

    def _all_gather(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = copy.deepcopy(self.together(obj))

    def _all_gather_tensors(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        for kept, found in zip(tensor_list, self.together(tensor.clone()), strict=True):
            kept.copy_(found)

    def _gather(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Any = None) -> None:
        every = self.together(obj)
        if object_gather_list is not None:
            object_gather_list[:] = copy.deepcopy(every)

    def _scatter(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        group: Any = None,
    ) -> None:
        given = self.together(scatter_object_input_list)[src]
        scatter_object_output_list[0] = copy.deepcopy(given[self.here.host.rank])
