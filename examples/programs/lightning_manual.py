"""A LightningModule with two optimizers: an autoencoder, and a classifier of its codes, which teaches it nothing.

    python examples/programs/lightning_manual.py --workers 2

The same module under Lightning's own Trainer, and the comparison of both, are tests/programs/test_lightning_manual.py.
"""

import argparse

import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import PrintCallback


def curves(count, seed):
    """Return noisy curves of three kinds, and the number of the kind."""
    draw, x = torch.Generator().manual_seed(seed), torch.linspace(-1, 1, 24)
    shapes, kinds = torch.stack([x, x.square(), (4 * x).sin()]), torch.randint(3, (count,), generator=draw)
    sizes, noise = torch.rand(count, 1, generator=draw) + 0.5, torch.randn(count, 24, generator=draw)
    return TensorDataset(sizes * shapes[kinds] + noise / 2, kinds)


class CodedCurves(LightningModule):
    def __init__(self, rows, batch):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.rows, self.batch = False, rows, batch
        self.encoder = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 24))
        self.classifier = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))

    def losses(self, batch):
        (x, kinds), code = batch, self.encoder(batch[0])
        output = self.classifier(code.detach())
        return self.decoder(code).sub(x).square().mean(), nn.functional.cross_entropy(output, kinds), output

    def training_step(self, batch, batch_idx):
        *losses, _ = self.losses(batch)
        for name, loss, optimizer in zip(["train_error", "train_loss"], losses, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()
        self.log("lr", self.lr_schedulers().get_last_lr()[0])

    def validation_step(self, batch, batch_idx):
        error, loss, output = self.losses(batch)
        hits = (output.argmax(dim=1) == batch[1]).float().mean()
        self.log_dict({"val_error": error, "val_loss": loss, "val_accuracy": hits}, sync_dist=True)

    def configure_optimizers(self):
        coder = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=0.01)
        classifier = torch.optim.SGD(self.classifier.parameters(), lr=0.1, momentum=0.9)
        return [coder, classifier], [torch.optim.lr_scheduler.ExponentialLR(coder, 0.8)]

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(3)
        return DataLoader(curves(self.rows, seed=1), self.batch, shuffle=True, generator=draw)

    def val_dataloader(self):
        return DataLoader(curves(200, seed=2), batch_size=50)


def main(argv=None):
    """Return the history and the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in {"workers": 1, "epochs": 6, "rows": 2000, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    with TorchTrainer(
        training_operator_cls=TrainingOperator.from_ptl(CodedCurves),
        num_workers=args.workers,
        config=vars(args),
        callbacks=[PrintCallback(["train_error", "train_loss", "lr", "val_error", "val_loss", "val_accuracy"])],
    ) as trainer:
        return list(trainer.fit(args.epochs)), trainer.get_model()


if __name__ == "__main__":
    main()
