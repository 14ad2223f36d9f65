"""A script for RaySGD: a line is learned by the default loops. Only its imports have changed."""

import argparse

import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_SIZE


class LinearDataset(torch.utils.data.Dataset):
    """y = a * x + b"""

    def __init__(self, a, b, size=1000):
        self.x = torch.linspace(-1, 1, size).unsqueeze(1)
        self.y = a * self.x + b

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


class MyTrainingOperator(TrainingOperator):
    def setup(self, config):
        train_loader = torch.utils.data.DataLoader(LinearDataset(2, 5), batch_size=config[BATCH_SIZE], shuffle=True)
        val_loader = torch.utils.data.DataLoader(LinearDataset(2, 5, size=400), batch_size=config[BATCH_SIZE])
        model = nn.Linear(1, config.get("hidden_size", 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        loss = nn.MSELoss()
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=loss, schedulers=scheduler
        )
        self.register_data(train_loader=train_loader, validation_loader=val_loader)


def train_example(num_workers=1, use_gpu=False):
    trainer = TorchTrainer(
        training_operator_cls=MyTrainingOperator,
        num_workers=num_workers,
        use_gpu=use_gpu,
        config={"lr": 1e-1, "hidden_size": 1, BATCH_SIZE: 4 * num_workers},
        backend="gloo",
        scheduler_step_freq="epoch",
        use_local=num_workers == 1,
    )
    for _ in range(3):
        stats = trainer.train(info={"num_epochs": 3})
        print("epoch", stats["epoch"], "train_loss", round(stats["train_loss"], 6))
    print("val_loss", round(trainer.validate()["val_loss"], 8))
    model = trainer.get_model()
    print(f"trained weight: {model.weight.item():.3f}, bias: {model.bias.item():.3f}")
    trainer.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "-n", type=int, default=1)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="no difference: it is small already")
    args = parser.parse_args()
    train_example(num_workers=args.num_workers, use_gpu=args.use_gpu)
