"""Mixed precision and accumulated batches: the same operator in three number formats.

python examples/mixed_precision.py
python examples/mixed_precision.py --num-workers 2 --accumulate 4
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions


class Rings(TrainingOperator):
    """Is a point nearer to the origin than one? In 16 dimensions, scaled so that half of them are."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
            criterion=nn.CrossEntropyLoss(),
        )
        points = torch.randn(config["points"], 16) / 15.4**0.5
        data = TensorDataset(points, (points.norm(dim=1) < 1).long())
        self.register_data(
            train_loader=DataLoader(data, batch_size=config["batch_size"], shuffle=True),
            validation_loader=DataLoader(data, batch_size=256),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="fewer points and epochs")
    args = parser.parse_args()
    config = {"points": 1024 if args.smoke else 8192, "batch_size": 32}

    for precision in ("fp32", "bf16", "fp16"):
        with TorchTrainer(
            training_operator_cls=Rings,
            num_workers=args.num_workers,
            config=config,
            options=TrainingOptions(precision=precision, accumulate=args.accumulate, clip_norm=1.0),
        ) as trainer:
            start = time.perf_counter()
            results = [trainer.train() for _ in range(6 if args.smoke else args.epochs)]
            seconds = time.perf_counter() - start
            skipped = sum(result.get("skipped_steps", 0) for result in results)
            first, last = results[0]["train_loss"], results[-1]["train_loss"]
            accuracy = trainer.validate()["val_accuracy"]
        print(
            f"{precision}: train_loss {first:.3f} -> train_loss {last:.3f}, val_accuracy {accuracy:.1%}, "
            f"{skipped} steps skipped, {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
