"""What the benchmarks have in common: turns, gates, traces and pages. `pytest examples/benchmarks` after a change to it."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as for a script of this folder

import fill_page
import gate
import interleaved
import kill_curve
import processes
import recovery
import rerun
import same_numbers
import traces
import workloads


def test_the_summary_takes_the_best_peer_and_leaves_out_what_is_not_measured() -> None:
    setting = {"workload": "tiny", "workers": 2}
    figures = {"raysgd": 90.0, "hand-written": 10.0, "torchrun": 120.0, "Accelerate": 100.0, "raysgd, collating": 1.0}
    rows = [{**setting, "contender": name, "us_per_step": figure} for name, figure in figures.items()]
    rows.append({**setting, "contender": "Lightning", "note": "not installed"})
    startup = {
        "contender": "raysgd",
        "ratio": {"median": 0.25, "least": 0.2, "most": 0.3, "count": 7},
        "second_s": None,
    }
    text = fill_page.summary({"throughput": {"rows": rows}, "startup": {"rows": [startup]}})
    assert text.splitlines()[2:] == [
        "| time of a step, `tiny`, 2 workers | 90 µs | Accelerate: 100 µs | 0.9 |  |  |",
        "| first epoch of a script |  | Ray Train v2 | 0.25 | 7 | 0.2 to 0.3 |",
    ]


def test_the_end_of_a_child_is_the_end_of_its_sessions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    with processes.child(processes.PEERS["torchrun"].command(script, 1), {}) as torchrun:
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        assert os.getsid(rank) != torchrun.pid, "torchrun started it in a session of its own"
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


def test_samples_after_a_kill_are_new_or_repeated() -> None:
    """Rank 0 had done two steps of epoch 1, so its first two after the kill are repeated, and the third one is new."""
    notes = [(9.8, 7, 0, 1), (9.9, 7, 0, 1), (10.1, 9, 0, 1), (10.2, 9, 0, 1), (10.3, 9, 0, 1)]
    drawn = kill_curve.curve([traces.Step(*each) for each in notes], 10.0, 2, 1, range(-1, 2))
    assert drawn["from_s"] == [-0.25, 0.0, 0.25]
    assert [rate * 0.25 / 8 for rate in drawn["new_per_s"]] == [2, 0, 1]
    assert [rate * 0.25 / 8 for rate in drawn["repeated_per_s"]] == [0, 2, 0]


@pytest.mark.parametrize(("more", "repeated"), [(0, 0), (1, 0), (3, 24)])
def test_whole_steps_beyond_an_epoch_are_repeated(more: int, repeated: int) -> None:
    """Three workers of raysgd make four steps. Rank 1 is killed after the second one, and `more` parts are noted again."""
    parts = [(9.0 + 0.25 * step, rank, rank, 1) for step in range(4) for rank in (0, 1, 2)]
    after = [(10.1 + 0.1 * again, 0, 0, 1) for again in range(more)]
    notes = [traces.Step(*each) for each in [*parts, *after]]
    victim = notes[4]
    row = kill_curve.row(kill_curve.CASES[0], notes, victim, 9.3, range(-3, 2), 4)
    assert row["repeated_samples"] == repeated


def test_what_comes_after_a_kill() -> None:
    old, new = [(0.0, 7, 0, 0), (1.0, 7, 0, 1), (1.1, 8, 1, 1), (2.1, 7, 0, 1)], [(3.5, 7, 0, 1), (3.6, 9, 1, 1)]
    begins = [(-1.0, 7, 0, 0), (3.0, 7, 0, 1), (3.2, 9, 1, 1)]
    figures = rerun.judged(*([traces.Step(*each) for each in notes] for notes in ([*old, *new], begins)), 2.0)
    assert figures == {"first_step_s": 1.5, "begins_s": 1.0, "batches_redone": 2, "survivors": 1}


def test_a_gap_is_found_although_the_newcomer_joins_within_a_second() -> None:
    """Rank 1 is killed at 10 s. Rank 0 continues after 0.2 s, and pauses for 0.05 s, from 10.4 s on, for the newcomer."""
    times = {7: [9.98, 9.99, *(10.2 + 0.02 * step for step in range(11)), 10.46], 8: [9.97, 9.98], 9: [10.46, 10.47]}
    steps = sorted(traces.Step(at, process, process - 7, 1) for process, each in times.items() for at in each)
    changes = [
        {"reason": reason, "seconds": seconds, "batches_redone": 0}
        for reason, seconds in (("worker death", 0.15), ("growth", 0.05))
    ]
    said = json.dumps({"recoveries": changes, "lost": 0, "doubled": 0})
    found = recovery.judged(recovery.CASES[0], steps, traces.Step(9.98, 8, 1, 1), 10.0, said)
    assert found["gap_s"] == pytest.approx(0.21) and found["growth"]["gap_s"] == pytest.approx(0.06)


def test_a_gap_is_between_neighbours() -> None:
    steps = [traces.Step(at, 1, 0, epoch) for at, epoch in [(0.0, 0), (1.0, 0), (5.0, 1), (5.5, 1)]]
    assert traces.longest_gap(steps) == 4.0
    assert traces.longest_gap(steps, within_epochs=True) == 1.0
    assert traces.longest_gap(steps[:1]) == 0.0


def test_a_process_notes_its_steps(tmp_path: Path) -> None:
    trace = traces.StepTrace(str(tmp_path))
    trace.step(2, 0)
    trace.step(1, 1)
    assert [(step.process, step.rank, step.epoch) for step in traces.read(tmp_path)] == [
        (os.getpid(), 2, 0),
        (os.getpid(), 1, 1),
    ]


def test_an_epoch_lasts_from_last_step_to_last_step() -> None:
    """The first epoch, which can have more steps in raysgd's looks at the code, is left out."""
    assert same_numbers.seconds([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 9.0], per_epoch=2, epochs=3) == [4.0, 3.0]


