"""The loss of one run under five schedules of its workers: undisturbed, with kills, shrinking and growing.

Each run trains the same small GPT for as many steps, with batch="global", from the same seed. Rank 0 measures the loss on samples
that stay the same. A worker is killed with SIGKILL; a new one joins while the others train.

    largest_difference    of any weight at the end, from the undisturbed run's

    python examples/benchmarks/schedules.py
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from processes import search_path
from report import claim_stdout, emit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.operators.language_model import GPT

COLUMNS = ("schedule", "recoveries", "steps", "final_loss", "largest_difference")
WORKERS, BATCH, LETTERS, LENGTH = 3, 4, 16, 12


@dataclass(frozen=True)
class Schedule:
    """`begin` workers; others from these steps on; and a kill of a rank at these steps. Steps are parts of the whole run."""

    name: str
    begin: int = WORKERS
    resize: tuple[tuple[float, int], ...] = ()
    kills: tuple[tuple[float, int], ...] = ()


SCHEDULES = (
    Schedule("undisturbed"),
    Schedule("one kill", kills=((0.4, 1),)),
    Schedule("shrinks and grows", resize=((0.3, 1), (0.7, 3))),
    Schedule("1 to 4 workers", begin=1, resize=((0.25, 2), (0.5, 3), (0.75, 4))),
    Schedule("many kills", kills=tuple((0.1 * number, number % 2) for number in range(1, 10))),
)


def mean_over_letters(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Rhymes(TrainingOperator):
    """A small GPT on sequences that follow a rule. Its list of losses is part of its state, so it travels with the weights."""

    def setup(self, config):
        torch.manual_seed(3)
        self.net = model = GPT(vocabulary=LETTERS, block_size=LENGTH, width=16, heads=2, layers=2).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=mean_over_letters
        )
        begin, stride = torch.arange(768) * 7 % LETTERS, torch.arange(768) * 5 % 3 + 1
        letters = (begin[:, None] + stride[:, None] * torch.arange(LENGTH + 1)) % LETTERS
        letters[::5, 6:] = letters[::5, 6:].flip(1)  # a rule has exceptions
        self.held = letters[:128]
        data = TensorDataset(letters[:, :-1].contiguous(), letters[:, 1:].contiguous())
        generator = torch.Generator().manual_seed(1)
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator))
        self.losses = []

    def train_batch(self, batch, batch_info):
        step = batch_info["global_step"]
        if step % self.config["every"] == 0 and len(self.losses) <= step // self.config["every"]:
            with torch.no_grad():
                self.losses.append(float(mean_over_letters(self.net(self.held[:, :-1]), self.held[:, 1:])))
        for at, rank in self.config["kills"]:
            mark = Path(self.config["marks"], str(at))
            if rank == self.world_rank and step >= at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"losses": list(self.losses)}

    def load_state_dict(self, state_dict):
        self.losses = list(state_dict["losses"])


def run(schedule: Schedule, steps: int, every: int) -> tuple[dict[str, Any], torch.Tensor]:
    with tempfile.TemporaryDirectory() as marks:
        kills = [(int(at * steps), rank) for at, rank in schedule.kills]
        batch = ElasticConfig(batch="global", hang_timeout_s=120)
        with TorchTrainer(
            training_operator_cls=Rhymes,
            num_workers=WORKERS,
            use_gpu=False,
            use_ray=True,
            elastic=batch,
            config={"marks": marks, "kills": kills, "every": every},
        ) as trainer:
            done = 0
            for at, workers in [(0.0, schedule.begin), *schedule.resize, (1.0, 0)]:
                if int(at * steps) > done:
                    trainer.train(num_steps=int(at * steps) - done, max_retries=-1)
                    done = int(at * steps)
                if workers and workers != trainer.world_size:
                    trainer.resize(workers)
            losses = trainer.state_dict()["operator"]["losses"]
            weights = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
            recoveries = len(trainer.recoveries)
    return {
        "schedule": schedule.name,
        "steps": steps,
        "every": every,
        "losses": losses,
        "recoveries": recoveries,
    }, weights


def measure(schedules: Sequence[Schedule], steps: int, every: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first: torch.Tensor | None = None
    for schedule in schedules:
        row, weights = run(schedule, steps, every)
        first = weights if first is None else first
        difference = float((weights - first).abs().max())
        print(f"{schedule.name}: differs by {difference:.1e}, {row['recoveries']} changes", file=sys.stderr)
        rows.append({**row, "final_loss": row["losses"][-1], "largest_difference": difference})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=4, help="measure the loss so often")
    parser.add_argument("--smoke", action="store_true", help="a few steps of two schedules")
    args = parser.parse_args()
    out = claim_stdout()
    schedules = SCHEDULES[:2] if args.smoke else SCHEDULES
    args.steps = 12 if args.smoke else args.steps
    os.environ["PYTHONPATH"] = search_path()
    ray.init(address="local", num_cpus=WORKERS + 3, include_dashboard=False, log_to_driver=False)
    try:
        rows = measure(schedules, args.steps, args.every)
    finally:
        ray.shutdown()
    emit(out, "schedules", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
