"""Runs that write their history: a line for each step that a worker has applied. `tools/check_history.py` reads it."""

import hashlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults import LedgerOperator

CHECK = Path(__file__).parents[1] / "tools" / "check_history.py"
Line = dict[str, Any]


def write(path: str | Path, **line: Any) -> None:
    """Append a line to a history, which other processes write too."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def checked(path: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True)
    return done.returncode, done.stderr


def snapshots(recoveries: Iterable[Any]) -> list[int]:
    """Return the numbers of the steps after which new workers began from a snapshot."""
    return [each.step - each.batches_redone for each in recoveries if not each.in_place]


class Steps:
    """Makes the lines of one worker. `newest` names the newest step, and belongs to the state that the step has made."""

    def __init__(self) -> None:
        self.worker = self._generation = secrets.token_hex(4)
        self.newest: Line = {"number": 0, "after": ""}
        self._members = [self.worker]
        self._group: Any = None

    def gathered(self, indices: list[int]) -> list[int]:
        """Return the samples of all ranks, which also learn who is in their group."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not self._group:
            self._group, self._generation = group, secrets.token_hex(4)
        everybody: list[Any] = [(self.worker, self._generation, indices)]
        if group is not None:
            everybody *= dist.get_world_size()
            dist.all_gather_object(everybody, everybody[0])
        self._members, (self._generation, *_) = [each[0] for each in everybody], [each[1] for each in everybody]
        return sorted({index for each in everybody for index in each[2]})

    def made(self, epoch: int, samples: list[int]) -> Line:
        """Return the line of the step with these samples, which leads to the state from now on."""
        before = self.newest["after"]
        step = {"number": self.newest["number"] + 1, "epoch": epoch, "samples": samples}
        after = hashlib.sha256(json.dumps([before, step]).encode()).hexdigest()[:12]
        self.newest = {"number": step["number"], "after": after}
        group = {"worker": self.worker, "generation": self._generation, "members": self._members}
        return {"event": "step", "time": time.time(), **group, **step, "before": before, "after": after}


class Telling(LedgerOperator):
    """Writes a line for each step that is applied to its weights."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.steps = Steps()
        self.optimizer.register_step_post_hook(lambda *_: self.tell(self.epoch, self.pending))

    def tell(self, epoch: int, samples: list[int]) -> None:
        write(self.config["history"], **self.steps.made(epoch, samples))

    def gathered(self, indices: list[int]) -> list[int]:
        return self.steps.gathered(indices)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.epoch = batch_info["epoch_idx"]
        return super().train_batch(batch, batch_info)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "newest": self.steps.newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps.newest = state_dict["newest"]
