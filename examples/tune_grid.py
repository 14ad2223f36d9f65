"""A grid of learning rates: each is a Tune trial, and each trial a training function on workers of its own.

The trainer is given to Tune as it is. One of the rates is too large; its trial shows it, and the best one's checkpoint is read.

    python examples/tune_grid.py --num-workers 2
"""

import argparse
import os
import tempfile

import ray
import torch
from ray import tune
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Checkpoint, ScalingConfig, TorchTrainer

RATES = [0.001, 0.1, 2.0]


def points(size, seed):
    """Noisy points on y = 2 x - 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, generator=generator)
    return TensorDataset(x, 2 * x - 3 + 0.1 * torch.randn(size, 1, generator=generator))


def train_loop(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    start = 0
    checkpoint = train.load_checkpoint()  # there is one when Tune starts a trial again
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        start = checkpoint["epoch"] + 1
    model = train.torch.prepare_model(model)
    loader = train.torch.prepare_data_loader(DataLoader(points(512, 1), batch_size=32, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    held_out = points(128, 2).tensors
    for epoch in range(start, config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        bare = model.module if train.world_size() > 1 else model
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(bare(held_out[0]), held_out[1]).item()
        saved = Checkpoint.from_dict({"epoch": epoch, "model": bare.state_dict()})
        train.report({"epoch": epoch, "val_loss": loss}, checkpoint=saved)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    # A trial holds a CPU for itself and one for each worker. On a small machine these are logical ones.
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        ray.init(address="local", num_cpus=2 * (1 + args.num_workers), include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 2 if args.smoke else 5},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
    )
    results = tune.Tuner(
        trainer,
        param_space={"train_loop_config": {"lr": tune.grid_search(RATES)}},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min"),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
    ).fit()
    for result in results:
        rate = result.config["train_loop_config"]["lr"]
        print(f"lr {rate:<6}  val_loss {result.metrics['val_loss']:.4g}")
    best = results.get_best_result()
    with best.checkpoint.as_directory() as folder:
        learned = Checkpoint(folder).to_dict()["model"]
    print(f"best lr {best.config['train_loop_config']['lr']}")
    print(f"learned y = {learned['weight'].item():.2f} x {learned['bias'].item():+.2f}")


if __name__ == "__main__":
    main()
