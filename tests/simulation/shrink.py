"""Shorten the plan of a run that failed, for as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.plan import Plan
from tests.simulation.scenario import run

__all__ = ["kind_of", "shrink"]


def kind_of(error: BaseException | None) -> str:
    """Return what two failures of the same kind have in common: the error without its numbers and names."""
    if error is None:
        return ""
    text = re.sub(r"[\[(].*|w?[0-9.]+", "_", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {text}"


def shrink(plan: Plan, *, most_runs: int = 1000) -> Plan:
    """Return a plan with as few faults, calls, machines and ranks as are needed for the same kind of failure."""
    wanted, runs = kind_of(run(plan).error), 0

    def fails(shorter: Plan) -> bool:
        nonlocal runs
        runs += 1
        return runs < most_runs and kind_of(run(shorter).error) == wanted

    while True:
        before = plan
        for name in ("faults", "script"):
            plan = _with_fewer(plan, name, fails)
        for shorter in _simpler(plan):
            if fails(shorter):
                plan = shorter
                break
        if plan == before or runs >= most_runs:
            return plan


def _with_fewer(plan: Plan, name: str, fails: Callable[[Plan], bool]) -> Plan:
    """Leave out as many items of a field as possible: first halves, then quarters, at last single ones (delta
    debugging)."""
    size = len(getattr(plan, name))
    while size:
        items = getattr(plan, name)
        for start in range(0, len(items), size):
            shorter = replace(plan, **{name: items[:start] + items[start + size :]})
            if fails(shorter):
                plan = shorter
                break
        else:
            size //= 2
    return plan


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans that are a little simpler than this one."""
    usual = Plan()
    for name in ("later", "spares", "grow", "snapshot_every", "global_batch", "in_place", "min_workers"):
        if getattr(plan, name) != getattr(usual, name):
            yield replace(plan, **{name: getattr(usual, name)})
    for ranks in sorted({1, 2, 3, plan.ranks // 2, plan.ranks - 1}):
        if 0 < ranks < plan.ranks:
            smaller = replace(plan, ranks=ranks, min_workers=min(plan.min_workers, ranks))
            yield replace(smaller, nodes=(ranks,))
            yield smaller
    for samples in (plan.batch * plan.ranks, plan.samples // 2, plan.samples - 1):
        if 0 < samples < plan.samples:
            yield replace(plan, samples=samples)
    if plan.batch > 1:
        yield replace(plan, batch=1)
    for index, fault in enumerate(plan.faults):
        for simpler in (
            replace(fault, others=0),
            replace(fault, seconds=1.0),
            replace(fault, count=fault.count // 2),
            replace(fault, pick=0),
        ):
            if simpler != fault and simpler.count:
                yield replace(plan, faults=(*plan.faults[:index], simpler, *plan.faults[index + 1 :]))
