"""Samples per second before, while and after one worker of three is killed in mid-epoch, for raysgd and its peers.

    python examples/benchmarks/kill_curve.py

It reads the same notes of steps as recovery.py. A sample is repeated if it belongs to a part of the epoch that had
been done before the kill, which a restart from the last checkpoint does again; repeated samples are counted apart.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import traces
from fill_page import REPEATED
from recovery import CASES, STEPS, Case, kill_in, newcomers_first_step
from recovery import told as reason
from report import claim_stdout, emit

COLUMNS = ("contender", "workers", "before", "still_s", "repeated_samples", "note")
SHOWN = {case: name for name, case in REPEATED.items()}
BATCH_SIZE = 8  # what kill_in sets
BIN_S = 0.25


def curve(steps: Sequence[traces.Step], killed_at: float, redone: int, epoch: int, bins: range) -> dict[str, Any]:
    """New and repeated samples per second in each bin, which is named by where it begins after the kill. Of what each
    rank does after the kill in the `epoch` of the kill, the first `redone` steps are repeated."""
    new, repeated, again = Counter[int](), Counter[int](), Counter[int]()
    for step in steps:
        number = int((step.at - killed_at) // BIN_S)
        if step.at > killed_at and step.epoch == epoch and again[step.rank] < redone:
            again[step.rank] += 1
            repeated[number] += 1
        else:
            new[number] += 1
    return {
        "bin_s": BIN_S,
        "from_s": [number * BIN_S for number in bins],
        "new_per_s": [new[number] * BATCH_SIZE / BIN_S for number in bins],
        "repeated_per_s": [repeated[number] * BATCH_SIZE / BIN_S for number in bins],
    }


def row(
    case: Case, steps: Sequence[traces.Step], victim: traces.Step, killed_at: float, bins: range, of_epoch: int
) -> dict[str, Any]:
    """A peer begins the epoch again, so all steps that its rank 0 had done of it are repeated. raysgd continues: whole steps
    that are noted beyond those `of_epoch` are repeated; survivors may note the step of the kill twice."""
    before = [step for step in steps if step.at <= killed_at]
    if case.continues:
        redone = max(0, sum(step.epoch == victim.epoch for step in steps) // case.workers - of_epoch)
    else:
        redone = sum((step.rank, step.epoch) == (0, victim.epoch) for step in before)
    drawn = curve(steps, killed_at, redone, victim.epoch, bins)
    after = [step for step in steps if step.at > killed_at]
    calm = [rate for start, rate in zip(drawn["from_s"], drawn["new_per_s"], strict=True) if start < -BIN_S]
    if case.continues:  # the pause in which the replacement joins is not the one that the failure makes
        joined = newcomers_first_step(list(steps), killed_at)
        alone = [step for step in after if step.at < joined - 1.0]
        after = alone or [step for step in after if step.at <= joined]
    return {
        "contender": SHOWN[case.name],
        "workers": case.workers,
        "before": round(sum(calm) / len(calm), 1),
        "still_s": round(traces.longest_gap([before[-1], *after], within_epochs=True), 3),
        "repeated_samples": redone * case.workers * BATCH_SIZE,
        **drawn,
    }


def measured(case: Case, steps: int, epochs: int, bins: range) -> dict[str, Any]:
    if case.peer.missing():
        return {"contender": SHOWN[case.name], "note": f"not installed: {', '.join(case.peer.missing())}"}
    # Speeds are compared here, and the peers do not exchange the indices of their samples.
    extra = {**case.extra, "EPOCHS": str(epochs), "COUNTS": "0"}
    case = replace(case, extra=extra)
    with tempfile.TemporaryDirectory() as folder:
        try:
            victim, killed_at, _ = kill_in(folder, case, steps)
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            if case.continues:
                raise
            return {"contender": SHOWN[case.name], "note": f"failed: {reason(error)}"}
        return row(case, traces.read(folder), victim, killed_at, bins, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="raysgd alone, two short epochs")
    args = parser.parse_args()
    out = claim_stdout()
    steps, epochs, shown_s = (200, 2, (0.5, 2)) if args.smoke else (STEPS, 8, (2, 30))  # before the kill, and after it
    bins = range(int(-shown_s[0] / BIN_S), int(shown_s[1] / BIN_S))
    cases = [case for case in CASES if case.name in SHOWN]
    rows = []
    for case in cases[:1] if args.smoke else cases:
        rows.append(measured(case, steps, epochs, bins))
        print({name: rows[-1].get(name) for name in COLUMNS}, file=sys.stderr)
    emit(out, "kill_curve", {"steps": steps, "epochs": epochs}, rows, COLUMNS)


if __name__ == "__main__":
    main()
