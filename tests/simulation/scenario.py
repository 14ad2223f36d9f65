"""One simulated run: the plan that a seed decides, its faults, and the script that a user would have written."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.config import ElasticConfig, Limits
from raysgd.core.metrics import COMMITTED
from raysgd.core.policy import Recovery
from raysgd.core.protocols import Call
from raysgd.engine.engine import Engine, Job
from raysgd.errors import ResourceError, WorkerStartError
from tests.simulation.checker import Checker, Violation
from tests.simulation.group import Node, SimGroup, Worker
from tests.simulation.network import SimBackend
from tests.simulation.replica import SimReplica, UserError
from tests.simulation.world import World

__all__ = ["Fault", "Plan", "Result", "plan_for", "run"]

# Moments in a worker at which a fault can be injected. Where the user's code runs, it can also raise an error.
RUNNING = ("forward", "reduced", "applied", "message")
RECOVERING = ("leave", "join", "formed", "state", "load", "state ended", "load ended", "leave ended", "join ended")
STARTING = ("process start", "warm", "warm ended", "prepare", "build", "build ended")
OTHER = ("validate", "run", "run ended", "noticed")
USERS = ("forward", "applied", "validate", "noticed")
KINDS = ("kill", "kill", "kill", "stop", "freeze", "slow", "node", "notice", "drain", "raise")
LIMIT_S = 400.0


@dataclass
class Fault:
    """A fault of this `kind`, injected the `count`th time that a worker reaches `point`, into it and `others` more
    workers."""

    kind: str
    point: str
    count: int
    others: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that a seed decides, apart from delays."""

    seed: int
    ranks: int
    nodes: tuple[int, ...]
    later: tuple[tuple[float, int], ...]
    samples: int
    batch_size: int
    global_batch: int | None
    snapshot_every: Any
    in_place: bool
    step_s: float
    elastic: ElasticConfig
    limits: Limits
    script: tuple[tuple[Any, ...], ...]
    faults: tuple[Fault, ...]


@dataclass
class Result:
    """The result of a run."""

    plan: Plan
    steps: int = 0
    redone: int = 0
    seconds: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    user_errors: int = 0


def plan_for(seed: int) -> Plan:
    """Draw a plan. Most have few ranks and few faults; some have many of both."""
    draw = random.Random(f"plan {seed}")
    ranks = draw.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, 16])
    in_place = draw.random() < 0.85
    batch = draw.randint(1, 4)
    steps = draw.randint(3, 12)
    samples = max(1, batch * ranks * steps - draw.randint(0, batch * ranks - 1))
    snapshot_every = draw.choice(["epoch", "epoch", 1, 3, None])
    elastic = ElasticConfig(
        min_workers=draw.randint(1, ranks),
        backoff_s=0.2,
        backoff_max_s=1.0,
        max_attempts=60,
        hang_timeout_s=10.0,
        grow=(grow := draw.choice([True, True, True, "epoch", False])),
        snapshot_every=snapshot_every,
        hot_spares=draw.choice([0, 0, 1, 2]) if grow else 0,
    )
    nodes, later = _machines(draw, ranks)
    return Plan(
        seed=seed,
        ranks=ranks,
        nodes=nodes,
        later=later,
        samples=samples,
        batch_size=batch,
        global_batch=draw.choice([None, None, batch * ranks]),
        snapshot_every=snapshot_every,
        in_place=in_place,
        step_s=draw.choice([0.01, 0.05, 0.3]),
        elastic=elastic,
        limits=Limits.derive(timeout_s=10.0, hang_timeout_s=10.0, start_s=20.0),
        script=_script(draw, ranks),
        faults=tuple(_fault(draw, in_place) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4, 6, 9]))),
    )


def _machines(draw: random.Random, ranks: int) -> tuple[tuple[int, ...], tuple[tuple[float, int], ...]]:
    """Draw how many workers each node can hold, and which nodes are added later, and when."""
    nodes, left = [], ranks + draw.choice([0, 0, 1, ranks])
    while left > 0:
        nodes.append(min(left, draw.randint(1, ranks)))
        left -= nodes[-1]
    if len(nodes) == 1 or draw.random() < 0.8:
        return tuple(nodes), ()
    return tuple(nodes[:-1]), ((draw.uniform(0.5, 15.0), nodes[-1]),)


