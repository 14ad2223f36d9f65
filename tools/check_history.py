"""Check the history of a run in which workers failed: `python tools/check_history.py FILE`. Imports nothing of raysgd.

Each line is a JSON object. The script writes the first and the last one, and each worker one for each step that it has
applied to its weights; all append to one file:

    {"event": "begin", "samples": 101}
    {"event": "step", "worker": "w1", "generation": "g1", "members": ["w1", "w2"], "number": 1, "epoch": 0,
     "samples": [4, 9], "before": "", "after": "6d1c"}
    {"event": "end", "state": "6d1c", "snapshots": []}

`generation` names the process group and `members` its workers, `samples` are those of all of them, and `before` and
`after` name the state of the weights: the lineage of the final weights are the steps that lead to their state.
`snapshots` has the numbers of the steps after which new workers began from a snapshot. Exit status 1: something is wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def lineage(steps: list[Line], state: str) -> list[Line]:
    """Return the steps that led to a state, each as the first worker that applied it wrote it."""
    into: dict[str, Line] = {}
    for each in steps:
        into.setdefault(each["after"], each)
    found: list[Line] = []
    while state in into and len(found) <= len(into):
        found.append(into[state])
        state = into[state]["before"]
    return found[::-1]


def wrong_numbers(line: list[Line]) -> Iterator[str]:
    """Each step is once in the lineage, after the one before it."""
    for before, after in zip([{"number": 0}, *line], line, strict=False):
        if after["number"] <= before["number"]:
            yield f"step {after['number']} was applied twice: after step {before['number']}"
        elif after["number"] > before["number"] + 1:
            yield f"step {before['number'] + 1} is missing: step {after['number']} follows step {before['number']}"


def lost_steps(steps: list[Line], line: list[Line], snapshots: list[int]) -> Iterator[str]:
    """Each step that a worker has applied is in the lineage. What may be missing is the last one of a worker that ended,
    and all that it did, if its steps have left the lineage where others began from a snapshot."""
    kept, into = {each["after"]: each["number"] for each in line} | {"": 0}, {each["after"]: each for each in steps}
    made: dict[str, list[Line]] = {}
    for each in steps:
        made.setdefault(each["worker"], []).append(each)
    for worker, own in made.items():
        stays = max((place for place, each in enumerate(own, 1) if each["after"] in kept), default=0)
        state = own[stays]["before"] if stays < len(own) else ""
        while state not in kept and state in into:
            state = into[state]["before"]
        again = stays < len(own) and kept.get(state) in snapshots
        for each in own[: stays if again else -1]:
            if each["after"] not in kept:
                yield f"step {each['number']} of worker {worker} was committed, and is lost"


def wrong_samples(line: list[Line], samples: int) -> Iterator[str]:
    """Each sample is used once in each epoch."""
    for epoch in sorted({each["epoch"] for each in line}):
        used = Counter(sample for each in line if each["epoch"] == epoch for sample in each["samples"])
        if twice := sorted(sample for sample, times in used.items() if times > 1):
            yield f"epoch {epoch} used samples twice: {twice}"
        if left := sorted({*range(samples)} - {*used}):
            yield f"epoch {epoch} left samples out: {left}"


def overlaps(steps: list[Line]) -> Iterator[str]:
    """Where a worker is in a new generation, the old one makes no step. The last step of a worker that was given up may be
    written later."""
    order: dict[str, int] = {}
    newest: dict[str, int] = {}
    last = {each["worker"]: each for each in steps}
    for each in steps:
        number = order.setdefault(each["generation"], len(order))
        left = [worker for worker in each["members"] if number < newest.get(worker, 0)]
        if each["worker"] in left or (left and last[each["worker"]] is not each):
            yield f"generations overlap: step {each['number']} was made in one that worker {left[0]} had left"
        newest.update({worker: max(number, newest.get(worker, 0)) for worker in each["members"]})


def wrong(lines: list[Line]) -> Iterator[str]:
    """Yield a sentence for each promise that the history breaks."""
    steps = [each for each in lines if each["event"] == "step"]
    begin, end = lines[0], lines[-1]
    if (begin["event"], end["event"]) != ("begin", "end") or not steps:
        yield "the history is not complete: it lacks its beginning, its end, or steps"
        return
    line = lineage(steps, end["state"])
    if not line or line[0]["before"]:
        yield f"the steps that lead to the final state {end['state']!r} are not in the history"
    yield from wrong_numbers(line)
    yield from lost_steps(steps, line, end["snapshots"])
    yield from wrong_samples(line, begin["samples"])
    yield from overlaps(steps)


def main(path: str) -> str | None:
    lines = [json.loads(each) for each in Path(path).read_text(encoding="utf-8").splitlines()]
    found = [*wrong(lines)]
    kept = sum(each["event"] == "step" for each in lines)
    generations = len({each["generation"] for each in lines if each["event"] == "step"})
    print(f"{path}: {kept} lines of steps, {generations} generations, {len(found)} errors")
    return "\n".join(found) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
