"""Print raysgd's Python frames between `trainer.train()` and the operator's `train_batch`, on the driver and in a worker, and
what one batch passes through: all functions of raysgd that are called from one forward pass to the next one.

Each frame is one more step for a reader of a traceback or of the code. With `--inline` the one worker is this process, and
both parts are one stack.

    python examples/benchmarks/frames.py
"""

from __future__ import annotations

import argparse
import sys
import traceback
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd import TorchTrainer, TrainingOperator
from raysgd.workers.ray_group import RayGroup

PACKAGE = Path(raysgd.__file__).parent
BATCHES = 30


def frames() -> list[str]:
    """Return raysgd's frames on the stack of this thread, the outermost first, without the one that started this process."""
    stack = [(Path(frame.filename), frame) for frame in traceback.extract_stack()]
    own = [(file, frame) for file, frame in stack if PACKAGE in file.parents and file.name != "fork_server.py"]
    return [f"{file.relative_to(PACKAGE)}:{frame.lineno} {frame.name}" for file, frame in own]


class Followed(torch.nn.Linear):
    """Notes the frames under `train_batch`, and which functions of raysgd are called between two forward passes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.stack: list[str] = []
        self.passes: list[list[str]] = []
        self.reporting: Any = None  # the frame that sends the progress, which on a slow machine each batch does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stack = self.stack or list(takewhile(lambda frame: not frame.endswith(" train_batch"), frames()))
        self.passes.append([])
        sys.setprofile(self.note if BATCHES < len(self.passes) < 2 * BATCHES - 1 else None)
        return super().forward(x)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if frame is self.reporting:
            self.reporting = None if event == "return" else frame
        elif event == "call" and self.reporting is None and PACKAGE in file.parents:
            if (file.name, frame.f_code.co_name) == ("replica_base.py", "report"):
                self.reporting = frame
                return
            name = f"{file.relative_to(PACKAGE)} {frame.f_code.co_name}"
            if name not in self.passes[-1]:
                self.passes[-1].append(name)


class Looking(TrainingOperator):
    """Has the default `train_batch`, and a model that follows it."""

    def setup(self, config: dict[str, Any]) -> None:
        model, rows = Followed(2, 1), 2 * self.world_size * BATCHES
        data = TensorDataset(torch.ones(rows, 2), torch.ones(rows, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(data, batch_size=2))


def looked(*, inline: bool) -> dict[str, list[str]]:
    """Train two epochs, with two workers or inline. Return the frames of each process, and the functions that a batch in the
    middle of the second one passes through, in their order, without those that report the progress."""
    sent: list[list[str]] = []
    submit = RayGroup.submit

    def submit_and_look(group: RayGroup, worker: str, verb: str, arguments: dict[str, Any], **more: Any) -> int:
        if verb == "run":
            sent.append([*frames(), "workers/ray_group.py RayGroup.submit"])
        return submit(group, worker, verb, arguments, **more)

    RayGroup.submit = submit_and_look  # type: ignore[method-assign]
    try:
        workers = {"num_workers": 1, "use_ray": False} if inline else {"num_workers": 2}
        with TorchTrainer(training_operator_cls=Looking, **workers) as trainer:
            trainer.train()
            trainer.train()
            driver = sent[0] if sent else []
            read = trainer.apply_all_operators(
                lambda operator: (operator.unwrapped().stack, operator.unwrapped().passes)
            )
    finally:
        RayGroup.submit = submit  # type: ignore[method-assign]
    worker, passes = read[0]
    return {"driver": driver, "worker": worker, "batch": min(passes[BATCHES + 2 : -2], key=len)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inline", action="store_true", help="train in this process, without Ray")
    for place, lines in looked(inline=parser.parse_args().inline).items():
        print(f"{place}: {len(lines)}", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
