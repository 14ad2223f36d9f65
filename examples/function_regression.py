"""A training function: save, load, resume. The function is plain PyTorch; `train.*` connects it to its trainer.

The first run trains three epochs and keeps its best checkpoint. The second one is started from it and trains on.

    python examples/function_regression.py --num-workers 2
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import CheckpointStrategy, Trainer


def points(size=512):
    """Noisy points on y = 2 x - 3."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 1, generator=generator)
    return TensorDataset(x, 2 * x - 3 + 0.1 * torch.randn(size, 1, generator=generator))


def train_func(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    start = 0
    checkpoint = train.load_checkpoint()
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        start = checkpoint["epoch"] + 1
    model = train.torch.prepare_model(model)
    loader = train.torch.prepare_data_loader(DataLoader(points(), batch_size=32, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(start, config["epochs"]):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        bare = model.module if train.world_size() > 1 else model
        train.save_checkpoint(epoch=epoch, loss=total / len(loader), model=bare.state_dict())
        train.report(epoch=epoch, train_loss=total / len(loader))
    bare = model.module if train.world_size() > 1 else model
    return bare.weight.item(), bare.bias.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="it is quick as it is")
    args = parser.parse_args()

    best = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    with Trainer(backend="torch", num_workers=args.num_workers) as trainer:
        for rows in trainer.run_iterator(train_func, config={"lr": 0.03, "epochs": 3}, checkpoint_strategy=best):
            print(f"epoch {rows[0]['epoch']}  train_loss {rows[0]['train_loss']:.4f}")
        print("the best checkpoint is", trainer.best_checkpoint_path)
        results = trainer.run(train_func, config={"lr": 0.03, "epochs": 6}, checkpoint=trainer.best_checkpoint_path)
        found = trainer.latest_checkpoint
    print(f"continued to epoch {found['epoch']}  train_loss {found['loss']:.4f}")
    slope, intercept = results[0]
    print(f"learned    y = {slope:.2f} x {intercept:+.2f}")


if __name__ == "__main__":
    main()
