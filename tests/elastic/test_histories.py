"""Runs in which workers and scripts fail write histories, which `tools/check_history.py` checks; and some that it refuses."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, train
from tests.background import Background
from tests.faults import Fault, Ground, Numbered
from tests.histories import Line, Steps, Telling, checked, snapshots, write

ELASTIC = ElasticConfig(hang_timeout_s=60, snapshot_every=4)


def operators(path: Path, seed: int) -> list[int]:
    """Train three epochs with three workers. In each, one is killed at random, in the second all of them, and who was
    killed is replaced after the epoch. Return the steps after which new ones began."""
    draw = random.Random(seed)
    write(path, event="begin", samples=101)
    config = {"samples": 101, "history": str(path)}
    ground = Ground(path.parent / "marks", num_workers=3, config=config, operator=Telling, elastic=ELASTIC)
    with ground.trainer as trainer:
        for epoch in range(3):
            rank, *others = draw.sample(range(3), 3)
            pids = trainer.apply_all_workers(os.getpid)
            along = tuple(pids[each] for each in others) if epoch == 1 else ()
            where = draw.choice(["before", "backward", "after"])
            ground.arm(Fault(rank, draw.randint(1, 8), where=where, others=along))
            trainer.train()
            assert ground.fired() == 1
            ground.whole_again(3)
        newest = trainer.apply_all_operators(lambda operator: operator.steps.newest["after"])
        began = snapshots(trainer.recoveries)
    write(path, event="end", state=newest[0], snapshots=began)
    return began


FEW = [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)]


@pytest.mark.more
@pytest.mark.elastic
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("seed", FEW)
def test_a_run_in_which_workers_fail(seed: int, tmp_path: Path) -> None:
    assert operators(tmp_path / "history.jsonl", seed), "all workers were killed once"
    assert checked(tmp_path / "history.jsonl") == (0, "")


def function(config: dict[str, Any]) -> str:
    """Train two epochs. A step is written when it is committed, or where the function begins again."""
    torch.manual_seed(3)
    model = nn.Linear(8, 1).double()
    order = torch.Generator().manual_seed(1)
    loader = train.torch.elastic_data_loader(DataLoader(Numbered(101), batch_size=4, shuffle=True, generator=order))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps, parts = Steps(), {"model": model, "optimizer": optimizer, "loader": loader}
    state = train.elastic({**parts, "epoch": 0, "newest": steps.newest, "line": None})
    if state["line"]:
        write(config["history"], **state["line"])
    steps.newest = state["newest"]
    prepared = train.torch.prepare_model(model)
    while state["epoch"] < 2:
        for index, x, y in loader:
            for fault in config["faults"]:
                if fault.rank == train.world_rank() and fault.step <= steps.newest["number"]:
                    fault.fire(config["marks"])
            samples = steps.gathered(index.tolist())
            optimizer.zero_grad()
            nn.functional.mse_loss(prepared(x.double()), y.double()).backward()
            optimizer.step()
            state["line"] = steps.made(state["epoch"], samples)
            state["newest"] = steps.newest
            state.commit()
            write(config["history"], **state["line"])
        state["epoch"] += 1
    return str(state["newest"]["after"])


@pytest.mark.more
@pytest.mark.elastic
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("seed", FEW)
def test_a_function_in_which_workers_fail(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "history.jsonl"
    write(path, event="begin", samples=101)
    faults = [Fault(rank, draw.randint(1, 12)) for rank in draw.sample(range(3), 2)]
    config = {"history": str(path), "marks": str(tmp_path), "faults": faults}
    with train.Trainer("torch", num_workers=3, logdir=tmp_path / "logs", elastic=ELASTIC) as trainer:
        state, *others = trainer.run(function, config)
        failures = [each.reason for each in trainer.recoveries]
    write(path, event="end", state=state, snapshots=[])
    assert set(others) <= {state} and "worker death" in failures
    assert checked(path) == (0, "")


SCRIPT = """
import os, sys
from raysgd import TorchTrainer
from raysgd.callbacks import Callback
from tests.faults import Fault
from tests.histories import Telling, snapshots, write

kill, path = int(sys.argv[1]), sys.argv[2]

class Killer(Callback):
    def on_progress(self, now):
        if kill and now.progress.step >= kill and now.kind == "train":
            os.kill(os.getpid(), 9)

config = {"samples": 101, "history": path, "marks": os.path.dirname(path), "pace": 0.05}
config["faults"] = [Fault(1, 3), Fault(0, 12)]
with TorchTrainer(
    training_operator_cls=Telling, config=config, num_workers=3, num_cpus_per_worker=0.05, use_gpu=False,
    name="history", callbacks=[Killer()],
) as trainer:
    for _ in trainer.epochs(3):
        trainer.train()
    newest = trainer.apply_all_operators(lambda operator: operator.steps.newest["after"])
    began = snapshots(trainer.recoveries)
