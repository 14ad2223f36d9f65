"""Every benchmark script runs, prints what it promises, and keeps its promises where no clock is involved."""

import importlib.util
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.background import Background

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "benchmarks"


def smoke(background: Background, script: str, *options: str) -> dict[str, Any]:
    return whole(background, script, "--smoke", *options)


def whole(background: Background, script: str, *options: str, **extra: str) -> dict[str, Any]:
    done = background.run(str(FOLDER / script), *options, BENCHMARK_DEBUG="1", **extra)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["benchmark"] == script.removesuffix(".py")
    assert document["machine"]["cores"] and document["machine"]["versions"]["torch"]
    return document


def with_ray_own_workers(background: Background, script: str, *options: str) -> dict[str, Any]:
    """Run a script that removes nodes. It finds a node's workers among the children of its raylet, where the forks of
    `forked_workers.py` are not."""
    return whole(background, script, *options, PYTHONPATH=str(ROOT))


Document = Callable[[], dict[str, Any]]


def module(name: str) -> ModuleType:
    """A part of the benchmarks, without the rest."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look their module up
    sys.path.insert(0, str(FOLDER))  # for the other parts that it imports
    try:
        spec.loader.exec_module(loaded)
    finally:
        del sys.modules[name]
        sys.path.remove(str(FOLDER))
    return loaded


def shown(document: dict[str, Any], folder: Path) -> None:
    """The page takes its tables, and there are pictures of it, each a small file."""
    name = document["benchmark"]
    page = (FOLDER.parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    document["command"] = "told by a test"
    text = module("fill_page").filled(page, {name: document}, folder / "page.md")
    for contender in {row["contender"] for row in document["rows"]}:
        assert f"| {contender} |" in text
    assert "told by a test" in text
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("the rest of this test draws: it needs matplotlib (extra: bench)")
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    pictures = module("plots").plot_all(folder, folder / "pictures")
    assert pictures and all(2_000 < picture.stat().st_size < 100_000 for picture in pictures)


PEERS = {"hand-written": "", "raysgd": "", "raysgd, collating": "", "torchrun": "", "Ray Train v2": "pandas pyarrow"}
PEERS |= {"Lightning": "lightning", "Accelerate": "accelerate", "Horovod": "horovod"}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("throughput.py", "--workloads", "tiny", "--workers", "1", run=smoke)
def test_throughput(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    rows = {row["contender"]: row for row in document["rows"]}
    assert rows.keys() == PEERS.keys()
    installed = {name for name, needs in PEERS.items() if all(map(importlib.util.find_spec, needs.split()))}
    assert {name for name, row in rows.items() if row.get("us_per_step", 0) > 0} == installed
    assert all(rows[name]["note"].startswith("not installed") for name in rows.keys() - installed)
    shown(document, tmp_path)
    if installed != rows.keys():
        pytest.skip(
            f"without {sorted(rows.keys() - installed)}, which need packages of the extra bench, or `make horovod`"
        )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("stepping.py", run=smoke)
def test_stepping(outcome: Document) -> None:
    rows = {row["contender"]: row for row in outcome()["rows"]}
    assert [*rows] == ["hand-written", "raysgd", "raysgd, collating"]
    assert all(row["ratio"]["count"] == 2 and row["us_per_step"] > 0 for row in rows.values()), "a round of each start"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("stepping.py", "--gradients", run=smoke)
def test_stepping_with_unequal_shares(outcome: Document) -> None:
    rows = outcome()["rows"]
    names = ["raysgd", "raysgd, unequal shares"]
    assert [row["contender"] for row in rows] == [each for name in names for each in (f"{name}, mean of ranks", name)]
    assert all(row["ratio"]["count"] == 2 and row["us_per_step"] > 0 for row in rows)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("schedules.py", run=smoke)
def test_schedules(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    undisturbed, killed = document["rows"]
    assert undisturbed["recoveries"] == 0 < killed["recoveries"]
    assert killed["largest_difference"] < 1e-9 and killed["losses"] == pytest.approx(undisturbed["losses"])
    (tmp_path / "schedules.json").write_text(json.dumps(document), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("the rest of this test draws: it needs matplotlib (extra: bench)")
    assert [each.name for each in module("plots").plot_all(tmp_path, tmp_path / "pictures")] == ["schedules.png"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("gpu.py", "--workloads", "gpt124m", "--contenders", "hand-written", "raysgd", run=smoke)
def test_gpu(outcome: Document, tmp_path: Path) -> None:
    """On a machine without one."""
    document = outcome()
    assert [(row["contender"], row["precision"]) for row in document["rows"]] == [
        ("hand-written", "bf16"),
        ("raysgd", "bf16"),
    ]
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    shown(document, tmp_path)


def saving_through_bench(background: Background) -> dict[str, Any]:
    into = background.folder()
    bench = str(FOLDER / "bench.py")
    done = background.run(bench, "--smoke", "--only", "saving", "--into", str(into))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads((into / "saving.json").read_text(encoding="utf-8"))
    return document


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script(run=saving_through_bench)
def test_saving_through_bench(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    rows = {row["contender"]: row for row in document["rows"]}
    assert rows["raysgd"]["save_gb_s"] > 0 and rows["raysgd"]["load_gb_s"] > 0
    assert rows["raysgd, blocking=False"]["pause_ratio"]["count"] == 1
    shown(document, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("driver_cost.py", run=smoke)
def test_driver_cost(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    assert {(row["contender"], row["call"]) for row in document["rows"]} == {
        (contender, call) for contender in ("hand-written", "raysgd") for call in ("one batch", "nothing")
    } | {("raysgd", "a worker fails")}
    assert all(row["driver_cpu_ms"]["median"] > 0 for row in document["rows"])
    assert [row["recovery_s"]["count"] for row in document["rows"] if "recovery_s" in row] == [1]
    shown(document, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("scale.py", run=smoke)
def test_scale(outcome: Document) -> None:
    rows = {(row["part"], row["case"]): row for row in outcome()["rows"]}
    assert {part for part, _ in rows} == {"engine", "control", "rendezvous", "gloo"}
    failures = [rows["engine", f"{what} fails"] for what in ("one rank", "1 %", "one rack")]
    assert all(row["resumed_s"] > 0 and min(row["phases_s"].values()) > 0 for row in failures)
    assert rows["engine", "no failure"]["cpu_ms_per_call"] > 0
    assert rows["control", "one connection closes"]["notified_ms"]["count"] == 2
    assert rows["rendezvous", "all ranks meet, and exchange addresses"]["store_cpu_ms_per_rank"] > 0
    assert all(rows["gloo", case]["joined_s"]["median"] > 0 for case in ("eager", "lazy"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script("chaos.py", "--minutes", "0.7", "--seed", "11", run=with_ray_own_workers)
def test_chaos(outcome: Document) -> None:
    """The first of those with faults, as it takes the longest: the others run beside it."""
    (row,) = outcome()["rows"]
    assert row["faults"] == sum(row["faults_by_kind"].values()) > 3
    assert (row["lost"], row["doubled"], row["left_behind"], row["broken"]) == (0, 0, 0, [])
    assert row["differing"] == 0


def test_parts_of_a_chaos_run_accumulate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = module("parts")
    ran = []

    def run(args: Namespace, seed: int) -> dict[str, Any] | None:
        ran.append(seed)
        figures = {"faults": 3, "faults_by_kind": {"kill": 2, "gil": 1}, "waits_by_kind": {"kill": seed, "gil": 9}}
        broken = ["lost: 1"] if seed == 6 else []
        head = {"backend": args.backend, "api": "class", "seed": seed}
        return None if seed == 7 else {**head, **figures, "lost": len(broken), "broken": broken}

    monkeypatch.setattr(parts, "run", run)
    file = tmp_path / "state.json"
    parts.accumulate(file, Namespace(backend="torch", api="class", seed=5, parts=1))
    parts.accumulate(file, Namespace(backend="torch", api="class", seed=5, parts=3))
    found = parts.accumulate(file, Namespace(backend="horovod", api="class", seed=5, parts=1))
    assert ran == [5, 6, 7, 5], "a seed that is in the file is skipped, and so is a part whose cluster did not start"
    first, second, everything, kills, locks = parts.presented(found)
    assert [row["faults"] for row in (first, second, everything, kills, locks)] == [6, 3, 9, 6, 3]
    assert (first["run"], first["lost"], first["broken"]) == ("torch, class", 1, ["torch, class, seed 6: lost: 1"])
    assert (kills["kind"], kills["torch, class"], kills["horovod, class"], kills["longest_wait_s"]) == ("kill", 4, 2, 6)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script("churn.py", run=smoke)
def test_churn(outcome: Document) -> None:
    (row,) = outcome()["rows"]
    assert (row["contender"], row["kills"], row["note"]) == ("raysgd", 1, "")
    assert row["churn_s"]["median"] > 0


def regressed(background: Background, *options: str) -> str:
    """Run the check with a limit that nothing can keep. Return its last line."""
    done = background.run(str(FOLDER / "stepping.py"), "--smoke", "--at-most", "0.001")
    assert done.returncode == 1 and json.loads(done.stdout)["benchmark"] == "stepping"
    return done.stderr.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script(run=regressed)
def test_a_limit_that_is_exceeded_is_the_exit_status(outcome: Callable[[], str]) -> None:
    line = outcome()
    assert line.startswith("slower than 0.001 times the hand-written loop: raysgd in tiny: ")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("call_length.py", run=smoke)
def test_call_length(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    assert [row["steps"] for row in document["rows"]] == [1, 5]
    assert all(row["raysgd_ms"]["median"] > 0 and row["ratio"]["count"] == 1 for row in document["rows"])
    (tmp_path / "call_length.json").write_text(json.dumps(document), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        assert [path.name for path in module("plots").plot_all(tmp_path, tmp_path)] == ["call_length.png"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("call_parts.py", run=smoke)
def test_call_parts(outcome: Document) -> None:
    rows = {row["call"]: row for row in outcome()["rows"]}
    assert len(rows) == 6 and rows["11 steps"]["rank_1_cpu_ms"]["median"] > 0
    more = rows["11 steps"]["wall_ms"]["median"] - rows["one step"]["wall_ms"]["median"]
    assert rows["one more step"]["wall_ms"]["median"] == pytest.approx(more / 10, abs=0.02)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("saving_elsewhere.py", run=smoke)
def test_saving_elsewhere(outcome: Document) -> None:
    rows = [row for row in outcome()["rows"] if not row["note"]]
    assert [row["workers"] for row in rows if row["where"] == "disk"] == [1, 1, 2, 2]
    assert all(row["save_ratio"]["median"] > 0 and row["load_ratio"]["median"] > 0 for row in rows)


def test_the_summary_takes_the_best_peer_and_leaves_out_what_is_not_measured() -> None:
    fill_page = module("fill_page")
    setting = {"workload": "tiny", "precision": "fp32", "workers": 2}
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


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.script("startup.py", run=smoke)
def test_startup(outcome: Document) -> None:
    rows = {row["contender"]: row for row in outcome()["rows"]}
    assert rows.keys() == {"raysgd", "torchrun"}
    own = rows["raysgd"]
    assert 0 < own["imported_s"]["median"] < own["connected_s"]["median"] < own["first_epoch_s"]["median"]
    assert own["second_s"]["median"] > 0 and own["torchrun_ratio"]["count"] == 1
    assert all(row["exit_s"]["median"] >= row["first_epoch_s"]["median"] > 0 for row in rows.values())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script("recovery.py", run=smoke)
def test_recovery(outcome: Document) -> None:
    first = outcome()["rows"][0]
    assert first["case"] == "raysgd, in place"
    assert (first["lost"], first["doubled"], first["batches_redone"]["median"]) == (0, 0, 0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script("kill_curve.py", run=smoke)
def test_kill_curve(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    (row,) = document["rows"]
    assert row["contender"] == "raysgd" and row["before"] > 0 and row["repeated_samples"] == 0
    assert sum(row["new_per_s"]) > 0 == sum(row["repeated_per_s"])
    (tmp_path / "kill_curve.json").write_text(json.dumps(document), encoding="utf-8")
    pytest.importorskip("matplotlib")
    names = ["kill_curve_light.svg", "kill_curve_dark.svg"]
    assert [each.name for each in module("plots").plot_all(tmp_path, tmp_path / "pictures")] == names


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script(
    "kill_curve.py", "--contenders", "torchrun", "--steps", "200", "--epochs", "2", "--after-s", "20", run=whole
)
def test_torchrun_continues_after_a_kill(outcome: Document) -> None:
    (row,) = outcome()["rows"]
    assert "note" not in row, row["note"]
    assert sum(row["repeated_per_s"]) * row["bin_s"] == row["repeated_samples"] > 0


def test_the_end_of_a_child_is_the_end_of_its_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    processes = module("processes")
    with processes.child(processes.command_for(script, torchrun=("--nproc-per-node", "1")), {}) as torchrun:
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        assert os.getsid(rank) != torchrun.pid, "torchrun started it in a session of its own"
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


def test_samples_after_a_kill_are_new_or_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 had done two steps of epoch 1, so its first two after the kill are repeated, and the third one is new."""
    monkeypatch.syspath_prepend(str(FOLDER))
    kill_curve, traces = module("kill_curve"), module("traces")
    notes = [(9.8, 7, 0, 1), (9.9, 7, 0, 1), (10.1, 9, 0, 1), (10.2, 9, 0, 1), (10.3, 9, 0, 1)]
    drawn = kill_curve.curve([traces.Step(*each) for each in notes], 10.0, 2, 1, range(-1, 2))
    assert drawn["from_s"] == [-0.25, 0.0, 0.25]
    assert [rate * 0.25 / 8 for rate in drawn["new_per_s"]] == [2, 0, 1]
    assert [rate * 0.25 / 8 for rate in drawn["repeated_per_s"]] == [0, 2, 0]


