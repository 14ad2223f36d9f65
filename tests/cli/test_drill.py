"""`raysgd drill`: what it says about an operator that forgets, and what its comparison means."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from raysgd import Recovery
from raysgd.cli import main
from raysgd.cli.drill import Trained, compare, load_operator, trainer_arguments
from raysgd.cli.printing import show
from raysgd.errors import ConfigError
from tests.cli import drilled as operators


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.more
@pytest.mark.elastic
@pytest.mark.timeout(900)  # three trainings, one of them with a hang
def test_an_operator_that_forgets_a_counter(ray_cluster: None, own_path: None) -> None:
    place = f"{Path(operators.__file__)}:Forgetful"
    done = CliRunner().invoke(main, ["drill", place, "--set", "scheduler_step_freq=batch"])
    lines = [line for line in done.output.splitlines() if line.startswith(("ok", "FAIL", "note"))]
    assert done.exit_code == 1 and [line[:16].split()[:2] for line in lines] == [
        ["ok", "training"],
        *[["ok", "faults"]] * 3,
        ["ok", "samples"],
        ["ok", "position"],
        ["ok", "weights"],
        ["FAIL", "state"],
    ], done.output
    for number, reason in (("SIGKILL", "worker death"), ("SIGSTOP", "hang"), ("SIGTERM", "preemption")):
        assert any(f"{number} in call" in line and f": {reason} after batch" in line for line in lines), done.output
    assert (
        "1,920, as without faults, each as often" in lines[4]
        and "global_step 240, last_epoch of scheduler 0 240" in lines[5]
    )
    assert "self.batches is " in lines[-1] and "return it from state_dict()" in done.output.lower()


@pytest.mark.nightly
@pytest.mark.elastic
@pytest.mark.timeout(600)
def test_what_only_rank_0_has(ray_cluster: None, own_path: None) -> None:
    done = CliRunner().invoke(main, ["drill", f"{Path(operators.__file__)}:Noting", "--steps", "20"])
    assert done.exit_code == 1 and "with faults, it ended with AttributeError: 'NoneType'" in done.output, done.output


TWICE = torch.tensor([0.25, 0.25, 0.5, 0.0])
DEATH = Recovery("worker death", (1,), 2, 1, True, 0, 0.1, batch=7)


def trained(**more: Any) -> Trained:
    usual = {
        "samples": [40, 40],
        "position": {"epoch": 2, "global_step": 20},
        "weights": {"0.weight": torch.ones(4), "0.count": torch.tensor(20)},
        "entered": torch.tensor([0.5, 0.25, 0.25, 0.0]),
        "counters": [{"batches": 20}, {"batches": 20}],
        "unrest": [[DEATH], []],
    }
    return Trained(**{**usual, **more})


def judged(struck: Trained, capsys: Any, alone: Trained | None = None, *ignored: str) -> str:
    """Return what does not end with "ok" when a run is compared with one without faults."""
    try:
        show(compare(trained(), alone or trained(counters=[{"batches": 40}]), struck, ignored))
    except click.ClickException as error:
        print(error.message)
    return "".join(line + "\n" for line in capsys.readouterr().out.splitlines() if not line.startswith("ok"))


def test_what_a_difference_means(capsys: Any) -> None:
    far = {"0.weight": torch.full((4,), 1.01), "0.count": torch.tensor(20)}
    near = {"0.weight": torch.full((4,), 1.0001), "0.count": torch.tensor(23)}
    assert judged(trained(), capsys) == judged(trained(weights=near), capsys) == ""
    for struck, text in (
        (trained(samples=[40, 36]), "FAIL  samples     [40, 36], and [40, 40] without faults"),
        (trained(entered=TWICE), "FAIL  samples     80, as without faults, but lost [0]; doubled [2]"),
        (trained(position={"epoch": 2, "global_step": 21}), "FAIL  position    epoch 2, global_step 21; without"),
        (trained(weights=far), "FAIL  weights     the difference to those without faults is 0.01 of their norm"),
        (trained(counters=[{"batches": 20}, {"batches": 3}]), "FAIL  state       self.batches is 3 on rank 1, and 20"),
        (trained(unrest=[[], []]), "FAIL  faults      SIGKILL in call 1: the worker stayed"),
    ):
        said = judged(struck, capsys)
        assert said.startswith(text) and "\n                  -> " in said and said.endswith("1 check failed\n"), said
    assert judged(trained(counters=[{"batches": 20}, {"batches": 3}]), capsys, None, "batches") == ""


def test_what_depends_on_the_number_of_workers_is_not_judged(capsys: Any) -> None:
    far = {"0.weight": torch.full((4,), 1.01), "0.count": torch.tensor(20)}
    said = judged(trained(weights=far), capsys, trained(weights=far))
    assert said.startswith("note  weights ") and "depend on the workers or on chance" in said and "failed" not in said
    said = judged(trained(entered=TWICE), capsys, trained(entered=TWICE))
    assert said.startswith("note  samples     80, as without faults; which ones depends on the workers or on chance")
    said = judged(trained(entered=torch.zeros(4)), capsys)
    assert said.startswith("note  samples     80, as without faults; which ones was not measured")
    fewer = trained(counters=[{"batches": 20}, {"batches": 3}])
    assert judged(fewer, capsys, trained(counters=[{"batches": 10}])) == ""


def test_operators_that_cannot_be_loaded(tmp_path: Path, own_path: None) -> None:
    script = tmp_path / "drilled_script.py"
    script.write_text("from raysgd import TrainingOperator\nclass Mine(TrainingOperator): pass", encoding="utf-8")
    for place, text in (
        ("train.py", "must be SCRIPT:CLASS or MODULE:CLASS, got 'train.py'"),
        (f"{tmp_path}/nothing.py:Digits", "cannot find the file"),
        (f"{script}:Digits", "no subclass of raysgd.TrainingOperator named 'Digits'. It has: Mine"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_operator(place)
    assert load_operator("tests.cli.drilled:Clean") is operators.Clean


def test_arguments_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.5, "layers": [1, 2]}), encoding="utf-8")
    given = ["scheduler_step_freq=batch", f"config=@{tmp_path}/config.json", "config.lr=0.1", "options.accumulate=2"]
    made = trainer_arguments([*given, "elastic.hang_timeout_s=60"])
    assert made["scheduler_step_freq"] == "batch" and made["config"] == {"lr": 0.1, "layers": [1, 2]}
    assert made["options"].accumulate == 2
    assert (made["elastic"].hang_timeout_s, made["elastic"].batch, made["num_workers"]) == (60, "auto", 2)
    for wrong, error, text in (
        ("scheduler_step_freq", ConfigError, "--set must be NAME=VALUE"),
        ("seed.more=1", ConfigError, "--set must be NAME=VALUE"),
        ("num_workers=1", ConfigError, "num_workers must be a whole number of at least 2"),
        ("parallel=fsdp", ConfigError, "leave parallel=fsdp out"),
        ("options.parallel=fsdp", ConfigError, "leave parallel=fsdp out"),
        ("elastic.hang_timeout=1", TypeError, "did you mean 'hang_timeout_s'"),
    ):
        with pytest.raises(error, match=text):
            trainer_arguments([wrong])
