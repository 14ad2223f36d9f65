"""Create, train, save, end a worker and shut down, again and again in one driver: nothing grows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.background import Background

pytestmark = [pytest.mark.elastic, pytest.mark.nightly]

SCRIPT = Path(__file__).with_name("cycles.py")
# Cycles until everything that is created only once exists: Ray's connections, imports, the allocator's memory.
SETTLED = 10
KINDS = ["torch:40", "function:15"]
# Ray itself keeps about 50 kB for each actor that has ended, and the C library does not return all freed memory.
MEMORY_KB = 400.0

Row = dict[str, Any]


def run(background: Background) -> list[Row]:
    done = background.run(str(SCRIPT), *KINDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.script(run=run)
def test_nothing_grows(outcome: Callable[[], list[Row]]) -> None:
    rows = outcome()
    for row in rows:
        assert (row["workers"], row["actors"], row["shared_memory"]) == (0, 0, []), row
        assert not {"Engine", "WorkerTable", "TorchTrainer", "TFTrainer", "Trainer"} & set(row["objects"]), row
        # The folder of the worker that the cycle itself killed. The next worker on that machine removes it.
        assert len(row["temporary"]) <= 1, row
        assert set(row["files"]) <= {"checkpoint.pt", "runs"}, row
    for kind in KINDS:
        kind, _, count = kind.partition(":")
        mine = [row for row in rows if row["kind"] == kind]
        assert len(mine) == int(count)
        for row in mine:  # what modules hold as constants exists after the first cycle, and caches hold some positions
            more = {name for name, number in row["objects"].items() if number > mine[0]["objects"].get(name, 0)}
            assert more <= {"Progress"}, (mine[0]["objects"], row)
        early, late = mine[:SETTLED], mine[SETTLED:]
        for name in ("descriptors", "sockets", "listening", "threads"):
            most = max(row[name] for row in early)
            # The number of Ray's own threads and connections varies, so one or two more are not growth.
            assert late[-1][name] <= most + 2, (kind, name, [row[name] for row in mine])
    memory = [row["rss_kb"] for row in rows if row["kind"] == "torch"][SETTLED:]
    assert slope(memory) < MEMORY_KB, memory


def slope(values: list[float]) -> float:
    """Return the slope of the least-squares line through these values."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    over = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return over / sum((at - middle) ** 2 for at in range(len(values)))
