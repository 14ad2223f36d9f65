"""Gradients through Horovod: the same operator as for DDP, with one more argument of the trainer's.

Horovod must be there: `make horovod` builds it for the installed PyTorch.

    python examples/horovod_digits.py --num-workers 2 --compression fp16
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from raysgd import TorchTrainer, TrainingOperator


class Digits(TrainingOperator):
    """Knows nothing of Horovod."""

    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=nn.CrossEntropyLoss(),
        )
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        train, validation = random_split(digits, [1437, 360], generator=torch.Generator().manual_seed(0))
        self.register_data(
            train_loader=DataLoader(train, batch_size=32, shuffle=True),
            validation_loader=DataLoader(validation, batch_size=120),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--compression", choices=["none", "fp16"], default="none", help="how gradients travel")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    with TorchTrainer(
        training_operator_cls=Digits,
        num_workers=args.num_workers,
        use_gpu=False,
        config={"lr": 0.003},
        backend="horovod",
        horovod_args={"compression": args.compression},
    ) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']}  train_loss {train['train_loss']:.4f}  val_accuracy {val['val_accuracy']:.3f}"
            )


if __name__ == "__main__":
    main()
