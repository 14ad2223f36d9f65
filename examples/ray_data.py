"""A Ray Dataset under an operator: read once for all workers, every row used once in an epoch although a worker dies.

python examples/ray_data.py --num-workers 2
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import ray
import torch
from torch import nn

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import RayData


def add_columns(batch):
    x = batch["id"] / 1000.0
    return {"x": x, "square": x**2, "y": 3.0 * x**2 - 2.0 * x + 1.0}


class Curve(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.05), criterion=nn.MSELoss()
        )
        data = ray.data.range(config["rows"], override_num_blocks=8).map_batches(add_columns)
        self.register_data(train_loader=RayData(data, batch_size=10, features=["x", "square"], target=["y"]))

    def train_batch(self, batch, batch_info):
        if self.global_step == self.config["lose_at"] and self.world_rank == 1:
            lose_a_worker(self.config["marks"])
        return super().train_batch(batch, batch_info)


def lose_a_worker(marks):
    """Once only: the file says whether it has happened."""
    mark = Path(marks, "lost")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a quick run with little data")
    args = parser.parse_args()
    rows, epochs = (400, 6) if args.smoke else (4000, args.epochs)

    # Ray Data's tasks need CPUs beside those of the workers.
    ray.init(num_cpus=args.num_workers + 2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as marks:
        config = {"rows": rows, "lose_at": rows // 40, "marks": marks}
        with TorchTrainer(training_operator_cls=Curve, num_workers=args.num_workers, config=config) as trainer:
            for epoch in range(1, epochs + 1):
                result = trainer.train()
                print(f"epoch {epoch}: train_loss {result['train_loss']:.5f}, rows {result['num_samples']}")
            for recovery in trainer.recoveries:
                print(f"{recovery.reason}: {recovery.world_size_before} -> {recovery.world_size_after} workers")
    ray.shutdown()


if __name__ == "__main__":
    main()
