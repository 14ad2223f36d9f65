"""A script for RaySGD: its batches, its metrics and its validation are its own, and so is a hook. Only its imports have changed."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch.torch_trainer import TorchTrainer
from raysgd.torch.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES, AverageMeterCollection, override


def initialization_hook():
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


class Classifier(TrainingOperator):
    @override(TrainingOperator)
    def setup(self, config):
        torch.manual_seed(0)
        x = torch.randn(600, 4)
        y = (x.sum(dim=1) > 0).long()
        data = TensorDataset(x, y)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        self.criterion = nn.CrossEntropyLoss()
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, batch_size=config[BATCH_SIZE]),
        )
        self.batches_seen = 0

    @override(TrainingOperator)
    def train_batch(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        loss = self.criterion(output, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.batches_seen += 1
        right = (output.argmax(dim=1) == target).sum().item()
        return {"train_loss": loss.item(), "accuracy": right / target.size(0), NUM_SAMPLES: target.size(0)}

    @override(TrainingOperator)
    def validate(self, val_iterator, info):
        meters = AverageMeterCollection()
        self.model.eval()
        with torch.no_grad():
            for batch_idx, (features, target) in enumerate(val_iterator):
                batch_info = {"batch_idx": batch_idx, **info}
                metrics = self.validate_batch((features, target), batch_info)
                meters.update(metrics, n=metrics.pop(NUM_SAMPLES, 1))
        return {**meters.summary(), "note": info.get("note", "none")}

    @override(TrainingOperator)
    def state_dict(self):
        return {"batches_seen": self.batches_seen}

    @override(TrainingOperator)
    def load_state_dict(self, state_dict):
        self.batches_seen = state_dict["batches_seen"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="no difference: it is small already")
    args = parser.parse_args()

    config = {"lr": 0.01, BATCH_SIZE: 20}
    arguments = {
        "training_operator_cls": Classifier,
        "num_workers": args.num_workers,
        "initialization_hook": initialization_hook,
        "config": config,
        "use_gpu": False,
    }
    trainer = TorchTrainer(**arguments)
    for _ in range(2):
        stats = trainer.train(num_steps=10)
        print("epoch", stats["epoch"], "accuracy", round(stats["accuracy"], 3), "samples", stats["num_samples"])
    before = trainer.validate(info={"note": "hello"})
    print("note", before["note"], "val_accuracy", round(before["val_accuracy"], 3))
    state = trainer.state_dict()
    trainer.shutdown()

    trainer = TorchTrainer(**arguments)
    trainer.load_state_dict(state, blocking=True)
    after = trainer.validate()
    print("same", abs(after["val_loss"] - before["val_loss"]) < 1e-6, "note", after["note"])
    print("batches_seen", trainer.apply_all_operators(lambda operator: operator.batches_seen))
    trainer.shutdown()


if __name__ == "__main__":
    main()
