"""WebDataset's tar files through a ShardedStream: every sample used once in an epoch although a worker dies.

python examples/webdataset_files.py --num-workers 2

In a WebDataset, the files of one sample are next to each other in a tar file, and have the same name before the first dot. Only
Python's tarfile is needed to read it.
"""

import argparse
import io
import json
import os
import signal
import tarfile
import tempfile
from itertools import groupby
from pathlib import Path

import numpy
import torch
from torch import nn

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import ShardedStream


class Curve(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.05), criterion=nn.MSELoss()
        )
        paths = sorted(Path(config["folder"]).glob("*.tar"))
        stream = ShardedStream(lambda shard: samples_in(paths[shard]), len(paths), batch_size=10, shuffle=50)
        self.register_data(train_loader=stream)

    def train_batch(self, batch, batch_info):
        if self.global_step == self.config["lose_at"] and self.world_rank == 1:
            lose_a_worker(self.config["folder"])
        return super().train_batch(batch, batch_info)


def samples_in(path):
    """Yield the samples of a tar file, as its files come."""
    with tarfile.open(path) as file:
        named = ((entry.name.partition("."), file.extractfile(entry).read()) for entry in file if entry.isfile())
        for _, parts in groupby(named, key=lambda each: each[0][0]):
            content = {kind: data for (_, _, kind), data in parts}
            yield (
                torch.from_numpy(numpy.load(io.BytesIO(content["npy"]))),
                torch.tensor([json.loads(content["json"])["y"]]),
            )


def write_files(folder, rows, files):
    """Write a small WebDataset whose files have different lengths."""
    bounds = [rows * number * number // (files * files) for number in range(files + 1)]
    for number in range(files):
        with tarfile.open(Path(folder, f"points-{number:03}.tar"), "w") as file:
            for row in range(bounds[number], bounds[number + 1]):
                x = row / rows
                array = io.BytesIO()
                numpy.save(array, numpy.array([x, x**2], dtype=numpy.float32))
                label = json.dumps({"y": 3.0 * x**2 - 2.0 * x + 1.0}).encode()
                for kind, data in (("npy", array.getvalue()), ("json", label)):
                    entry = tarfile.TarInfo(f"{row:06}.{kind}")
                    entry.size = len(data)
                    file.addfile(entry, io.BytesIO(data))


def lose_a_worker(marks):
    """Once only: the file says whether it has happened."""
    mark = Path(marks, "lost")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="a quick run with little data")
    args = parser.parse_args()
    rows, epochs = (400, 6) if args.smoke else (4000, args.epochs)

    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, rows, files=7)
        config = {"folder": folder, "lose_at": rows // 40}
        with TorchTrainer(training_operator_cls=Curve, num_workers=args.num_workers, config=config) as trainer:
            for epoch in range(1, epochs + 1):
                result = trainer.train()
                print(f"epoch {epoch}: train_loss {result['train_loss']:.5f}, samples {result['num_samples']}")
            for recovery in trainer.recoveries:
                print(f"{recovery.reason}: {recovery.world_size_before} -> {recovery.world_size_after} workers")


if __name__ == "__main__":
    main()
