"""No checkpoints on disk: they are kept in the driver's memory only, and that is enough to survive the loss of workers.

With `num_to_keep=0` nothing is written. Every worker kills itself right after it has saved epoch 1 (unless it has heard of another's
death before): survivors, or new workers if there are none, continue from that checkpoint.

    python examples/function_nothing_on_disk.py --num-workers 2
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch

from raysgd import ElasticConfig, train
from raysgd.train import CheckpointConfig, Trainer


def train_func(config):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    found = train.load_checkpoint()
    if found is not None:
        model.load_state_dict(found["model"])
        start = found["epoch"] + 1
    model = train.torch.prepare_model(model)
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    for epoch in range(start, config["epochs"]):
        for _ in range(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), 3 * x)
            loss.backward()
            optimizer.step()
        bare = model.module if train.world_size() > 1 else model
        train.report(epoch=epoch, train_loss=loss.item())
        train.save_checkpoint(epoch=epoch, model=bare.state_dict())
        if epoch == 1:
            die_once(config["marks"])
    return start


def die_once(marks):
    """Each rank, the first time it comes by."""
    mark = Path(marks, f"rank_{train.world_rank()}")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="it is quick as it is")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as marks, tempfile.TemporaryDirectory() as logs:
        small = ElasticConfig(grow=False)  # no replacements: the function runs again once for each failure
        with Trainer(backend="torch", num_workers=args.num_workers, logdir=logs, elastic=small) as trainer:
            rounds = trainer.run_iterator(
                train_func,
                config={"epochs": 5, "marks": marks},
                checkpoint_strategy=CheckpointConfig(num_to_keep=0),
            )
            for rows in rounds:
                print(f"epoch {rows[0]['epoch']}  train_loss {rows[0]['train_loss']:.4f}")
            starts = rounds.get_final_results()
            failures = [recovery for recovery in trainer.recoveries if recovery.reason == "worker death"]
            print(f"resumed at epoch {starts[0]}; worker failures: {len(failures)}")
            print(f"newest in memory: epoch {trainer.latest_checkpoint['epoch']}")
        files = [path for path in Path(logs).rglob("*") if path.is_file()]
        print(f"files on disk: {len(files)}")


if __name__ == "__main__":
    main()
