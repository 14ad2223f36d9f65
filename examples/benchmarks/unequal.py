"""Seconds per epoch if one of several workers is slow, with equal shares, and with shares by speed.

Computing is a sleep for each row, so that the machine's cores do not matter: rank 1 sleeps `--slower` times as long. The ideal is
the time in which all workers together could compute the rows. The weights of both must be equal, up to rounding.

    python examples/benchmarks/unequal.py
"""

import argparse
import time
from typing import Any

import torch
from contenders import cluster
from report import claim_stdout, emit, spread
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator

COLUMNS = ("shares", "epoch_s", "of_ideal", "rows_of_ranks", "difference")


class Sleeping(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        parts = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        self.model, self.optimizer, self.criterion = parts
        x = torch.randn(config["rows"], 8)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=config["batch"], shuffle=True)
        self.register_data(train_loader=loader)
        self.row_s = config["row_s"] * (config["slower"] if self.world_rank == 1 else 1)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.row_s * len(batch[0]))
        return super().train_batch(batch, batch_info)


def measure(shares: Any, args: argparse.Namespace) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the row of these shares, and the weights at the end. The first epoch, in which speeds are measured, does not count."""
    batch = args.parts * args.rows_of_part
    config = {"rows": batch * args.steps, "batch": batch // args.workers, "row_s": args.row_s, "slower": args.slower}
    ideal = config["rows"] * args.row_s / (args.workers - 1 + 1 / args.slower)
    with TorchTrainer(
        training_operator_cls=Sleeping,
        config=config,
        num_workers=args.workers,
        parts=args.parts,
        use_gpu=False,
        seed=1,
        elastic=ElasticConfig(shares=shares),
    ) as trainer:
        took = []
        for _ in range(args.epochs + 1):
            began = time.perf_counter()
            results = trainer.train(reduce_results=False)
            took.append(time.perf_counter() - began)
        weights = torch.cat([each.detach().flatten() for each in trainer.get_model().parameters()])
    of_ideal = spread([each / ideal for each in took[1:]], 3)
    ranks = " ".join(str(each["num_samples"]) for each in results)
    return {
        "shares": str(shares),
        "epoch_s": spread(took[1:], 3),
        "of_ideal": of_ideal,
        "rows_of_ranks": ranks,
    }, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rows-of-part", type=int, default=8)
    parser.add_argument("--row-s", type=float, default=0.001)
    parser.add_argument("--slower", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    out = claim_stdout()
    with cluster(args.workers):
        (equal, expected), (speed, found) = (measure(each, args) for each in ("equal", "speed"))
    speed["difference"] = float((found - expected).abs().max())
    emit(out, "unequal", vars(args), [equal, speed], COLUMNS)


if __name__ == "__main__":
    main()
