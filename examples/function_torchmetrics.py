"""TorchMetrics in a training function: accuracy and F1 over all workers, reported in each epoch."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from raysgd import train
from raysgd.train import Trainer

CLASSES = 3


def points(count, seed):
    """Three clouds in the plane."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    centers = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return TensorDataset(centers[labels] + torch.randn(count, 2, generator=generator), labels)


def train_func(config):
    torch.manual_seed(0)
    model = train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    criterion = torch.nn.CrossEntropyLoss()
    loader = train.torch.prepare_data_loader(DataLoader(points(960, seed=1), batch_size=32, shuffle=True))
    held_out = train.torch.prepare_data_loader(DataLoader(points(480, seed=2), batch_size=32))
    # compute() adds up what the metric counted on each worker, since the workers are in one process group.
    measured = MetricCollection([MulticlassAccuracy(CLASSES, average="micro"), MulticlassF1Score(CLASSES)])
    measured.to(train.torch.get_device())

    for epoch in range(config["epochs"]):
        model.train()
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        measured.reset()
        with torch.no_grad():
            for x, y in held_out:
                measured.update(model(x), y)
        found = {name: float(value) for name, value in measured.compute().items()}
        train.report(
            epoch=epoch,
            train_loss=float(loss),
            accuracy=found["MulticlassAccuracy"],
            f1=found["MulticlassF1Score"],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="3 epochs instead of 10")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    with Trainer(backend="torch", num_workers=options.workers) as trainer:
        for rows in trainer.run_iterator(train_func, {"lr": 0.1, "epochs": 3 if options.smoke else 10}):
            figures = "  ".join(f"{name} {rows[0][name]:.4f}" for name in ("train_loss", "accuracy", "f1"))
            same = all(row["accuracy"] == rows[0]["accuracy"] for row in rows)
            print(f"epoch {rows[0]['epoch']}  {figures}  {'the same' if same else 'different'} on {len(rows)} workers")


if __name__ == "__main__":
    main()