def test_a_recording_shows_each_line_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    recording = module("recording")
    assert recording.shortened([0.0, 0.5, 9.5, 9.6]) == pytest.approx([0.0, 0.5, 2.5, 2.6])
    svg = recording.drawn([(0.0, "epoch 1: a < b"), (1.0, "worker death: x")])
    assert "epoch 1: a &lt; b" in svg and svg.count("@keyframes") == svg.count("<text") == 3
    assert '<text class="change"' in svg and '<text class="typed"' in svg


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.script("rerun.py", run=smoke)
def test_rerun(outcome: Document, tmp_path: Path) -> None:
    document = outcome()
    (row,) = document["rows"]
    assert (row["contender"], row["survivors"]["median"], row["first_step_s"]["count"]) == ("raysgd", 2, 1)
    assert 0 < row["begins_s"]["median"] <= row["first_step_s"]["median"]
    assert row["batches_redone"]["median"] < 100, "the checkpoint of the epoch before was found"
    shown(document, tmp_path)


def test_what_comes_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    rerun, traces = module("rerun"), module("traces")
    old, new = [(0.0, 7, 0, 0), (1.0, 7, 0, 1), (1.1, 8, 1, 1), (2.1, 7, 0, 1)], [(3.5, 7, 0, 1), (3.6, 9, 1, 1)]
    begins = [(-1.0, 7, 0, 0), (3.0, 7, 0, 1), (3.2, 9, 1, 1)]
    figures = rerun.judged(*([traces.Step(*each) for each in notes] for notes in ([*old, *new], begins)), 2.0)
    assert figures == {"first_step_s": 1.5, "begins_s": 1.0, "batches_redone": 2, "survivors": 1}


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


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "docs/index.md", "README.md"])
def test_the_pages_show_the_results(page: str) -> None:
    fill_page = module("fill_page")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in fill_page.RESULTS.glob("*.json")]
    text = (ROOT / page).read_text(encoding="utf-8")
    assert (
        "kill_curve" in text
        and fill_page.filled(text, {each["benchmark"]: each for each in found}, ROOT / page) == text
    )


