"""Linear regression with a ready-made operator: nothing to write but the settings.

`raysgd.operators.regression` brings the loop, the loss and the metrics (MSE, MAE, R²); the data come from
here. At the end the learned line is compared with the one that made the data.

    python examples/linear_regression.py --num-workers 2
"""

import argparse

import torch
from torch.utils.data import TensorDataset

from raysgd import TorchTrainer
from raysgd.operators.regression import RegressionOperator

SLOPE, INTERCEPT = 2.0, -3.0


def line(size, seed):
    """Noisy points on a line."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, generator=generator)
    return TensorDataset(x, SLOPE * x + INTERCEPT + 0.1 * torch.randn(size, 1, generator=generator))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    config = {
        "train_data": line(1000, seed=1),
        "validation_data": line(200, seed=2),
        "lr": 0.05,
        "batch_size": 32 // args.num_workers,
    }
    with TorchTrainer(training_operator_cls=RegressionOperator, num_workers=args.num_workers, config=config) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_mae {val['val_mae']:.4f}  val_r2 {val['val_r2']:.4f}"
            )
        model = trainer.get_model()
    print(f"made with  y = {SLOPE:.2f} x {INTERCEPT:+.2f}")
    print(f"learned    y = {model.weight.item():.2f} x {model.bias.item():+.2f}")


if __name__ == "__main__":
    main()
