"""A backend and a trainer of one's own: a scratch directory on every node, which is gone when training ends.

The backend makes the directory before the function runs, whenever new workers are ready, and removes it at the end. The
trainer fixes the function: its workers compute the data once for each node, in that directory, and all read it.

    python examples/custom_backend.py --num-workers 2
"""

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raysgd import train
from raysgd.train import Backend, BackendConfig, DataParallelTrainer, RunConfig, ScalingConfig

VARIABLE = "SCRATCH"


def make_scratch(name):
    """On every worker: those of one node share it."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    os.environ[VARIABLE] = str(folder)


def remove_scratch():
    shutil.rmtree(os.environ.pop(VARIABLE), ignore_errors=True)


class ScratchBackend(Backend):
    def on_start(self, worker_group, backend_config):
        worker_group.execute(make_scratch, backend_config.name)

    def on_shutdown(self, worker_group, backend_config):
        worker_group.execute(remove_scratch)


@dataclass
class ScratchConfig(BackendConfig):
    name: str

    def backend_cls(self):
        return ScratchBackend


def mean_of_squares(config):
    """One worker of each node computes the squares; all wait for the file, and take the mean of their own part."""
    file = Path(os.environ[VARIABLE]) / "squares.txt"
    if train.local_rank() == 0:
        draft = file.with_suffix(".part")
        draft.write_text(" ".join(str(number**2) for number in range(config["upto"])))
        draft.rename(file)  # whole, or not there
    while not file.exists():
        pass
    mine = [int(word) for word in file.read_text().split()][train.world_rank() :: train.world_size()]
    train.report(mean=sum(mine) / len(mine), scratch=str(file.parent))
    return sum(mine)


class ScratchTrainer(DataParallelTrainer):
    def __init__(self, upto, *, name, **settings):
        super().__init__(
            mean_of_squares, train_loop_config={"upto": upto}, backend_config=ScratchConfig(name), **settings
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="fewer numbers")
    args = parser.parse_args()

    trainer = ScratchTrainer(
        1_000 if args.smoke else 100_000,
        name=f"squares-{os.getpid()}",
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    result = trainer.fit()
    scratch = Path(result.metrics["scratch"])
    print(f"{args.num_workers} workers met in {scratch}; rank 0's mean is {result.metrics['mean']:.1f}")
    print(f"sum of all squares {sum(result.return_values)}")
    print(f"scratch directories left {int(scratch.exists())}")


if __name__ == "__main__":
    main()
