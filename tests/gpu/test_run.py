"""`make gpu`: its budgets, its limits, its table and its archive, and, on emulations, all phases that train."""

import importlib.util
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.background import Background
from tools.gpu import carry, notes, run

ENVIRONMENT = {"phase": "env", "what": "machine", "seen": "1 x H100", "unit": "", "note": "", "time": 1.0}
MACHINE = {"gpu": "1 x H100", "cores": 16, "cpu": "x", "python": "3.12", "versions": {"torch": "2.11"}, "load": [0.1]}


def phase(name: str, seconds: float, **others: Any) -> run.Phase:
    return run.Phase(name, "a test", seconds, "none.none", **others)


def test_phases_that_shrink_share_what_the_others_leave() -> None:
    waiting = [phase("C", 60), phase("E", 60, shrinks=True), phase("G", 20, shrinks=True)]
    assert run.allotted(waiting, 200) == 60
    assert run.allotted(waiting[1:], 100) == 60
    assert run.allotted(waiting[1:], 40) == 30
    assert run.allotted([waiting[1], waiting[0]], 100) == 40, "C comes later, and keeps its time"


def test_a_phase_without_enough_time_is_left_out() -> None:
    assert run.allotted([phase("C", 60)], 59) == 59
    assert run.allotted([phase("C", 60)], 29) == 0
    assert run.allotted([phase("E", 60, shrinks=True)], run.LEAST_S - 1) == 0


def test_all_phases_fit_into_eight_minutes() -> None:
    fixed = sum(each.seconds for each in run.PHASES if not each.shrinks and not each.beside)
    assert fixed < 8 * 60


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, commands: dict[str, str], seconds: float) -> list[Any]:
    monkeypatch.setattr(run, "GRACE_S", 0.2)
    monkeypatch.setattr(run, "MANY_CORES", 1)
    monkeypatch.setattr(run, "command", lambda each, *_: ["/bin/sh", "-c", commands[each.name]])
    run.Run(folder, seconds).play([phase(name, 0.5, beside=name == "beside") for name in commands])
    return [(line["phase"], line["seen"]) for line in notes.read([folder / "results.jsonl"])]


def test_a_phase_that_hangs_is_killed_with_its_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child, done = tmp_path / "child", tmp_path / "done"
    commands = {"A": f"sleep 600 & echo $! > {child}; wait", "B": "exit 3", "C": f"touch {done}"}
    assert play(monkeypatch, tmp_path, commands, 60) == [("A", "killed at its limit"), ("B", "ended with status 3")]
    assert done.exists()
    assert not Path("/proc", child.read_text().strip(), "exe").exists()


def test_a_phase_beside_the_others_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = tmp_path / "both"
    commands = {"beside": f"while ! test -e {both}; do sleep 0.01; done; exit 4", "A": f"touch {both}; exit 5"}
    assert play(monkeypatch, tmp_path, commands, 60) == [
        ("A", "ended with status 5"),
        ("beside", "ended with status 4"),
    ]


def test_phases_with_nccl_are_left_out_if_it_forms_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes.Notes(tmp_path / "results.jsonl", "B", 1).add("3 ranks form a group", "refused")
    monkeypatch.setattr(run, "command", lambda each, *_: ["false"])
    run.Run(tmp_path, 60).play([phase("C", 5, nccl=True), phase("C2", 5)])
    seen = [line["seen"] for line in notes.read([tmp_path / "results.jsonl"])]
    assert seen == ["refused", "not run", "ended with status 1"]


def test_phases_for_which_no_time_is_left_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert play(monkeypatch, tmp_path, {"A": "exit 3"}, 0.1) == [("A", "not run")]


def test_the_last_run_of_each_phase_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    notes.Notes(first, "A", 1).add("bits", "same")
    notes.Notes(first, "C", 1).add("the phase", "killed at its limit")
    notes.Notes(second, "C", 1, instead="NCCL emulated").add("killed", 0.5, "s", "same")
    notes.Notes(second, "C", 1).add("steps", 3, detail=True)
    with second.open("a", encoding="utf-8") as file:
        file.write('{"phase": "C", "what": "cut')  # its process was killed
    lines = notes.read([first, second, tmp_path / "missing.jsonl"])
    rows = notes.document([{**ENVIRONMENT, "machine": MACHINE}, *lines], ["run.py"])["rows"]
    killed = {"phase": "C", "what": "killed", "seen": 0.5, "unit": "s", "note": "NCCL emulated; same"}
    bits = {"phase": "A", "what": "bits", "seen": "same", "unit": "", "note": ""}
    assert rows == [{name: ENVIRONMENT[name] for name in notes.COLUMNS}, bits, killed]


