"""Seconds per epoch if one of several workers is slow: raysgd with equal shares and with shares by speed, and the loop that people
write by hand, in turn.

    python examples/benchmarks/unequal.py

Of two workers, rank 1 has half a processor: computing is work for a processor, and rank 1 is stopped for half of the time, so each
of the two needs a processor for its own. Of four, computing is a sleep, which takes rank 1 three times as long. The ideal is the
time in which all workers together could compute the rows. In its first epoch, raysgd measures speeds, so that does not count. The
weights with both kinds of shares must be equal, up to rounding.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contenders import BenchmarkOperator, Contender, RaySGD, cluster
from handwritten import HandWritten
from interleaved import interleaved
from report import claim_stdout, emit, spread
from torch import nn
from torch.utils.data import TensorDataset
from workloads import Setting, Workload

from raysgd import ElasticConfig, TorchTrainer

COLUMNS = ("workers", "rank_1", "contender", "epoch_s", "of_ideal", "rows_of_ranks", "difference")
PERIOD_S, ROW_S, ROWS_OF_PART = 0.03, 0.001, 8
# Let a process run for a part of each period, until it has ended.
STOPPER = """
import os, signal, sys, time
pid, period, part = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while True:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(period * (1 - part))
    os.kill(pid, signal.SIGCONT)
    time.sleep(period * part)
"""


class Case(NamedTuple):
    """So many workers share so many parts of a batch. Rank 1 is slower by a factor, because it sleeps longer or is stopped."""

    workers: int
    parts: int
    slower: float
    sleeps: bool


CASES = (Case(2, 8, 2.0, sleeps=False), Case(4, 16, 3.0, sleeps=True))


class Working(nn.Module):
    """Needs a time for each row: of a processor, without that in which its process is stopped, or a sleep."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.case = nn.Linear(8, 1), case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = ROW_S * len(x)
        if self.case.sleeps:
            time.sleep(seconds * (self.case.slower if dist.get_rank() == 1 else 1.0))
        end = time.thread_time() + (0.0 if self.case.sleeps else seconds)
        while time.thread_time() < end:
            pass
        return self.linear(x)


def random_rows(count: int) -> TensorDataset:
    x = torch.randn(count, 8)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Dealing(RaySGD):
    """raysgd with shares of this kind."""

    def __init__(self, setting: Setting, parts: int, shares: Any) -> None:
        self.name = f"raysgd, shares={shares!r}"
        self.trainer = TorchTrainer(
            training_operator_cls=BenchmarkOperator,
            config={"setting": setting},
            num_workers=setting.workers,
            parts=parts,
            use_gpu=False,
            seed=1,
            elastic=ElasticConfig(shares=shares, grow=False),
        )

    def epoch(self) -> None:
        self.rows = [each["num_samples"] for each in self.trainer.train(reduce_results=False)]

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.trainer.get_model().parameters()])


@contextlib.contextmanager
def slowed(contender: Contender, case: Case) -> Iterator[None]:
    """Let its rank 1 have a part of its processor, if it does not sleep."""
    if case.sleeps:
        yield
        return
    process = contender.processes()[1]
    stopper = subprocess.Popen([sys.executable, "-c", STOPPER, str(process), str(PERIOD_S), str(1 / case.slower)])
    try:
        yield
    finally:
        stopper.terminate()
        stopper.wait()
        subprocess.run(["kill", "-CONT", str(process)], check=False)


def measure(case: Case, *, steps: int, rounds: int) -> list[dict[str, Any]]:
    batch, workers = case.parts * ROWS_OF_PART, case.workers
    ideal = steps * batch * ROW_S / (workers - 1 + 1 / case.slower)
    own: dict[str, Any] = {"criterion": nn.MSELoss(), "batch_size": batch // workers, "steps": steps}
    setting = Setting(Workload("unequal", lambda: Working(case), random_rows, **own), workers)
    rank_1 = f"{case.slower:g} times as long" if case.sleeps else f"{1 / case.slower:g} processors"
    with cluster(3 * workers), contextlib.ExitStack() as stack:
        equal, speed = (Dealing(setting, case.parts, shares) for shares in ("equal", "speed"))
        contenders: list[Any] = [HandWritten(setting), equal, speed]
        for each in contenders:
            stack.callback(each.stop)
        for each in contenders:
            stack.enter_context(slowed(each, case))
            each.epoch()
        turns = interleaved(contenders, rounds)
        rows = []
        for each in contenders:
            took = [turn.wall for turn in turns[each.name]]
            of_ideal = spread([seconds / ideal for seconds in took], 3)
            found = {"workers": workers, "rank_1": rank_1, "contender": each.name, "epoch_s": spread(took, 3)}
            shares = getattr(each, "rows", [])
            found |= {"of_ideal": of_ideal, "rows_of_ranks": " ".join(map(str, shares))}
            own = [ROW_S * count * (case.slower if rank == 1 else 1.0) for rank, count in enumerate(shares)]
            rows.append({**found, "own_s": [round(seconds, 3) for seconds in own]})
        rows[2]["difference"] = float((speed.weights() - equal.weights()).abs().max())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a few steps, only to see that it runs")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.rounds = 4, 1
    out = claim_stdout()
    rows = [row for case in CASES for row in measure(case, steps=args.steps, rounds=args.rounds)]
    emit(out, "unequal", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
