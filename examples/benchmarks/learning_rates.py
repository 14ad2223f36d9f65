"""Learning rates of schedules that were made for two workers, when one fails, when the group grows, and over two resizes.

The trainer steps one set of schedules, planned with `total_steps()`. The operator steps another set, once for each batch. Rank 0 notes
the rates of both for each batch, with the samples that were trained before it.

    last    the learning rate after the last batch: planned, followed by the trainer, and once for each batch

    python examples/benchmarks/learning_rates.py
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from processes import search_path
from report import claim_stdout, emit
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator

COLUMNS = ("change", "schedule", "batches", "last")
WORKERS, BATCH, ROWS, EPOCHS = 2, 4, 144, 4
STEPS = EPOCHS * ROWS // (WORKERS * BATCH)
# After how many epochs there are how many workers, and in which batch rank 1 fails.
CHANGES: dict[str, tuple[dict[int, int], int | None]] = {
    "one of two fails": ({}, 28),
    "two grow to four": ({2: 4}, None),
    "resized to one, then three": ({1: 1, 2: 3}, None),
}


def made(optimizer: Any, steps: int, name: str) -> Any:
    if name == "warm-up, cosine":
        parts = [LinearLR(optimizer, 0.1, total_iters=steps // 6), CosineAnnealingLR(optimizer, steps - steps // 6)]
        return SequentialLR(optimizer, parts, milestones=[steps // 6])
    kinds = {
        "cosine": lambda: CosineAnnealingLR(optimizer, steps),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
        "OneCycle": lambda: OneCycleLR(optimizer, 0.1, total_steps=steps),
    }
    return kinds[name]()


NAMES = ("cosine", "linear", "OneCycle", "warm-up, cosine")


class Together:
    """Steps several schedulers."""

    def __init__(self, schedulers):
        self.schedulers = schedulers

    def step(self):
        for each in self.schedulers:
            each.step()


class Noting(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2 * len(NAMES))]
        data = TensorDataset(torch.ones(ROWS, 1), torch.ones(ROWS, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH))
        steps = self.total_steps(EPOCHS)
        schedulers = [made(each, steps, NAMES[number % 4]) for number, each in enumerate(optimizers)]
        self.model, self.optimizers, self.criterion, _ = self.register(
            models=model, optimizers=optimizers, criterion=nn.MSELoss(), schedulers=schedulers
        )
        self.scheduler, self.by_batch = Together(schedulers[:4]), Together(schedulers[4:])
        self.samples, self.rates = 0, []

    def train_batch(self, batch, batch_info):
        kill_at, mark = self.config["kill_at"], Path(self.config["mark"])
        if batch_info["global_step"] == kill_at and self.world_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rates = [each.param_groups[0]["lr"] for each in self.optimizers]
        self.zero_grad()
        self.backward(self.criterion(self.model(batch[0]), batch[1]))
        for each in self.optimizers:
            self.step(each)
        self.rates.append((self.samples, rates))
        self.samples += self.world_size * BATCH
        self.by_batch.step()
        return {"num_samples": BATCH}

    def state_dict(self):
        return {"samples": self.samples, "rates": list(self.rates)}

    def load_state_dict(self, state_dict):
        self.samples, self.rates = state_dict["samples"], list(state_dict["rates"])


def last_rates(operator):
    return [each.param_groups[0]["lr"] for each in operator.optimizers]


def planned(name: str) -> list[float]:
    """The rates of a plain loop."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler, rates = made(optimizer, STEPS, name), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def run(change: str) -> list[dict[str, Any]]:
    resizes, kill_at = CHANGES[change]
    with (
        tempfile.TemporaryDirectory() as folder,
        TorchTrainer(
            training_operator_cls=Noting,
            num_workers=WORKERS,
            use_gpu=False,
            use_ray=True,
            scheduler_step_freq="batch",
            elastic=ElasticConfig(grow=False, hang_timeout_s=120),
            config={"kill_at": kill_at, "mark": f"{folder}/mark"},
        ) as trainer,
    ):
        for epoch in range(EPOCHS):
            if epoch in resizes:
                trainer.resize(resizes[epoch])
            trainer.train()
        state = trainer.state_dict()["operator"]
        last = trainer.apply_all_operators(last_rates)[0]
    rows = []
    for number, name in enumerate(NAMES):
        plan = planned(name)
        followed, by_batch = ([each[place] for _, each in state["rates"]] for place in (number, number + 4))
        rows.append(
            {
                "change": change,
                "schedule": name,
                "batches": len(followed),
                "last": [round(each, 6) for each in (plan[-1], last[number], last[number + 4])],
                "samples": [samples for samples, _ in state["rates"]],
                "planned": [round(each, 5) for each in plan],
                "followed": [round(each, 5) for each in followed],
                "by_batch": [round(each, 5) for each in by_batch],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one change")
    args = parser.parse_args()
    out = claim_stdout()
    os.environ["PYTHONPATH"] = search_path()
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        rows = [row for change in list(CHANGES)[: 1 if args.smoke else None] for row in run(change)]
    finally:
        ray.shutdown()
    emit(out, "learning_rates", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
