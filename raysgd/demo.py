"""Two workers train a class, and one of them is killed without stopping it. Torch.

The data are scikit-learn's handwritten digits, which come with that package. After the last
ordinary epoch, one more begins, and in the middle of it one worker process is killed, as by
`kill -9`. The other continues with the next batch, the epoch still uses every sample once, and a
new worker joins when it is ready.

    python -m raysgd.demo
    python -m raysgd.demo --no-kill --num-workers 4
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator

KILL_AT_BATCH = 10


class Digits(TrainingOperator):
    """All that training needs: a model, an optimizer, a loss and data."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss()
        )
        train_data, validation_data = digits()
        self.register_data(
            train_loader=DataLoader(train_data, batch_size=config["batch_size"], shuffle=True),
            validation_loader=DataLoader(validation_data, batch_size=config["batch_size"]),
        )


class MortalDigits(Digits):
    """For the demonstration only: the worker that is named as victim kills itself in the middle of
    an epoch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("victim") == os.getpid() and batch_info["batch_idx"] == KILL_AT_BATCH:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Load training and validation data. Every fifth digit is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("The demo needs scikit-learn, which has the digits: pip install scikit-learn") from error
    source = load_digits()
    pixels = torch.tensor(source.data, dtype=torch.float32) / 16
    labels = torch.tensor(source.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    train_data = TensorDataset(pixels[~held_out], labels[~held_out])
    return train_data, TensorDataset(pixels[held_out], labels[held_out])


def print_row(train: dict[str, Any], val: dict[str, Any]) -> None:
    print(
        f"{train['epoch']:>5.0f}  {train['num_samples']:>7}  {train['train_loss']:>10.4f}"
        f"  {val['val_loss']:>8.4f}  {val['val_accuracy']:>12.1%}",
        flush=True,
    )


def train_while_one_dies(trainer: TorchTrainer, samples: int) -> None:
    before = trainer.apply_all_workers(os.getpid)
    victim = before[-1]
    print(
        f"\nOne more epoch. Of the workers {before}, {victim} is killed at its batch {KILL_AT_BATCH}.",
        flush=True,
    )
    # What `info` contains reaches every train_batch as a part of batch_info.
    train = trainer.train(info={"victim": victim})
    print_row(train, trainer.validate())
    print(f"recoveries: {len(trainer.recoveries)}")
    for recovery in trainer.recoveries:
        print(
            f"  {recovery.reason} in batch {recovery.batch}, removed ranks {recovery.removed_ranks}: "
            f"{recovery.world_size_before} -> {recovery.world_size_after} workers, "
            f"{recovery.seconds:.2f} s"
        )
    print(f"samples in that epoch: {train['num_samples']} of {samples}")
    print(f"workers now: {trainer.apply_all_workers(os.getpid)}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m raysgd.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--no-kill", action="store_true", help="leave every worker alive")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()
    samples = len(digits()[0])

    with TorchTrainer(
        training_operator_cls=MortalDigits,
        num_workers=args.num_workers,
        config={"lr": 0.05, "batch_size": 32},
        seed=1,
        use_tqdm=True,
    ) as trainer:
        print("epoch  samples  train_loss  val_loss  val_accuracy", flush=True)
        for _ in range(2 if args.smoke else args.epochs):
            print_row(trainer.train(), trainer.validate())
        if args.num_workers < 2 and not args.no_kill:
            print("With one worker, none would be left to continue, so none is killed.")
        elif not args.no_kill:
            train_while_one_dies(trainer, samples)


if __name__ == "__main__":
    main()