def test_the_picture_of_a_kill_is_described_with_the_medians() -> None:
    fill_page = module("fill_page")
    recovery = json.loads((fill_page.RESULTS / "recovery.json").read_text(encoding="utf-8"))
    gaps = {row["case"]: row["gap_s"]["median"] for row in recovery["rows"]}
    said = [f"{gaps[case]:.2g} s without a step" for case in fill_page.REPEATED.values()]
    shown = ["README.md", "docs/index.md", *(f"docs/benchmarks/kill_curve_{mode}.svg" for mode in ("light", "dark"))]
    for path in shown:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.findall(r"[\d.]+ s without a step", text)[:3] == said, path


def test_a_page_shows_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "throughput_fp32.png").write_bytes(b"")
    machine = {"cores": 2, "cpu": "x", "python": "3.11", "versions": {"ray": "2.60"}, "load": [0.1]}
    rows = [
        {"workload": workload, "precision": "fp32", "workers": 2, "contender": name, "ratio": {"median": ratio}}
        for workload, name, ratio in [("tiny", "raysgd", 1.25), ("tiny", "torchrun", 0.5), ("gpt", "raysgd", 1.75)]
    ]
    for row in rows:
        row["ratio"].update(least=row["ratio"]["median"], most=row["ratio"]["median"])
    document = {"benchmark": "throughput", "command": "throughput.py", "machine": machine, "rows": rows}
    page = "".join(
        f"<!-- {asked} -->\n<!-- end -->\n"
        for asked in ("matrix: throughput ratio", "table: throughput workload=gpt", "plots: throughput", "plots: gpu")
    )
    text = module("fill_page").filled(page, {"throughput": document}, tmp_path / "page.md")
    assert "| workload | precision | workers | raysgd | torchrun |" in text
    assert "| tiny | fp32 | 2 | 1.25 | 0.5 |" in text and "| gpt | fp32 | 2 | 1.75 |  |" in text
    assert (
        "| precision | workers | contender | ratio |\n| --- | --- | --- | --- |\n| fp32 | 2 | raysgd | 1.75 |\n<!--"
        in text
    )
    assert "<!-- plots: throughput -->\n![throughput fp32](benchmarks/throughput_fp32.png)\n<!-- end -->" in text
    assert text.endswith("<!-- plots: gpu -->\n<!-- end -->\n")


