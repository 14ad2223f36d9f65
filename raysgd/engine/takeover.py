"""Take over the workers that an earlier driver of a trainer with a name has left. Driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raysgd.core.decisions.lease import LEASE_S
from raysgd.core.decisions.policy import Observation, Recovery
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.snapshot import newest_state
from raysgd.engine.call import PartialResults, RunningCall, collect_results_since
from raysgd.engine.failure import raise_user_error
from raysgd.engine.generation import Generation
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop, StateLost
from raysgd.engine.worker_info import Stage
from raysgd.engine.worker_table import LOOK_S, WorkerTable
from raysgd.errors import counted
from raysgd.workers.calls import with_value
from raysgd.workers.orphan import Left


def take_over(
    table: WorkerTable,
    generation: Generation,
    loop: RecoveryLoop,
    log: RecoveryLog,
    trained: int | None,
    reached: Progress | None,
    recoveries: Sequence[Recovery],
    *,
    keeps_snapshots: bool,
) -> tuple[int, list[PartialResults]] | None:
    """Return the number of the newest call that trained, and what was measured in it. Return None
    if no worker can be taken over: then all are ended."""
    since, workers = table.clock(), table.adopt()
    ranks = [] if trained is None else gather(table, generation, workers)
    states = table.progress_of(table.members())
    if not ranks or max(states.values(), key=lambda each: each.order).place < (reached or Progress()).place:
        table.dismiss(*workers)
        return None
    newest = max(progress.call for progress in states.values())
    if keeps_snapshots and generation.in_place and (best := newest_state(states)):
        generation.rescue_state(best, newest)  # for the case that all fail before the next snapshot
    log.recoveries = list(recoveries)
    seen = Observation("broken", reason="takeover", detail=f"another script has left {counted(len(workers), 'worker')}")
    call = RunningCall(max(newest, trained or 0), -1, len(recoveries), changes=True)
    try:
        with table.during("recovery"):
            revived = loop.recover(seen, call, since=since, world=len(states))
    except StateLost:
        log.recoveries = []
        table.snapshots.forget()
        return None
    parts = results_left(ranks, call=newest)
    return newest, parts if revived is None else collect_results_since(revived, parts, call=newest)


def gather(table: WorkerTable, generation: Generation, workers: Sequence[str]) -> list[Left]:
    """Make members of those of the newest generation that have the training's state, which an
    earlier one may have been continued without. Dismiss the others. Return what the members have,
    in rank order."""
    deadline = table.clock() + LEASE_S + generation.limits.hang_s  # they may still hear of the other driver
    infos = [table[worker] for worker in workers]
    while table.clock() < deadline and any(i.stage < Stage.UP and i.ended is None for i in infos):
        table.pump(LOOK_S)
    up = [info.worker for info in infos if info.stage >= Stage.UP and info.ended is None]
    outcomes: dict[str, Outcome] = {}
    while up:
        answered = generation.attach(up)
        # A large operator may not arrive at the first try.
        up = [each for each in up if isinstance(answered[each], Interrupted) and each not in outcomes]
        outcomes |= answered
    for worker, outcome in outcomes.items():
        if isinstance(outcome, Failed):  # the new code's: the state is kept
            raise_user_error(outcome, table[worker])
    ranks = {w: each.value for w, each in outcomes.items() if isinstance(each, Ok) and each.value is not None}
    newest = max((rank.rank_info.generation for rank in ranks.values()), default=0)
    members = [worker for worker, rank in ranks.items() if rank.rank_info.generation == newest]
    members.sort(key=lambda worker: ranks[worker].rank_info.world_rank)
    table.dismiss(*(worker for worker in workers if worker not in members))
    generation.enter(members)
    return [ranks[worker] for worker in members]


def results_left(ranks: Iterable[Left], *, call: int) -> list[PartialResults]:
    """Collect what these ranks have measured in this call, part by part."""
    parts: dict[tuple[int, int], list[Outcome]] = {}
    for rank in ranks:
        counts = Counter[int]()
        for generation, outcome in rank.parts if rank.call == call else ():
            counts[generation] += 1
            parts.setdefault((generation, counts[generation]), []).append(with_value(outcome))
    return [PartialResults(tuple(parts[key]), key[0]) for key in sorted(parts)]
