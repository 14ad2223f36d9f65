"""The same seed, the same losses: two runs of a training function agree to the last bit, a third with another seed does not.

python examples/function_reproducible.py --num-workers 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Trainer


def train_func(config):
    train.torch.enable_reproducibility(config["seed"])
    # Weights, dropout and data come from the generators that are seeded now.
    model = train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)))
    x = torch.randn(512, 8)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = train.torch.prepare_data_loader(DataLoader(data, batch_size=16, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        train.report(epoch=epoch, train_loss=total / len(loader))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="it is quick as it is")
    args = parser.parse_args()

    with Trainer(backend="torch", num_workers=args.num_workers) as trainer:
        for seed in (1, 1, 2):
            rounds = trainer.run_iterator(train_func, {"seed": seed})
            losses = [rows[0]["train_loss"] for rows in rounds]
            print(f"seed {seed}: " + "  ".join(f"train_loss {loss:.15f}" for loss in losses))


if __name__ == "__main__":
    main()