def test_a_setting_travels_in_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    workloads = module("workloads")
    for every in (workloads.WORKLOADS, workloads.GPU_WORKLOADS, workloads.SMALL_GPU_WORKLOADS):
        for workload in every.values():
            setting = workloads.Setting(workload.shortened(7), 4, "bf16", "cuda")
            assert workloads.Setting.of_environment(setting.environment()) == setting


def test_the_large_models_are_the_ones_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    torch = pytest.importorskip("torch")
    workloads = module("workloads")
    for name, parameters in (("resnet50", 25_557_032), ("gpt124m", 124_475_904)):
        with torch.device("meta"):
            model = workloads.GPU_WORKLOADS[name].model()
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters


class Paper:
    """A contender that only notes its turns."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self._notes = name, notes

    def epoch(self) -> None:
        self._notes.append(self.name)

    def processes(self) -> list[int]:
        return [os.getpid()]


def test_everybody_has_the_same_turns() -> None:
    interleaved = module("interleaved")
    notes: list[str] = []
    turns = interleaved.interleaved([Paper(name, notes) for name in "abc"], rounds=2)
    assert "".join(notes) == "cbaabc" + "abccba"
    assert {name: len(own) for name, own in turns.items()} == {"a": 2, "b": 2, "c": 2}
    assert all(turn.wall >= 0 for own in turns.values() for turn in own)


def test_a_time_limit_leaves_three_rounds() -> None:
    notes: list[str] = []
    module("interleaved").interleaved([Paper("a", notes)], rounds=9, limit_s=0)
    assert len(notes) == 2 * 3


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


def test_programs_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    program = module("gate").Program("paper", [sys.executable, "-c", TWO_RANKS, str(tmp_path)], {}, 2)
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


def test_a_program_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    program = module("gate").Program("paper", [sys.executable, "-c", "raise SystemExit(3)"], {}, 1)
    try:
        with pytest.raises(RuntimeError, match=r"paper: 0 of 1 ranks .* ended with status 3"):
            program.meet()
    finally:
        program.stop()


def test_few_frames_lie_between_train_and_train_batch() -> None:
    """In this process, where they are one stack; with Ray, the actor's method is one more."""
    found = module("frames").looked(inline=True)["inline"]
    assert "torch/trainer.py" in found[1] and "torch/operator.py" in found[-1]
    assert len(found) <= 11, found