def test_the_results_fill_the_page() -> None:
    lines = [{**ENVIRONMENT, "machine": MACHINE}, {**ENVIRONMENT, "what": "a step", "seen": notes.spread([1, 2, 4])}]
    made = json.loads(notes.written(notes.document(lines, ["run.py", "--minutes", "8"])))
    spec = importlib.util.spec_from_file_location("fill_page", notes.ROOT / "examples/benchmarks/fill_page.py")
    assert spec is not None and spec.loader is not None
    fill_page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill_page)
    place = "<!-- table: gpu -->\nNot run yet.\n<!-- end -->"
    assert place in fill_page.PAGE.read_text(encoding="utf-8") or (fill_page.RESULTS / "gpu.json").exists()
    filled = fill_page.filled(place, {made["benchmark"]: made})
    assert "| env | a step | 2 (1 to 4) |" in filled
    assert "`run.py --minutes 8` on 1 x H100, 16 cores (x), Python 3.12, torch 2.11;" in filled


def test_the_archive_has_what_a_trainer_needs_and_its_programs_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel, archive = tmp_path / "ray.whl", tmp_path / "new" / "site.zip"
    with zipfile.ZipFile(wheel, "w") as given:
        for name, mode in {"ray/jars/x.jar": 0o644, "ray/core/raylet": 0o755, "ray/__init__.py": 0o644}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFREG | mode) << 16
            given.writestr(entry, "x" * 1000)
    carry.pack([wheel], archive)
    monkeypatch.setattr(carry, "ARCHIVE", archive)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as without Ray
    root, site = map(Path, carry.search_path().split(os.pathsep)[:2])
    assert (root / "raysgd").is_dir()
    found = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert found == {"ray/core/raylet", "ray/__init__.py"}
    assert os.access(site / "ray/core/raylet", os.X_OK) and not os.access(site / "ray/__init__.py", os.X_OK)


def on_emulations(background: Background, phases: str) -> list[dict[str, Any]]:
    """Run these phases, and return their lines."""
    out = background.folder()
    times = ["--minutes", "14", "--stretch", "5"]  # a limit that ends a phase would be the machine's fault
    ended = background.run("-m", "tools.gpu.run", *times, "--out", str(out), "--phases", phases)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["benchmark"] == "gpu"
    lines = notes.read([out / "results.jsonl"])
    assert not [line for line in lines if line["what"] == "the phase"], (out / "log.txt").read_text(encoding="utf-8")
    return lines


def kills(lines: list[dict[str, Any]]) -> int:
    """Return how many workers were killed. Each kill changes nothing."""
    found = [line["note"] for line in lines if line["phase"] in ("C", "C2", "C3") and "killed" in line["what"]]
    assert not [note for note in found if "; same; in place, 0 batches redone" not in note]
    return len(found)


@pytest.mark.more
@pytest.mark.script("env,A,B,C,D,G", run=on_emulations)
def test_the_phases_run_on_emulations(outcome: Any) -> None:
    lines = outcome()
    seen = {(line["phase"], line["what"]): line["seen"] for line in lines}
    equal = [value for (name, what), value in seen.items() if name == "A" and "in all precisions" in what]
    assert len(equal) == 2 and all(each.split()[0] == each.split()[2] for each in equal)
    assert seen["B", "all-reduce is right, in .item()"] is True
    free = [line["note"] for line in lines if line["phase"] == "B" and "new group" in line["what"]]
    assert len(free) == 4 and all(note == "NCCL emulated; right" for note in free)
    assert kills(lines) == 5
    assert seen["D", "no memory in a step"] == "the user's error"
    afterwards = {what: value for (name, what), value in seen.items() if name == "D" and "afterwards" in what}
    assert list(afterwards.values()) == [3, 3], "a broken GPU, and memory that is freed late, end no training"
    changes = [what.partition(": ")[2] for name, what in seen if name == "G" and ", to " in what]
    assert changes == ["shrink, to 1", "growth, to 2", "worker death, to 1"]


@pytest.mark.nightly
@pytest.mark.script("B2,W,C2,C3,C4", run=on_emulations)
def test_the_phases_with_other_groups_and_waits_run_on_emulations(outcome: Any) -> None:
    lines = outcome()
    late = [line["seen"] for line in lines if line["phase"] == "W"]
    assert late == ["2 of 2 alive", "0 of 2 alive"], "torch's watchdog ends those without raysgd's variables"
    assert kills(lines) == 3
    taken_over = [line["seen"] for line in lines if line["what"] == "script killed, started again: after 3 epochs"]
    assert taken_over == ["same"]
