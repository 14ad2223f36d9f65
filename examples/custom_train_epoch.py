"""A whole epoch of your own: gradients are summed over several batches and clipped before each step.

Overriding `train_epoch` takes over the loop: batches arrive in `iterator`, on the right device, and what the
method returns is the worker's result, which is then averaged over the workers, weighted by `num_samples`.

    python examples/custom_train_epoch.py --accumulate 8
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


class AccumulatingOperator(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(waves(), batch_size=8, shuffle=True))

    def train_epoch(self, iterator, info):
        accumulate = self.config["accumulate"]
        batches = steps = samples = 0
        loss_sum = 0.0
        for inputs, target in iterator:
            loss = self.criterion(self.model(inputs), target)
            self.backward(loss / accumulate)
            batches += 1
            samples += len(target)
            # Stays a tensor: `.item()` here would wait for the device at every batch.
            loss_sum += loss.detach() * len(target)
            if batches % accumulate == 0:
                self.clip_and_step()
                steps += 1
        if batches % accumulate:  # what is left at the end of the epoch
            self.clip_and_step()
            steps += 1
        train_loss = loss_sum / samples
        return {"num_samples": samples, "batch_count": batches, "steps": steps, "train_loss": train_loss}

    def clip_and_step(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.step(self.optimizer)
        self.optimizer.zero_grad()


def waves(size=512):
    """Eight numbers and the sine of their sum."""
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(0)) / 2
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=4, help="batches per step")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    with TorchTrainer(
        training_operator_cls=AccumulatingOperator,
        num_workers=args.num_workers,
        config={"accumulate": args.accumulate},
    ) as trainer:
        for _ in range(5 if args.smoke else args.epochs):
            train = trainer.train()
            print(
                f"epoch {train['epoch']:.0f}  batches {train['batch_count']:.0f}  steps {train['steps']:.0f}"
                f"  train_loss {train['train_loss']:.4f}"
            )


if __name__ == "__main__":
    main()
