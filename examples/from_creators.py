"""No class at all: functions that create the model, the data, the optimizer and the scheduler.

`TrainingOperator.from_creators` makes an operator class of such functions, for code that already has them.

    python examples/from_creators.py --num-workers 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


def model_creator(config):
    return nn.Sequential(nn.Linear(2, config["width"]), nn.ReLU(), nn.Linear(config["width"], 2))


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


def scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def data_creator(config):
    """Points inside and outside a ring; a line cannot tell them apart."""
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
    train, validation = torch.utils.data.random_split(data, [800, 200], torch.Generator().manual_seed(1))
    train_loader = DataLoader(train, batch_size=config["batch_size"], shuffle=True)
    return train_loader, DataLoader(validation, batch_size=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    operator = TrainingOperator.from_creators(
        model_creator,
        optimizer_creator,
        data_creator,
        nn.CrossEntropyLoss,
        scheduler_creator,
    )
    with TorchTrainer(
        training_operator_cls=operator,
        num_workers=args.num_workers,
        scheduler_step_freq="epoch",
        config={"width": 16, "lr": 0.1, "batch_size": 32 // args.num_workers},
    ) as trainer:
        for _ in range(4 if args.smoke else args.epochs):
            rate = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])[0]
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  lr {rate:.4f}  train_loss {train['train_loss']:.4f}"
                f"  val_loss {val['val_loss']:.4f}  val_accuracy {val['val_accuracy']:.3f}"
            )


if __name__ == "__main__":
    main()
