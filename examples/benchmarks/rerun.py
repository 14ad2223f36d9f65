"""A function with a checkpoint per epoch, one of three workers killed: how long until the function runs again.

Each contender is a script in kill_one/, run as a new process; the function in it is the same loop for all. Its ranks
note when they begin and when they take a step. This process reads along, kills rank 1 (SIGKILL) in the middle of the
second epoch, and lets the script run to its end.

    first_step_s    from the kill to the first step of the function that runs again
    begins_s        from the kill to its beginning, when the newest checkpoint is loaded
    ratio           first_step_s over that of Ray Train v2, of the same round
    batches_redone  steps of rank 0 that the checkpoint does not hold
    survivors       processes that trained before the kill and train again

    python examples/benchmarks/rerun.py --rounds 5
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import traces
from processes import PEERS
from recovery import Case, arguments, in_turn, kill_in
from report import claim_stdout, emit, spread

COLUMNS = ("contender", "first_step_s", "begins_s", "ratio", "batches_redone", "survivors", "note")
FIGURES = ("first_step_s", "begins_s", "batches_redone", "survivors")
BEGINS = "begins"  # plain_loop.BEGINS; that module needs the environment of a contender
AGAINST = "Ray Train v2"
CONTENDERS = (
    Case("raysgd", PEERS["raysgd"], script="function_with_raysgd.py"),
    Case(AGAINST, PEERS[AGAINST], extra={"LEAST": "3"}),
    Case("Ray Train v2, elastic", PEERS[AGAINST]),
    Case("torchrun", PEERS["torchrun"]),
)


def run(case: Case, steps: int) -> dict[str, float]:
    """One kill; what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        _, killed_at, _ = kill_in(folder, case, steps)
        return judged(traces.read(folder), traces.read(Path(folder, BEGINS)), killed_at)


def judged(steps: Sequence[traces.Step], begins: Sequence[traces.Step], killed_at: float) -> dict[str, float]:
    """The figures of one kill. A step that was under way at the kill may still come to its end; what counts comes after
    a beginning."""
    begin = next(each for each in begins if each.at > killed_at)
    first = next(each for each in steps if each.at > begin.at)
    before = {step.process for step in steps if step.at <= killed_at}
    after = {step.process for step in steps if step.at > begin.at}
    return {
        "first_step_s": first.at - killed_at,
        "begins_s": begin.at - killed_at,
        "batches_redone": sum(s.at < begin.at and s.rank == 0 and s.epoch >= begin.epoch for s in steps),
        "survivors": len(before & after),
    }


def row(case: Case, results: dict[str, list[dict[str, float]]], failed: dict[str, str]) -> dict[str, Any]:
    if case.peer.missing():
        return {"contender": case.name, "note": f"not installed: {', '.join(case.peer.missing())}"}
    own = results[case.name]
    row: dict[str, Any] = {"contender": case.name, "note": failed.get(case.name, "")}
    row |= {name: spread([result[name] for result in own]) for name in FIGURES}
    pairs = zip(own, results.get(AGAINST, []), strict=False)  # empty where that one is not installed
    ratios = [mine["first_step_s"] / theirs["first_step_s"] for mine, theirs in pairs]
    row["ratio"] = spread(ratios) if ratios else None
    return row


def main() -> None:
    args, asked = arguments(__doc__, CONTENDERS)
    out = claim_stdout()
    results, failed = in_turn(asked, args.rounds, lambda case: run(case, args.steps))
    emit(out, "rerun", vars(args), [row(case, results, failed) for case in asked], COLUMNS)


if __name__ == "__main__":
    main()
