"""A ResNet on generated pictures: BatchNorm, top-1 and top-5, a learning rate for each epoch, the best checkpoint.

python examples/programs/resnet.py --workers 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, TorchTrainer, TrainingOperator
from raysgd.callbacks import PrintCallback
from raysgd.constants import BATCH_SIZE

CLASSES = 10


def pictures(count, side, seed):
    """Return pictures of stripes under noise, whose class is the direction of the stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles, grid = (labels / CLASSES * torch.pi).view(-1, 1, 1), torch.linspace(-8, 8, side)
    waves = angles.cos() * grid + angles.sin() * grid.unsqueeze(1) + 6 * torch.rand(count, 1, 1, generator=generator)
    noise = torch.randn(count, 3, side, side, generator=generator)
    return TensorDataset(waves.sin().unsqueeze(1) + 2 * noise, labels)


def convolved(before, after, stride, kernel=3):
    convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.main = nn.Sequential(convolved(before, after, stride), nn.ReLU(), convolved(after, after, 1))
        self.shortcut = nn.Identity() if stride == 1 else convolved(before, after, stride, kernel=1)

    def forward(self, x):
        return (self.main(x) + self.shortcut(x)).relu()


def resnet(width):
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES)]
    return nn.Sequential(convolved(3, width, 1), nn.ReLU(), *blocks, *head)


class Stripes(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model, size, side = resnet(config["width"]), config[BATCH_SIZE], config["side"]
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["epochs"])
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(), schedulers=schedule
        )
        order = torch.Generator().manual_seed(1)
        self.register_data(
            train_loader=DataLoader(pictures(config["train"], side, seed=0), size, shuffle=True, generator=order),
            validation_loader=DataLoader(pictures(config["held_out"], side, seed=1), size),
        )

    def metrics(self, output, target):
        hits = (output.topk(5).indices == target.unsqueeze(1)).float()
        return {"top1": hits[:, 0].mean(), "top5": hits.sum(1).mean()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"workers": 1, "epochs": 5, "batch": 32, "train": 2000, "held_out": 500, "side": 24, "width": 8, "lr": 0.05}
    for name, value in {**sizes, "checkpoints": "runs/resnet"}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args(argv)
    with TorchTrainer(
        training_operator_cls=Stripes,
        num_workers=args.workers,
        config={**vars(args), BATCH_SIZE: args.batch},
        scheduler_step_freq="epoch",
        checkpoints=AutoCheckpoint(path=args.checkpoints, best="val_top1", mode="max"),
        resume="auto",  # a run that has ended or was killed continues
        callbacks=[PrintCallback(["train_loss", "val_loss", "val_top1", "val_top5"])],
    ) as trainer:
        trainer.fit(args.epochs)
        trainer.load(trainer.best_checkpoint)
        print(f"best  val_top1 {trainer.validate()['val_top1']:.4f}")
        return list(trainer.history), trainer.get_model()


if __name__ == "__main__":
    main()
