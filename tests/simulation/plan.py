"""Describe a simulated run as a value: its size, its script, and a list of faults. A seed draws one.

A plan prints as the Python expression that makes it, so that a schedule of faults can be shortened, and kept as a test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from raysgd.config import ElasticConfig, Limits

__all__ = ["HARMLESS", "KINDS", "PHASES", "PLANS", "Fault", "Plan", "named_plan_for", "plan_for"]

# Moments in a worker at which a fault can be injected. Where the user's code runs, it can also raise an error.
RUNNING = ("data", "forward", "reduced", "applied", "message")
FORMING = (
    "leave",
    "offer",
    "join",
    "formed",
    "state",
    "load",
    "leave ended",
    "join ended",
    "state ended",
    "load ended",
)
TAKING_OVER = ("orphan", "orphan", "adopt", "adopted", "attach", "attach ended")
STARTING = ("process start", "warm", "warm ended", "prepare", "build", "build ended")
OTHER = (
    "validate",
    "save",
    "asks",
    "answered",
    "restore",
    "function",
    "run",
    "run ended",
    "noticed",
    "close",
    "close ended",
)
USERS = (
    "forward",
    "forward",
    "applied",
    "validate",
    "save",
    "restore",
    "noticed",
    "hook",
    "setup",
    "resized",
    "closing",
    "function",
    "state_dict",
    "load_state_dict",
)
LOADING = ("restore", "adopting", "adopted")
# What the driver is in, for faults that are injected while it waits for an event.
PHASES = (
    "start",
    "train",
    "validate",
    "apply",
    "save",
    "load",
    "resize",
    "idle",
    "recovery",
    "change",
    "growth",
    "agreement",
    "rendezvous",
    "interruption",
    "shutdown",
)
BRIEF = {"agreement", "resize", "load", "save", "apply", "idle", "change", "growth", "interruption"}

ON_WORKERS = (*["kill"] * 3, "stop", "freeze", "slow", "skew", "disconnect", "reset", "notice", "lose")
ON_NODES = ("node", "cut", "partition", "split", "drain", "add")
ON_DRIVER = ("ctrl-c", "ctrl-c", "cancel", "callback", "pause", "jump")
ON_SCRIPT = ("die", "die", "die", "suspend", "rival", "abandon")  # only of a trainer with a name
SENDING = ("submit", "send", "keeper")
KINDS = tuple(dict.fromkeys((*ON_WORKERS, *ON_NODES, "gpu", "raise", "loader", *ON_DRIVER, *ON_SCRIPT)))
# Faults that alone need no recovery: planned changes, and errors that end a call.
HARMLESS = {"add", "drain", "notice", "raise", "ctrl-c", "cancel", "callback", *ON_SCRIPT}


class Printed:
    """Prints as the expression that makes it. Fields with their default values are left out."""

    def __repr__(self) -> str:
        given = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value, usual in given if value != usual)})"
        )


@dataclass(frozen=True, repr=False)
class Fault(Printed):
    """A fault of this `kind`, injected the `count`th time that a worker reaches the point `at`, into it and `others` more
    workers. If `at` is a phase of the driver ("in recovery"), it counts how often the driver waits in that phase, and
    `pick` chooses the worker. `seconds` is how long it lasts, for those that end.

    kill, stop, freeze    the process ends; stops for some seconds; stops for good
    slow, skew            it computes ten times more slowly; its clock jumps
    disconnect, reset     the driver loses its control connection; its peers lose their connections to it
    notice, drain         SIGTERM, 31 s before its machine is stopped; its machine is drained
    lose                  its reports of progress and its snapshots get lost for a while
    node, add             its machine vanishes; a machine is added
    cut, partition, split its machine's links are blocked: all of them, the one to the driver, the one to another machine
    gpu                   its GPU breaks, and with an odd `pick` so it does in each later process
    raise, loader         the user's code raises an error; a process of its data loader ends
    ctrl-c, cancel        the call is interrupted; another thread cancels it
    callback              the user's callback raises an error
    pause, jump           the driver does nothing for a while; its clock jumps
    die, suspend          its process ends, and the script is started again; it is stopped, and another script may be started
    rival, abandon        another script is started while it runs; it ends, and is never started again
    """

    kind: str
    at: str
    count: int = 1
    others: int = 0
    pick: int = 0
    seconds: float = 1.0


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """Everything that decides a run. `seed` decides the delays, `later` when nodes are added and how large they are,
    `late` how many of the messages arrive up to half a second late, and `script` the calls of the user's script, such as
    "train" (an epoch), "train 7" and "resize 2". With `orphan_s`, the trainer has a name. With `compare`, the driver compares
    the ranks' weights after calls, which must be equal. `retries` is how many failures a call may survive. If it `shares`
    states, ranks give them to each other, and not through the driver."""

    seed: int = 0
    ranks: int = 2
    nodes: tuple[int, ...] = (2,)
    later: tuple[tuple[float, int], ...] = ()
    samples: int = 12
    batch: int = 1
    global_batch: int | None = None
    step_s: float = 0.05
    late: float = 0.01
    in_place: bool = True
    min_workers: int = 1
    grow: Any = True
    spares: int = 0
    snapshot_every: Any = "epoch"
    compare: bool = False
    retries: int = -1
    max_attempts: int = 100
    orphan_s: float = 0.0
    shares: bool = False
    script: tuple[str, ...] = ("train",)
    faults: tuple[Fault, ...] = ()

    @cached_property
    def elastic(self) -> ElasticConfig:
        return ElasticConfig(
            min_workers=self.min_workers,
            backoff_s=0.2,
            backoff_max_s=1.0,
            max_attempts=self.max_attempts,
            hang_timeout_s=10.0,
            grow=self.grow,
            snapshot_every=self.snapshot_every,
            hot_spares=self.spares,
            on_divergence="raise" if self.compare else "warn",
        )

    @cached_property
    def limits(self) -> Limits:
        return Limits.derive(timeout_s=10.0, hang_timeout_s=10.0, start_s=20.0)


OTHER_CALLS = ("validate", "apply", "save", "load", "resize", "idle")


def plan_for(seed: int) -> Plan:
    """Draw a plan. Most have few ranks and few faults; some have many of both."""
    draw = random.Random(f"plan {seed}")
    ranks = (
        draw.choice([1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6])
        if draw.random() < 0.95
        else draw.choice([8, 8, 16, 16, 32, 64])
    )
    batch, steps = draw.randint(1, 4), draw.randint(3, 12 if ranks < 8 else 5)
    grow = draw.choice([True, True, True, "epoch", False])
    nodes, later = _machines(draw, ranks)
    compare = draw.random() < 0.3
    faults = tuple(_fault(draw) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4, 6, 9])))
    places = {fault.at.removeprefix("in ") for fault in faults}
    plan = Plan(
        seed=seed,
        ranks=ranks,
        nodes=nodes,
        later=later,
        samples=max(1, batch * ranks * steps - draw.randint(0, batch * ranks - 1)),
        batch=batch,
        global_batch=draw.choice([None, None, batch * ranks]),
        step_s=draw.choice([0.01, 0.01, 0.05, 0.3]),
        late=draw.choice([0.01, 0.1, 0.1]),
        in_place=draw.random() < 0.85,
        min_workers=draw.randint(1, ranks),
        grow=grow,
        spares=draw.choice([0, 0, 1, 2]) if grow else 0,
        snapshot_every=draw.choice(["epoch", "epoch", 1, 3, None]),
        compare=compare,
        shares=seed % 2 == 0,
        retries=draw.choice([-1, -1, -1, -1, -1, 0, 1, 2]),
        script=_script(draw, ranks, places),
        faults=faults,
    )
    if seed % 3 == 0:  # in a third of the runs, a rank refuses what is loaded
        script = tuple(f"load {seed % ranks}" if line == "load" else line for line in plan.script)
        plan = replace(plan, script=script)
    return _with_broken_gpus(_with_causes(plan, places, draw.randint(2, 8)))


def _with_broken_gpus(plan: Plan) -> Plan:
    """Return the plan, in which now and then a GPU breaks too. It is drawn apart, so that the rest does not depend on it."""
    draw = random.Random(f"gpus {plan.seed}")
    if draw.random() > 0.08:
        return plan
    at = draw.choice(["forward", "forward", "applied", "formed", "validate", "setup", "load_state_dict"])
    count, pick = draw.randint(1, 12), draw.randrange(64)
    return replace(plan, faults=(*plan.faults, Fault("gpu", at, count, pick=pick)))


def _with_causes(plan: Plan, places: set[str], count: int) -> Plan:
    """Return a plan in which what the faults need to hit something happens: that workers join, or a call is interrupted."""
    if "growth" in places:
        faults = (Fault("kill", "applied", count), *plan.faults)
        ranks, samples = max(plan.ranks, 2), max(plan.samples, 16 * plan.batch)
        plan = replace(plan, ranks=ranks, nodes=(ranks, *plan.nodes), samples=samples, global_batch=None, faults=faults)
        plan = replace(plan, step_s=0.3, in_place=True, grow=True, min_workers=1, retries=-1)
    if "interruption" in places:
        plan = replace(plan, step_s=0.3, faults=(Fault("ctrl-c", "in train", count), *plan.faults))
    return plan


def _machines(draw: random.Random, ranks: int) -> tuple[tuple[int, ...], tuple[tuple[float, int], ...]]:
    """Draw how many workers each node can hold, and which nodes are added later, and when."""
    nodes, left = [], ranks + draw.choice([0, 0, 1, ranks])
    while left > 0:
        nodes.append(min(left, draw.randint(1, ranks)))
        left -= nodes[-1]
    if len(nodes) == 1 or draw.random() < 0.8:
        return tuple(nodes), ()
    return tuple(nodes[:-1]), ((round(draw.uniform(0.5, 15.0), 1), nodes[-1]),)


def _script(draw: random.Random, ranks: int, places: set[str]) -> tuple[str, ...]:
    """Draw the calls. Most of those in which faults are to be injected are among them."""
    wanted = [each for each in OTHER_CALLS if each in places and draw.random() < 0.7]
    script = []
    for _ in range(draw.randint(1, 3)):
        script.append(draw.choice(["train", "train", f"train {draw.randint(1, 20)}", f"fit {draw.randint(1, 5)}"]))
        other = wanted.pop() if wanted else draw.choice([*OTHER_CALLS, "idle", "", ""])
        if other == "load" and "save" not in script:
            script.insert(draw.randrange(len(script)), "save")
        script.append(f"resize {draw.randint(1, ranks)}" if other == "resize" else other)
    return tuple(filter(None, script))


def _fault(draw: random.Random) -> Fault:
    kind = draw.choice(
        draw.choice([ON_WORKERS, ON_WORKERS, ON_NODES, ON_DRIVER, ("raise", "raise", "raise", "loader")])
    )
    count = min(draw.randint(1, 40), draw.randint(1, 40))
    if kind == "raise":
        at = draw.choice(USERS)
    elif kind == "loader":
        at = "data"
    elif kind in ON_DRIVER or draw.random() < 0.4:
        at = f"in {draw.choice(PHASES)}"
    else:
        at = draw.choice(draw.choice([RUNNING, RUNNING, FORMING, FORMING, STARTING, OTHER]))
    if at not in RUNNING:
        count = min(count, draw.randint(1, 4 if at.removeprefix("in ") in BRIEF else 12))  # as these come less often
    others, pick = draw.choice([0, 0, 0, 0, 1, 2, 16]), draw.randrange(64)
    if at == "restore" and kind != "raise":
        at = LOADING[pick % len(LOADING)]
    return Fault(
        kind=kind,
        at=at,
        count=count,
        others=others,
        pick=pick,
        seconds=draw.choice([0.05, 1.0, 4.0, 8.0, 25.0]),
    )


def named_plan_for(seed: int) -> Plan:
    """Draw a plan of a trainer with a name, whose script ends, is stopped, or is started twice."""
    draw = random.Random(f"named plan {seed}")
    plan = plan_for(seed)
    faults = [each for each in plan.faults[: draw.choice([0, 0, 1, 2, 3])] if each.kind != "gpu"]
    for _ in range(draw.choice([1, 1, 2, 2, 3, 4])):
        kind, count = draw.choice(ON_SCRIPT[:-1]), min(draw.randint(1, 50), draw.randint(1, 50))
        at = draw.choice(
            [*SENDING, *SENDING, *RUNNING, *["in train"] * 3, *(f"in {phase}" for phase in PHASES), *FORMING]
        )
        if at.removeprefix("in ") in BRIEF:
            count = min(count, draw.randint(1, 6))
        seconds = draw.choice([0.05, 1.0, 4.0, 8.0, 25.0])
        if kind == "suspend":
            seconds = draw.choice([1.0, round(draw.uniform(29.0, 34.0), 2), 40.0, 70.0])
        faults.append(Fault(kind, at, count, pick=draw.randrange(64), seconds=seconds))
    for _ in range(draw.choice([0, 0, 1, 2])):
        kind, others = draw.choice([*ON_WORKERS[:-1], "node", "cut", "partition"]), draw.choice([0, 0, 1, 16])
        faults.append(Fault(kind, draw.choice(TAKING_OVER), draw.randint(1, 8), others, draw.randrange(64), 8.0))
    draw.shuffle(faults)
    orphan_s = draw.choice([5.0, 20.0, 60.0, 600.0])
    if draw.random() < 0.1:
        faults.append(Fault("abandon", draw.choice([*SENDING, *RUNNING, "in train"]), draw.randint(1, 50)))
    return replace(plan, faults=tuple(faults), orphan_s=orphan_s)


PLANS = {"": plan_for, "named": named_plan_for}
