"""Every benchmark script runs, prints what it promises, and keeps its promises where no clock is involved."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"


def smoke(script: str, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), "--smoke", *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "BENCHMARK_DEBUG": "1"},
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["benchmark"] == script.removesuffix(".py")
    assert document["machine"]["cores"] and document["machine"]["versions"]["torch"]
    return document


def module(name: str) -> ModuleType:
    """A benchmark's part that stands alone."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look their module up
    try:
        spec.loader.exec_module(loaded)
    finally:
        del sys.modules[name]
    return loaded


@pytest.mark.slow
def test_throughput() -> None:
    rows = smoke("throughput.py", "--workloads", "tiny", "gpt")["rows"]
    assert {(row["workload"], row["contender"]) for row in rows} == {
        (workload, contender) for workload in ("tiny", "gpt") for contender in ("hand-written", "raysgd")
    }
    assert all(row["us_per_step"] > 0 for row in rows)


@pytest.mark.slow
def test_startup() -> None:
    rows = {row["contender"]: row for row in smoke("startup.py")["rows"]}
    assert rows.keys() == {"raysgd", "torchrun"}
    assert all(row["exit_s"]["median"] >= row["first_epoch_s"]["median"] > 0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.elastic
def test_recovery() -> None:
    first = smoke("recovery.py")["rows"][0]
    assert first["case"] == "raysgd, in place"
    assert (first["lost"], first["doubled"], first["batches_redone"]["median"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.elastic
def test_chaos() -> None:
    (row,) = smoke("chaos.py")["rows"]
    assert row["faults"] == 3 == sum(row["faults_by_kind"].values())
    assert (row["lost"], row["doubled"], row["left_behind"], row["broken"]) == (0, 0, 0, [])


def test_a_gap_is_between_neighbours() -> None:
    traces = module("traces")
    steps = [traces.Step(at, 1, 0, epoch) for at, epoch in [(0.0, 0), (1.0, 0), (5.0, 1), (5.5, 1)]]
    assert traces.longest_gap(steps) == 4.0
    assert traces.longest_gap(steps, within_epochs=True) == 1.0
    assert traces.longest_gap(steps[:1]) == 0.0


def test_a_process_notes_its_steps(tmp_path: Path) -> None:
    traces = module("traces")
    trace = traces.StepTrace(str(tmp_path))
    trace.step(2, 0)
    trace.step(1, 1)
    assert [(step.process, step.rank, step.epoch) for step in traces.read(tmp_path)] == [
        (os.getpid(), 2, 0),
        (os.getpid(), 1, 1),
    ]
    assert traces.active(tmp_path, within_s=60) == [os.getpid()]


def test_the_page_is_filled() -> None:
    fill_page = module("fill_page")
    row = {"contender": "raysgd", "first_epoch_s": {"median": 2.0, "least": 1.0, "most": 3.0, "count": 3}}
    machine = {"cores": 2, "cpu": "x", "python": "3.11", "versions": {"ray": "2.60"}, "load": [0.1]}
    document = {"benchmark": "startup", "command": "startup.py", "machine": machine, "rows": [row, row]}
    page = "before\n<!-- table: startup -->\nold\n<!-- end -->\n<!-- table: chaos -->\nkept\n<!-- end -->\n"
    filled = fill_page.filled(page, {"startup": document})
    assert "| raysgd | 2 (1 to 3) |" in filled
    assert "old" not in filled and "kept" in filled and filled.startswith("before\n")
    assert fill_page.filled(filled, {"startup": document}) == filled
