"""Print raysgd's Python frames between `trainer.train()` and the operator's `train_batch`, on the driver and in a
worker.

Each frame is one more step for a reader of a traceback or of the code. With `--inline` the one worker is this
process, and both parts are one stack. With `--batch`, print instead what one batch passes through: all functions of raysgd that are
called from one forward pass to the next one.

    python examples/benchmarks/frames.py
    python examples/benchmarks/frames.py --batch
"""

from __future__ import annotations

import argparse
import sys
import traceback
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


class Looking(TrainingOperator):
    """Keeps the frames under its `train_batch`."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.frames = frames()
        return super().train_batch(batch, batch_info)


def looked(*, inline: bool) -> dict[str, list[str]]:
    """Train one epoch, with two workers or inline. Return the frames of each process."""
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
            driver = sent[0] if sent else []
            worker = trainer.apply_all_operators(lambda operator: operator.frames)[0]
    finally:
        RayGroup.submit = submit  # type: ignore[method-assign]
    return {"inline": worker} if inline else {"driver": driver, "worker": worker}


class Followed(torch.nn.Linear):
    """Notes which functions of raysgd are called between two forward passes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.passes: list[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes.append([])
        sys.setprofile(self.note if BATCHES < len(self.passes) < 2 * BATCHES - 1 else None)
        return super().forward(x)

    def note(self, frame: Any, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            name = f"{file.relative_to(PACKAGE)} {frame.f_code.co_name}"
            if name not in self.passes[-1]:
                self.passes[-1].append(name)


class Following(Looking):
    """Has the default `train_batch`, and a model that follows it."""

    train_batch = TrainingOperator.train_batch

    def setup(self, config: dict[str, Any]) -> None:
        model, rows = Followed(2, 1), 2 * self.world_size * BATCHES
        data = TensorDataset(torch.ones(rows, 2), torch.ones(rows, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(data, batch_size=2))


def followed(*, inline: bool) -> list[str]:
    """Train two epochs, with two workers or inline. Return the functions that a batch in the middle of the second one passes through, in
    their order, if no progress is reported in it."""
    workers = {"num_workers": 1, "use_ray": False} if inline else {"num_workers": 2}
    with TorchTrainer(training_operator_cls=Following, **workers) as trainer:
        trainer.train()
        trainer.train()
        passes: list[list[str]] = trainer.apply_all_operators(lambda operator: operator.unwrapped().passes)[0]
        return min(passes[BATCHES + 2 : -2], key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inline", action="store_true", help="train in this process, without Ray")
    parser.add_argument("--batch", action="store_true", help="what one batch passes through")
    args = parser.parse_args()
    if args.batch:
        passed = followed(inline=args.inline)
        print(*passed, sep="\n")
        print(f"{len(passed)} functions in {len({each.split()[0] for each in passed})} files")
        return
    found = looked(inline=args.inline)
    for process, lines in found.items():
        print(f"{process}: {len(lines)} frames", *lines, sep="\n  ")
    print(f"{sum(map(len, found.values()))} frames of raysgd between the script and train_batch")


if __name__ == "__main__":
    main()
