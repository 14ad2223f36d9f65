"""The best checkpoints of a run: every epoch is saved, and the two with the lowest validation loss stay.

The learning rate is too high on purpose, so that the last epoch is not the best one. `--storage` takes a directory or a
URI, such as s3://bucket/runs (extra: s3).

    python examples/function_best_checkpoints.py --num-workers 2
"""

import argparse
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, TorchTrainer


def points(size, seed):
    """Noisy points on y = 2 x - 3, with a few that are far off."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 1, generator=generator)
    y = 2 * x - 3 + 0.1 * torch.randn(size, 1, generator=generator)
    return TensorDataset(x, torch.where(torch.rand(size, 1, generator=generator) < 0.05, y + 10, y))


def train_func(config):
    torch.manual_seed(0)
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    loader = train.torch.prepare_data_loader(DataLoader(points(256, seed=1), batch_size=16, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    inputs, targets = points(200, seed=2)[:]
    for epoch in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            val_loss = torch.nn.functional.l1_loss(model(inputs), targets).item()
        bare = model.module if train.world_size() > 1 else model
        saved = Checkpoint.from_dict({"epoch": epoch, "val_loss": val_loss, "model": bare.state_dict()})
        train.report({"epoch": epoch, "val_loss": val_loss}, checkpoint=saved)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--storage", default=tempfile.mkdtemp(prefix="raysgd-"))
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    two_best = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"lr": 0.3, "epochs": 6 if args.smoke else 20},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=args.storage, checkpoint_config=two_best),
    )
    result = trainer.fit()
    for row in result.history:
        print(f"epoch {row['epoch']}  val_loss {row['val_loss']:.4f}")
    for checkpoint, metrics in result.best_checkpoints:
        print(f"kept {checkpoint.path} of epoch {metrics['epoch']}")
    best = result.get_best_checkpoint("val_loss", "min").to_dict()
    weight, bias = best["model"]["weight"].item(), best["model"]["bias"].item()
    print(f"the best one learned y = {weight:.2f} x {bias:+.2f}")


if __name__ == "__main__":
    main()
