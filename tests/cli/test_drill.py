"""`raysgd drill`: a clean operator and deliberately broken ones, each of which must be diagnosed correctly."""

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from raysgd.cli import main
from raysgd.cli.drill import (
    KINDS,
    NAMES,
    TRIES,
    Drill,
    Fault,
    FaultSchedule,
    Record,
    Striker,
    checked_config,
    findings,
    load_operator,
)
from raysgd.errors import ConfigError
from raysgd.torch import TrainingOperator
from raysgd.torch.drilled import COLLECTIVES, INJECTED, _data, _digest, drilled
from tests.cli import drilled as operators

OPERATORS = Path(operators.__file__)


SEED = 2  # begins with a kill, so that short drills have one


def drill(name: str, minutes: float, hang_s: float = 6.0) -> Result:
    options = ["--minutes", str(minutes), "--hang-timeout", str(hang_s), "--seed", str(SEED)]
    return CliRunner().invoke(main, ["drill", f"{OPERATORS}:{name}", *options])


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def marks(output: str) -> dict[str, str]:
    """Return the mark of each check, the worst one if it has several lines."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        mark, check = line[:4].strip(), line[6:20].strip()
        if mark in ("ok", "note", "FAIL"):
            found[check] = max(mark, found.get(check, ""), key=["", "ok", "note", "FAIL"].index)
    return found


BROKEN = {
    "Forgetful": ("state", "self.batches changes while training"),
    "Swallowing": ("errors", "train_batch caught a peer's failure"),
    "Slow": ("hang limit", "a batch took longer than 6 s"),
    "Dividing": ("samples", "has other samples at the same index than that of another"),
    "Drifting": ("weights", "the ranks do not train the same model"),
}
USUAL = ("Forgetful",)  # except in `make nightly`


@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in USUAL)) for name in BROKEN]
)
def test_a_broken_operator(name: str, ray_cluster: None, own_path: None) -> None:
    done = drill(name, 0.15)
    check, text = BROKEN[name]
    assert done.exit_code == 1, done.output
    failures = [line for line in done.output.splitlines() if line.startswith("FAIL")]
    assert len(failures) == 1, done.output
    (line,) = failures
    assert line[6:20].strip() == check and text in line, done.output
    if name == "Swallowing":
        assert " tests/cli/drilled.py:" in line and " train_batch caught" in line


@pytest.mark.nightly
@pytest.mark.elastic
@pytest.mark.parametrize("name", ["Clean", "Looping", "WithoutHooks"])
def test_a_clean_operator(name: str, ray_cluster: None, own_path: None) -> None:
    done = drill(name, 1.0)
    assert done.exit_code == 0, done.output
    found = marks(done.output)
    assert {found[check] for check in ("training", "state", "errors", "hang limit", "samples", "weights")} == {"ok"}
    assert all(NAMES[kind] in done.output for kind in KINDS), done.output


READY_MADE = {
    "forecasting:ForecastingOperator": {},
    "gan:GANOperator": {},
    "image_classification:ImageClassificationOperator": {},
    "language_model:LanguageModelOperator": {},
    "recommender:RecommenderOperator": {},
    "regression:RegressionOperator": {},
    "segmentation:SegmentationOperator": {},
    "contrastive:ContrastiveOperator": {},
    "diffusion:DiffusionOperator": {},
    "fine_tuning:FineTuningOperator": {},
    "text_classification:TextClassificationOperator": {},
}


@pytest.mark.nightly
@pytest.mark.elastic
@pytest.mark.parametrize("place", READY_MADE)
def test_ready_made_operators_are_clean(place: str, ray_cluster: None, own_path: None) -> None:
    options = ["--minutes", "0.7", "--hang-timeout", "8", "--config", json.dumps(READY_MADE[place])]
    done = CliRunner().invoke(main, ["drill", f"raysgd.operators.{place}", *options])
    assert done.exit_code == 0, done.output
    assert marks(done.output)["state"] == "ok"


# -- the parts ----------------------------------------------------------------------------------------


def record(**more: Any) -> Record:
    faults = [Fault(0.0, kind, 1) for kind in ("kill", "notice", "memory", "stop", "gil")]
    return Record(**{"hang_s": 10.0, "workers": 2, "faults": faults, "replacements": 1, **more})


def judged(made: Record, *ignored: str) -> dict[str, str]:
    return {each.check: each.mark for each in findings(made, ignored)}


def test_what_a_record_means() -> None:
    assert set(judged(record()).values()) == {"ok"}
    assert judged(record(replaced=Counter(a=2), unrestored=Counter(a=2)))["state"] == "FAIL"
    assert judged(record(replaced=Counter(a=2), unrestored=Counter(a=2)), "a")["state"] == "ok"
    assert judged(record(replaced=Counter(a=2), unrestored=Counter(a=1)))["state"] == "ok"  # it was reset meanwhile
    assert judged(record(replacements=0))["state"] == "note"
    assert judged(record(longest_s=6.0))["hang limit"] == "note"
    assert judged(record(data=[[(1, 10, "a"), (1, 9, "a")]]))["samples"] == "FAIL"
    assert judged(record(data=[[(1, 10, "a")] * 2, [(2, 10, "a"), (2, 10, "b")]]))["samples"] == "FAIL"
    assert judged(record(data=[[(1, 10, ""), (1, 10, "a")]]))["samples"] == "ok"  # random samples
    # Samples may depend on the epoch: neither an earlier look nor a worker that has begun the next epoch is comparable.
    assert judged(record(data=[[(1, 10, "a")] * 2, [(2, 10, "b")] * 2]))["samples"] == "ok"
    assert judged(record(data=[[(1, 10, "a"), (2, 10, "b")]]))["samples"] == "ok"
    assert judged(record(differing="after step 5 the ranks do not"))["weights"] == "FAIL"
    follows = judged(record(differing="after step 5 the ranks do not", swallowed=[{"where": "a.py:1", "error": "x"}]))
    assert (follows["errors"], follows["weights"]) == ("FAIL", "note")
    assert judged(record(error="ValueError: x"))["training"] == "FAIL"
    assert judged(record(faults=[]))["faults"] == "note"


def test_a_fault_that_no_process_got_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(faults=[])
    striker = Striker(tmp_path, made, seed=0, until=0.0)
    striker._schedule = FaultSchedule(["gil"], seed=0)
    monkeypatch.setattr(striker, "_ordered", lambda pid, kind: False)
    striker._strike([1])
    assert not made.faults and striker._struck_at == 0.0
    monkeypatch.setattr(striker, "_ordered", lambda pid, kind: True)
    striker._strike([1])
    assert [fault.kind for fault in made.faults] == ["gil"] and not made.given_up
    assert striker.explains_hang() and not striker.explains_hang(), "the first attempt explains no hang"
    striker._strike([1])
    assert striker.explains_hang(), "a hang that no fault explained is no reason to miss the next one"


def test_a_fault_that_no_process_gets_is_given_up() -> None:
    schedule = FaultSchedule(KINDS, seed=0)
    first = []
    for _ in KINDS:
        first.append(schedule.next)
        assert not schedule.tried(True)
    assert sorted(first) == sorted(KINDS)
    kind = schedule.next
    assert [schedule.tried(False) for _ in range(TRIES)] == [False] * (TRIES - 1) + [True] and schedule.next != kind
    assert not schedule.tried(False) and not schedule.tried(True), "the next fault has attempts of its own"
    notes = [each for each in findings(record(faults=[], given_up=Counter(gil=1))) if each.check == "faults"]
    assert [each.mark for each in notes] == ["note", "note"] and "in 3 attempts" in notes[0].text
    assert "gil" not in notes[1].text
    (note,) = (each for each in findings(record(given_up=Counter(gil=1))) if each.check == "faults")
    assert note.mark == "note", "also if another one of this kind happened"


def test_the_next_fault_waits_until_all_have_trained(tmp_path: Path) -> None:
    striker = Striker(tmp_path, record(faults=[]), seed=0, until=0.0)
    mark = tmp_path / f"{os.getpid()}.worker"
    mark.touch()
    assert striker._active() == [os.getpid()]
    striker._struck_at = time.time()
    os.utime(mark, (striker._struck_at - 0.1,) * 2)
    assert striker._active() == [], "it may be stopped"
    os.utime(mark, (striker._struck_at + 0.1,) * 2)
    assert striker._active() == [os.getpid()]


def test_an_order_that_cannot_be_withdrawn_was_obeyed(tmp_path: Path) -> None:
    striker = Striker(tmp_path, record(faults=[]), seed=0, until=0.0)
    assert not striker._ordered(1, "gil") and not list(tmp_path.iterdir()), "no fault is allowed now: it is withdrawn"
    striker.allowed.set()
    thread = threading.Thread(target=lambda: take(tmp_path / "1.order"))
    thread.start()
    assert striker._ordered(1, "gil")
    thread.join()


def take(order: Path) -> None:
    while not order.exists():
        time.sleep(0.001)
    order.unlink()


class Looked:
    """A trainer whose workers report this."""

    def __init__(self, *reports: dict[str, Any]) -> None:
        self.reports = [{"data": (1, 10, "a"), "longest_s": 0.1, **each} for each in reports]

    def apply_all_operators(self, function: Any) -> list[dict[str, Any]]:
        return self.reports


def test_a_worker_that_has_begun_no_batch_is_judged_later() -> None:
    """One that joins after the last batch of a call still has its attributes from setup(), or seems to."""
    drill = Drill(operators.Clean, None, workers=2, minutes=0.1, seed=0, hang_s=6.0)
    seen, found = {"begun": True, "changed": ["batches"], "unrestored": []}, drill.record
    new = {"begun": False, "changed": ["batches"], "unrestored": ["batches"]}
    with drill._made:
        drill._look(Looked({"pid": 1, **seen}, {"pid": 2, **seen}), calm=True)
        drill._look(Looked({"pid": 3, **new}, {"pid": 4, **new}))
        assert found.replacements == 0 and judged(found)["state"] == "note"
        drill._look(Looked({"pid": 3, **seen}, {"pid": 4, **new, "begun": True}))
    assert (found.replacements, found.replaced["batches"], found.unrestored["batches"]) == (2, 2, 1)


def test_operators_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drilled_script.py").write_text("class Other: pass", encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for place, text in [
        ("train.py", "expected SCRIPT:Operator"),
        (f"{tmp_path}/nothing.py:Digits", "there is no file"),
        (f"{tmp_path}/drilled_script.py:Digits", "has no 'Digits'. Its operators are: "),
        (f"{tmp_path}/drilled_script.py:Other", "must be a subclass of raysgd.TrainingOperator"),
    ]:
        with pytest.raises(ConfigError, match=text):
            load_operator(place)
    assert load_operator("tests.cli.drilled:Clean") is operators.Clean


def test_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr": 0.5}', encoding="utf-8")
    assert checked_config(None) is None and checked_config('{"lr": 1}') == {"lr": 1}
    assert checked_config(f"@{tmp_path / 'config.json'}") == {"lr": 0.5}
    for wrong in ("[1]", "{", "@nothing.json"):
        with pytest.raises(ConfigError, match="--config must be"):
            checked_config(wrong)


def test_digests_tell_changed_values_from_equal_ones() -> None:
    def of(value: Any) -> str:
        return _digest(value, set())

    module = nn.Linear(2, 1)
    before, generator = of(module), torch.Generator().manual_seed(1)
    seeded = of(generator)
    with torch.no_grad():
        module.weight += 1
    torch.rand(1, generator=generator)
    assert of(module) != before and of(generator) != seeded
    assert of({"a": [1, 2.0]}) == of({"a": [1, 2.0]}) != of({"a": [1, 2.5]})
    assert of({"x", "y", "z"}) == of({"z", "x", "y"}) and of(torch.zeros(2)) != of(torch.zeros(2, dtype=torch.int64))
    assert of(torch.zeros(2, dtype=torch.bfloat16)) != of(torch.ones(2, dtype=torch.bfloat16))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert of(cyclic) == of(cyclic) and of(lambda: None) == of(len)


def test_random_samples_are_read_with_the_same_seed() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + torch.rand(1)

    x = torch.arange(10.0)
    state = torch.random.get_rng_state()
    length, digest = _data(torch.utils.data.DataLoader(Noisy(x)))
    assert length == 10 and digest and torch.equal(state, torch.random.get_rng_state())
    assert _data(torch.utils.data.DataLoader(Noisy(x + 1)))[1] != digest
    assert _data(iter([1])) == (-1, "")


@pytest.mark.parametrize("operator", ["Clean", "WithoutHooks"])
def test_a_fault_is_obeyed_before_a_step(operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in ((torch.Tensor, ["backward"]), (DistributedDataParallel, ["forward"]), (dist, COLLECTIVES)):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # the operator replaces them in its process
    made: TrainingOperator = drilled(getattr(operators, operator), tmp_path)({})
    order = tmp_path / f"{os.getpid()}.order"
    order.write_text("memory 1.0", encoding="utf-8")
    with pytest.raises(MemoryError, match=INJECTED):
        made.optimizer.step()
    assert not order.exists() and not (tmp_path / f"{os.getpid()}.worker").exists()
    made.optimizer.step()
    assert (tmp_path / f"{os.getpid()}.worker").exists()
    assert (
        json.dumps(sorted(vars(made)["_recorder"].initial))
        == '["batches", "criterion", "last_loss", "model", "optimizer"]'
    )
