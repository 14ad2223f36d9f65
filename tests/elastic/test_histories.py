"""A run in which workers fail writes its history, which `tools/check_history.py` checks, and histories that it must refuse."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from raysgd import ElasticConfig
from tests.faults import Fault, Ground, LedgerOperator

CHECK = Path(__file__).parents[2] / "tools" / "check_history.py"
Line = dict[str, Any]


def write(path: str | Path, **line: Any) -> None:
    """Append a line to a history, which other processes write too."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def checked(path: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True)
    return done.returncode, done.stderr


class Telling(LedgerOperator):
    """Writes a line for each step that is applied to its weights."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.told: Line = {"number": 0, "after": ""}
        self.group: list[str] = []
        self.optimizer.register_step_post_hook(lambda *_: self.tell())

    def gathered(self, indices: list[int]) -> list[int]:
        everybody: list[Any] = [(str(os.getpid()), indices)] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(everybody, everybody[0])
        self.group = [worker for worker, _ in everybody]
        return sorted({index for _, part in everybody for index in part})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.epoch = batch_info["epoch_idx"]
        return super().train_batch(batch, batch_info)

    def tell(self) -> None:
        step = {"number": self.told["number"] + 1, "epoch": self.epoch, "samples": self.pending}
        before = self.told["after"]
        after = hashlib.sha256(json.dumps([before, step]).encode()).hexdigest()[:12]
        self.told = {"number": step["number"], "after": after}
        worker = {"worker": str(os.getpid()), "generation": self.group}
        write(self.config["history"], event="step", **worker, **step, before=before, after=after)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "told": self.told}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.told = state_dict["told"]


def history(path: Path, seed: int) -> Ground:
    """Train three epochs with three workers. In each, one is killed at random, and it is replaced after the epoch."""
    draw = random.Random(seed)
    write(path, event="begin", samples=101)
    config = {"samples": 101, "history": str(path)}
    settings = ElasticConfig(hang_timeout_s=60)
    ground = Ground(path.parent / "marks", num_workers=3, config=config, operator=Telling, elastic=settings)
    with ground.trainer as trainer:
        for _ in range(3):
            ground.arm(Fault(draw.randrange(3), draw.randint(1, 8), where=draw.choice(["before", "backward", "after"])))
            trainer.train()
            assert ground.fired() == 1
            ground.whole_again(3)
        told = trainer.apply_all_operators(lambda operator: operator.told["after"])
        redone = sum(each.batches_redone for each in trainer.recoveries)
    write(path, event="end", state=told[0], redone=redone)
    return ground


@pytest.mark.more
@pytest.mark.elastic
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_a_run_in_which_workers_fail(seed: int, tmp_path: Path) -> None:
    history(tmp_path / "history.jsonl", seed)
    assert checked(tmp_path / "history.jsonl") == (0, "")


# -- histories by hand: two epochs of four samples; worker c is killed in step 2, which it alone had applied -----------


def step(number: int, worker: str, generation: str, *, after: str = "") -> Line:
    samples, after = [2 * ((number - 1) % 2), 2 * ((number - 1) % 2) + 1], after or f"s{number}"
    placed = {"worker": worker, "generation": list(generation), "number": number, "epoch": (number - 1) // 2}
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
    return [{"event": "begin", "samples": 4}, *first, *others, *joined, {"event": "end", "state": "s4", "redone": 0}]


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
