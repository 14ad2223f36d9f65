"""A training function that loses a worker in the middle of an epoch, and continues there.

`train.elastic` keeps model, optimizer, the place in the data and plain values. Rank 1 kills itself once; the others run
the function again in the processes they are in, from the last batch that was trained. Every sample is used once.

    python examples/function_elastic.py --num-workers 2
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Trainer


def train_func(config):
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    loader = train.torch.elastic_data_loader(DataLoader(data, batch_size=10, shuffle=True))
    counts = {"epoch": 0, "seen": 0, "loss": 0.0}
    state = train.elastic({"model": model, "optimizer": optimizer, "loader": loader, **counts})
    while state["epoch"] < config["epochs"]:
        for inputs, targets in loader:
            if state["seen"] > 900 and train.world_rank() == 1:
                lose_a_worker(config["marks"])
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            seen = torch.tensor([float(len(inputs)), loss.item() * len(inputs)])
            dist.all_reduce(seen)
            state["seen"] += int(seen[0])
            state["loss"] += seen[1].item()
            state.commit()
        train.report(epoch=state["epoch"], train_loss=state["loss"] / len(data), seen=state["seen"])
        state["epoch"] += 1
        state["loss"] = 0.0
    return train.world_size()


def lose_a_worker(marks):
    """Once only: the file says whether it has happened."""
    mark = Path(marks, "lost")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="it is quick as it is")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as marks, Trainer(backend="torch", num_workers=args.num_workers) as trainer:
        for rows in trainer.run_iterator(train_func, config={"epochs": 3, "marks": marks}):
            row = rows[0]
            print(f"epoch {row['epoch']}  train_loss {row['train_loss']:.4f}  samples so far {row['seen']}")
        for recovery in trainer.recoveries:
            before, after = recovery.world_size_before, recovery.world_size_after
            print(f"{recovery.reason}: {before} -> {after} workers in {recovery.seconds:.2f} s")


if __name__ == "__main__":
    main()
