"""A script for Ray Train 1.x: a function trains a line, and the driver follows it. Only its imports have changed."""

import argparse
import json
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd.train as train
from raysgd.train.backends.torch import TorchConfig
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.callbacks.logging import JsonLoggerCallback
from raysgd.train.checkpoint import CheckpointStrategy
from raysgd.train.torch import prepare_data_loader, prepare_model
from raysgd.train.trainer import Trainer


def validation_loss(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


def train_func(config):
    x = torch.linspace(-1, 1, 800).unsqueeze(1)
    data = TensorDataset(x, 2 * x + 5)
    train_loader = prepare_data_loader(DataLoader(data, batch_size=config["batch_size"], shuffle=True))
    val_loader = prepare_data_loader(DataLoader(data, batch_size=config["batch_size"]))
    model = nn.Linear(1, 1)
    start = 0
    checkpoint = train.load_checkpoint()
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        start = checkpoint["epoch"] + 1
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(start, config["epochs"]):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = validation_loss(model, val_loader)
        bare = model.module if hasattr(model, "module") else model
        train.save_checkpoint(epoch=epoch, loss=loss, model=bare.state_dict())
        train.report(epoch=epoch, loss=loss, rank=train.world_rank())
    return start


class Printing(TrainingCallback):
    def start_training(self, logdir, **info):
        print("starting")

    def handle_result(self, results, **info):
        print("epoch", results[0]["epoch"], "ranks", [result["rank"] for result in results])

    def finish_training(self, error=False, **info):
        print("finished, error:", error)


def train_linear(num_workers):
    trainer = Trainer(TorchConfig(backend="gloo"), num_workers=num_workers, logdir=tempfile.mkdtemp())
    config = {"lr": 0.1, "batch_size": 8, "epochs": 3}
    best = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    trainer.start()
    trainer.run(train_func, config, callbacks=[Printing(), JsonLoggerCallback()], checkpoint_strategy=best)
    rounds = json.loads((trainer.latest_run_dir / "results.json").read_text())
    print("rounds in results.json:", len(rounds))
    print("best", trainer.load_checkpoint_from_path(trainer.best_checkpoint_path)["epoch"])

    # The first run's checkpoint is continued, and this time the driver fetches the rounds itself.
    config["epochs"] = 5
    iterator = trainer.run_iterator(train_func, config, checkpoint=trainer.latest_checkpoint)
    for results in iterator:
        print("epoch", results[0]["epoch"], "loss", round(results[0]["loss"], 4))
    print("started at", set(iterator.get_final_results()))
    model = trainer.latest_checkpoint["model"]
    print(f"trained weight: {model['weight'].item():.2f}, bias: {model['bias'].item():.2f}")
    trainer.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "-n", type=int, default=1)
    args = parser.parse_args()
    train_linear(args.num_workers)