def _script(draw: random.Random, ranks: int) -> tuple[tuple[Any, ...], ...]:
    script: list[tuple[Any, ...]] = []
    for _ in range(draw.randint(1, 3)):
        script.append(("train", draw.choice([None, None, draw.randint(1, 20)])))
        other = draw.choice(["validate", "apply", "save", "load", "resize", "remove", "idle", "nothing", "nothing"])
        if other == "resize":
            script.append((other, draw.randint(1, ranks)))
        elif other != "nothing":
            script.append((other,))
    return tuple(script)


def _fault(draw: random.Random, in_place: bool) -> Fault:
    kind = draw.choice(KINDS)
    points = USERS if kind == "raise" else draw.choice([RUNNING, RUNNING, RECOVERING, RECOVERING, STARTING, OTHER])
    return Fault(
        kind=kind,
        point=draw.choice(points),
        count=min(draw.randint(1, 40), draw.randint(1, 40)),
        others=draw.choice([0, 0, 0, 0, 1, 2, 16]),
        seconds=draw.choice([0.05, 1.0, 4.0]),
    )


class Schedule:
    """Injects each fault of a plan once."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._waiting = [(fault, [fault.count]) for fault in plan.faults]
        self.group: SimGroup | None = None
        self.struck: Counter[str] = Counter()

    def strike(self, worker: Worker, point: str) -> None:
        for entry in list(self._waiting):
            fault, count = entry
            if fault.point != point:
                continue
            count[0] -= 1
            if count[0] <= 0:
                self._waiting.remove(entry)
                self._hit(worker, fault)

    def _hit(self, worker: Worker, fault: Fault) -> None:
        assert self.group is not None
        others = [each for each in self.group.workers.values() if each.alive and each is not worker]
        self._world.random.shuffle(others)
        for victim in [*others[: fault.others], worker]:
            self.struck[fault.kind] += 1
            self._world.note("FAULT %s of %s at '%s'", fault.kind, victim.name, fault.point)
            self._inject(victim, fault, mine=victim is worker)

    def _inject(self, victim: Worker, fault: Fault, *, mine: bool) -> None:
        node = victim.node
        if fault.kind == "kill":
            victim.die("SIGKILL")
        elif fault.kind == "stop":
            victim.stop()
            self._world.at(fault.seconds, victim.resume)
        elif fault.kind == "freeze":
            victim.stop()
        elif fault.kind == "slow":
            victim.slow = 10.0
            self._world.at(fault.seconds, lambda: setattr(victim, "slow", 1.0))
        elif fault.kind == "node":
            if node.alive:
                node.alive = False
                self._replace(node)
            for each in list(node.workers):
                each.die("its node vanished", silently=True)
        elif fault.kind == "notice":
            victim.client.notice()
        elif fault.kind == "drain":
            if not node.draining:
                after_s = self._world.random.choice([8.0, 14.0, 40.0])  # with the last two, replacements come first
                node.draining, node.removed_at = True, self._world.now + after_s
                self._replace(node)
                self._world.at(after_s, lambda: [each.die("its node was removed") for each in list(node.workers)])
        elif mine:
            raise UserError(f"planned at '{fault.point}'")

    def _replace(self, node: Node) -> None:
        """Add a new machine for one that leaves, after a while."""
        assert self.group is not None
        fresh = Node(f"{node.name}+", node.slots)
        self._world.at(self._world.between(0.5, 4.0), lambda: self.group.nodes.append(fresh))  # type: ignore[union-attr]


class Script:
    """Runs the user's script, and checks its results."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.checker = Checker(plan)
        self.schedule = Schedule(world, plan)
        self.group = self.schedule.group = SimGroup(world, plan, self.checker, self.schedule.strike)
        self.group.deadline = world.now + LIMIT_S
        for number, (when, slots) in enumerate(plan.later):
            node = Node(f"later{number}", slots)
            world.at(when, lambda node=node: self.group.nodes.append(node))
        self.user_errors = 0
        self._saved: tuple[bytes, list[Any]] | None = None
        limits = {"join_s": plan.limits.join_s, "collective_s": plan.limits.collective_s}
        self.engine = Engine(
            self.group,
            SimBackend(world, in_place=plan.in_place, **limits),
            self._build,
            notice=SimReplica.notice_preemption,
            target=plan.ranks,
            elastic=plan.elastic,
            limits=plan.limits,
            clock=world.clock,
            jitter=world.random.random,
        )

    def _build(self, rank_info: Any, control: Any) -> SimReplica:
        worker = next(each for each in self.group.workers.values() if each.client.control is control)
        worker.compute()
        worker.replica = SimReplica(worker, self.plan, rank_info, control)
        return worker.replica

    def run(self) -> None:
        try:
            self.engine.start()
        except (ResourceError, WorkerStartError):
            if not self.schedule.struck:
                raise
            return  # a failure before the first generation may end the start with such an error
        for name, *given in self.plan.script:
            self.world.note("SCRIPT %s %s", name, given)
            self._until_done(lambda name=name, given=given: getattr(self, f"_{name}")(*given))
        self.engine.stop()
        self.world.run(5.0, lambda: False)
        if self.checker.most > self.plan.ranks:
            raise Violation(f"a group had {self.checker.most} members, and {self.plan.ranks} are wanted at most")
        left = [worker.name for worker in self.group.workers.values() if worker.alive]
        if left:
            raise Violation(f"processes are left after stop: {left}")

    def _until_done(self, call: Callable[[], None]) -> None:
        """Make a call of the script. If the user's own error ends it, make it again."""
        while True:
            try:
                return call()
            except UserError:
                self.user_errors += 1
                self.world.note("SCRIPT the user's error is raised")
                if self.user_errors > self.schedule.struck["raise"]:
                    raise Violation("a user's error was raised more often than it was thrown") from None

    # -- calls ----------------------------------------------------------------------------------------

    def _train(self, num_steps: int | None) -> None:
        before, redone, errors = len(self.checker.truth), self.checker.redone, self.user_errors
        job = Job(Call(SimReplica.train, {"num_steps": num_steps}), again="resume", max_failures=-1)
        parts = self.engine.run(job)
        truth = self.checker.truth
        for name in self.engine._table.members():
            steps = self.group.workers[name].replica.steps  # type: ignore[union-attr]
            if list(steps) != truth:
                raise Violation(
                    f"after train(), {name} has applied {len(steps)} steps, and the weights have {len(truth)}"
                )
        if num_steps is None and truth and truth[-1][2] != self.plan.samples:
            raise Violation(f"train() returned after {truth[-1]}, before the end of the epoch")
        committed = max(value.get(COMMITTED) or 0 for part in parts for value in part.values)
        samples = sum(stop - start for _, start, stop in truth[before:])
        if redone == self.checker.redone and errors == self.user_errors and committed != samples:
            raise Violation(f"train() reports {committed} samples, and {samples} were used")

    def _validate(self) -> None:
        self._call(SimReplica.validate, {"call": self.engine._calls})

    def _apply(self) -> None:
        self._call(SimReplica.apply, {}, again="keep")

    def _call(self, method: Callable[..., Any], arguments: dict[str, Any], again: Any = "repeat") -> Any:
        return self.engine.run(Job(Call(method, arguments), again=again, max_failures=-1))[-1].values

    def _save(self) -> None:
        data = [value for value in self._call(SimReplica.checkpoint, {}) if value is not None]
        self._saved = data[0], list(self.checker.truth)

    def _load(self) -> None:
        if self._saved is None:
            return
        data, steps = self._saved
        loads = self.engine.progress.loads + 1
        self.engine.state_changed_by_hand(replaced=True)
        self.checker.loaded(steps, loads)
        self._call(SimReplica.restore, {"data": data, "loads": loads})

    def _resize(self, count: int) -> None:
        self.engine.resize(count)

    def _remove(self) -> None:
        if self.engine.world_size > 1:
            self.engine.remove([self.engine.world_size - 1])

    def _idle(self) -> None:
        self.world.run(1.0, lambda: False)


def run(seed: int, *, tracing: bool = False) -> tuple[Result, World, BaseException | None]:
    """Run a seed. Return its result, its world with the trace, and the error that ended it."""
    world = World(seed, tracing=tracing)
    plan = plan_for(seed)
    script, error = Script(plan, world), None
    try:
        script.run()
    except (Exception, Violation) as raised:
        error = raised
    result = Result(
        plan,
        steps=script.checker.applied_steps,
        redone=script.checker.redone,
        seconds=world.now - 1000.0,
        struck=script.schedule.struck,
        recoveries=script.engine.recoveries,
        user_errors=script.user_errors,
    )
    return result, world, error