def test_the_page_is_filled() -> None:
    row = {"contender": "raysgd", "first_epoch_s": {"median": 2.0, "least": 1.0, "most": 3.0, "count": 3}}
    machine = {"cores": 2, "cpu": "x", "python": "3.11", "versions": {"ray": "2.60"}, "load": [0.1]}
    document = {"benchmark": "startup", "command": "startup.py", "machine": machine, "rows": [row, row]}
    document["columns"] = ["contender", "first_epoch_s"]
    page = "before\n<!-- table: startup -->\nold\n<!-- end -->\n<!-- table: saving -->\nkept\n<!-- end -->\n"
    filled = fill_page.filled(page, {"startup": document})
    assert "| raysgd | 2 (1 to 3) |" in filled
    assert "old" not in filled and "kept" in filled and filled.startswith("before\n")
    assert fill_page.filled(filled, {"startup": document}) == filled


def test_a_page_shows_what_it_asks_for() -> None:
    machine = {"cores": 2, "cpu": "x", "python": "3.11", "versions": {"ray": "2.60"}, "load": [0.1]}
    rows = [
        {"workload": workload, "workers": 2, "contender": name, "ratio": {"median": ratio}}
        for workload, name, ratio in [("tiny", "raysgd", 1.25), ("tiny", "torchrun", 0.5), ("gpt", "raysgd", 1.75)]
    ]
    for row in rows:
        row["ratio"].update(least=row["ratio"]["median"], most=row["ratio"]["median"])
    document = {"benchmark": "throughput", "command": "throughput.py", "machine": machine, "rows": rows}
    document["columns"] = ["workload", "workers", "contender", "ratio"]
    page = "".join(
        f"<!-- {asked} -->\n<!-- end -->\n"
        for asked in ("matrix: throughput ratio", "table: throughput workload=gpt", "plots: kill_curve")
    )
    text = fill_page.filled(page, {"throughput": document})
    assert "| workload | workers | raysgd | torchrun |" in text
    assert "| tiny | 2 | 1.25 | 0.5 |" in text and "| gpt | 2 | 1.75 |  |" in text
    assert "| workers | contender | ratio |\n| --- | --- | --- |\n| 2 | raysgd | 1.75 |\n<!--" in text
    assert text.endswith("<!-- plots: kill_curve -->\n<!-- end -->\n")


def test_a_setting_travels_in_an_environment() -> None:
    for workload in workloads.WORKLOADS.values():
        setting = workloads.Setting(workload.shortened(7), 4)
        assert workloads.Setting.of_environment(setting.environment()) == setting


class Paper:
    """A contender that only notes its turns."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self._notes = name, notes

    def epoch(self) -> None:
        self._notes.append(self.name)

    def processes(self) -> list[int]:
        return [os.getpid()]


def test_everybody_has_the_same_turns() -> None:
    notes: list[str] = []
    turns = interleaved.interleaved([Paper(name, notes) for name in "abc"], rounds=2)
    assert "".join(notes) == "cbaabc" + "abccba"
    assert {name: len(own) for name, own in turns.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(turn.wall >= 0 for own in turns.values() for turn in own)


TWO_RANKS = """
import os, sys
from pathlib import Path
from gate import Gate
rank = 1 if os.fork() == 0 else 0
gate = Gate()
epochs = 0
while gate.wait():
    epochs += 1
    if rank == 1 and epochs == 3:
        os._exit(7)
    Path(sys.argv[1], f"{rank}-{epochs}").touch()
"""


def test_programs_wait_for_their_turn(tmp_path: Path) -> None:
    program = gate.Program("paper", [sys.executable, "-c", TWO_RANKS, str(tmp_path)], {}, 2)
    try:
        program.meet()
        assert len(set(program.processes())) == 2 and not list(tmp_path.iterdir())
        program.epoch()
        assert {path.name for path in tmp_path.iterdir()} == {"0-1", "1-1"}
        program.epoch()
        assert {path.name for path in tmp_path.iterdir()} == {"0-1", "1-1", "0-2", "1-2"}
        with pytest.raises(RuntimeError, match="paper: a rank left in the middle"):
            program.epoch()
    finally:
        program.stop()


def test_a_program_that_never_comes_is_told() -> None:
    program = gate.Program("paper", [sys.executable, "-c", "raise SystemExit(3)"], {}, 1)
    try:
        with pytest.raises(RuntimeError, match=r"paper: 0 of 1 ranks .* ended with status 3"):
            program.meet()
    finally:
        program.stop()