write(path, event="end", state=newest[0], snapshots=began)
"""


def killed_twice(background: Background) -> Path:
    """Kill the script in two epochs, shortly after one of its workers, and let the third one end."""
    folder = background.folder()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    path = folder / "history.jsonl"
    write(path, event="begin", samples=101)
    for kill, code in ((5, -signal.SIGKILL), (14, -signal.SIGKILL), (0, 0)):
        done = background.run("script.py", str(kill), str(path), connected=True, folder=folder)
        assert done.returncode == code, done.stderr
    return path


@pytest.mark.nightly
@pytest.mark.elastic
@pytest.mark.script(run=killed_twice)
def test_scripts_with_a_name_that_are_killed(outcome: Any) -> None:
    path = outcome()
    assert checked(path) == (0, "")


# -- histories by hand: two epochs of four samples; worker c is killed in step 2, which it alone had applied -----------


def step(number: int, worker: str, generation: str, *, after: str = "") -> Line:
    samples, after = [2 * ((number - 1) % 2), 2 * ((number - 1) % 2) + 1], after or f"s{number}"
    placed = {
        "worker": worker,
        "generation": generation,
        "members": list(generation),
        "number": number,
        "epoch": (number - 1) // 2,
    }
    return {
        "event": "step",
        **placed,
        "samples": samples,
        "before": f"s{number - 1}" if number > 1 else "",
        "after": after,
    }


def good() -> list[Line]:
    first = [step(1, worker, "abc") for worker in "abc"] + [step(2, "c", "abc", after="of c")]
    others = [step(number, worker, "ab") for number in (2, 3) for worker in "ab"]
    joined = [step(4, worker, "abd") for worker in "abd"]
    return [
        {"event": "begin", "samples": 4},
        *first,
        *others,
        *joined,
        {"event": "end", "state": "s4", "snapshots": []},
    ]


def apply_a_step_twice(lines: list[Line]) -> None:
    again = {"number": 2, "before": "s2", "after": "again"}
    lines.insert(7, {**lines[6], **again})
    for each in lines[8:]:
        each.update({"before": "again"} if each.get("before") == "s2" else {})


def lose_a_step(lines: list[Line]) -> None:
    lines[4].update(worker="a")


def use_a_sample_twice(lines: list[Line]) -> None:
    for each in lines:
        each.update({"samples": [0, 1, 2]} if each.get("after") == "s2" else {})


def let_generations_overlap(lines: list[Line]) -> None:
    lines.insert(7, step(4, "a", "abd"))


@pytest.mark.parametrize(
    ("breaks", "sentence"),
    [
        (apply_a_step_twice, "step 2 was applied twice: after step 2"),
        (lose_a_step, "step 2 of worker a was committed, and is lost"),
        (use_a_sample_twice, "epoch 0 used samples twice: [0, 1]"),
        (let_generations_overlap, "generations overlap: step 3 was made in one that worker a had left"),
    ],
)
def test_a_broken_history_is_refused(breaks: Callable[[list[Line]], None], sentence: str, tmp_path: Path) -> None:
    lines = good()
    breaks(lines)
    for each in lines:
        write(tmp_path / "history.jsonl", **each)
    code, found = checked(tmp_path / "history.jsonl")
    assert code == 1 and sentence in found


def test_a_history_in_which_nothing_is_wrong(tmp_path: Path) -> None:
    for each in good():
        write(tmp_path / "history.jsonl", **each)
    assert checked(tmp_path / "history.jsonl") == (0, "")


@pytest.mark.parametrize("snapshots", [[1], [], [0]])
def test_new_workers_begin_from_a_snapshot(snapshots: list[int], tmp_path: Path) -> None:
    first = [
        step(number, worker, "ab", after=f"of ab {number}" if number > 1 else "")
        for number in (1, 2, 3)
        for worker in "ab"
    ]
    for each in first[4:]:
        each["before"] = "of ab 2"
    second = [step(number, worker, "cd") for number in (2, 3, 4) for worker in "cd"]
    end = {"event": "end", "state": "s4", "snapshots": snapshots}
    for each in [{"event": "begin", "samples": 4}, *first, *second, end]:
        write(tmp_path / "history.jsonl", **each)
    wrong = "".join(f"step 2 of worker {worker} was committed, and is lost\n" for worker in "ab")
    assert checked(tmp_path / "history.jsonl") == ((0, "") if snapshots == [1] else (1, wrong))
