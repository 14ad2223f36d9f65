"""How it grows with the model: parameters of 10 MB, 100 MB and 1 GB, with SGD, which has no state, and with Adam, which has twice as
much.

For each size, the loop that people write by hand trains under torchrun, then raysgd does, with a snapshot at the end of each
third of that time. Then one of its workers is killed, and replaced; the state is saved, loaded and handed out. What each of
that moves is moved by hand in the same processes, too. At last, one worker of Ray Train v2 is killed, whose function reports a
checkpoint after a few steps.

    step_s       of raysgd, the mean over all, snapshots included
    step_ratio   that, over the hand-written loop's
    pause_s      the longest time between two steps, less a usual one: a snapshot of the state. copy_s is one copy of it
    kill_s       the longest time between two steps around a kill, in which a step was repeated. Of it, kill_still_s is what raysgd
                 reports, without the step
    growth_s     how long the other workers stand still when the new one joins, as raysgd reports it; beside that, broadcast_s:
                 the same state in one broadcast to the same workers, and wrap_s: DistributedDataParallel(model)
    train_v2_s   from the kill to the next step, with Ray Train v2
    save_ratio, load_ratio, get_model_ratio   over torch.save, over torch.load and a copy to the model, over one copy of the model
    *_mb         by how much the driver, the new worker and another one grew at most until the state was there

    python examples/benchmarks/sizes.py --sizes 10 100 1000
"""

import argparse
import copy
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import traces
from contenders import cluster
from processes import HERE, PEERS, Peer, child
from report import claim_stdout, emit, spread
from saving import grown_mb
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from weights import Rows, Weights, optimizer_for

from raysgd import TorchTrainer, TrainingOperator

COLUMNS = (
    "mb",
    "optimizer",
    "workers",
    "step_s",
    "step_ratio",
    "pause_s",
    "copy_s",
    "kill_s",
    "kill_still_s",
    "train_v2_s",
    "growth_s",
    "broadcast_s",
    "wrap_s",
    "save_ratio",
    "load_ratio",
    "get_model_ratio",
    "driver_mb",
    "joiner_mb",
    "giver_mb",
)
BATCH_SIZE, SAMPLES = 4, 400_000
LIMIT_S = 600.0
ROUNDS = 3
REPLACED_S = 15.0  # in which a worker is usually replaced


class Sized(TrainingOperator):
    """The default loop, which notes when it stepped. What it does by hand it times itself."""

    def setup(self, config):
        model = Weights(config["mb"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer_for(model, config["optimizer"]), criterion=nn.CrossEntropyLoss()
        )
        self.register_data(train_loader=DataLoader(Rows(SAMPLES), batch_size=BATCH_SIZE))
        self.trace = traces.StepTrace(config["trace"])
        self.size_mb, self.grown_mb = grown_mb(0.0), 0.0

    def on_step(self, batch_info):
        self.trace.step(self.world_rank, 0)
        self.size_mb = grown_mb(0.0)

    def resized(self, old_size, new_size):
        """The state is here."""
        self.grown_mb = grown_mb(self.size_mb)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters, and what the optimizer keeps for them."""
        kept = [each for state in self.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        return [each.detach() for each in [*self.model.parameters(), *kept]]

    def by_hand(self) -> dict[str, float]:
        """A broadcast of the state, a copy of it to memory that exists, and the model wrapped: the seconds on this rank."""
        state = self.tensors()
        return {
            "broadcast_s": timed(lambda: [dist.broadcast(each, 0) for each in state]),
            "copy_s": self._copy_s() * sum(each.nbytes for each in state) / (self.config["mb"] * 1e6),
            "wrap_s": timed(lambda: DistributedDataParallel(unwrapped(self.model), gradient_as_bucket_view=True)),
        }

    def _copy_s(self) -> float:
        """Of the parameters, because there may be no room for a second state."""
        parameters = [each.detach() for each in self.model.parameters()]
        room = [each.clone() for each in parameters]
        return timed(lambda: [to.copy_(each) for to, each in zip(room, parameters, strict=True)])

    def save_by_hand(self, path: str) -> float:
        state = {"model": unwrapped(self.model).state_dict(), "optimizer": self.optimizer.state_dict()}
        return timed(lambda: torch.save(state, path) if self.world_rank == 0 else None)

    def load_by_hand(self, path: str) -> float:
        """Read on each rank, and copy to tensors that exist, as `load_state_dict` does. The file is mapped, because there may be no
        room for a second state on each rank."""

        def load() -> None:
            read = torch.load(path, weights_only=True, mmap=True)
            kept = [each for state in read["optimizer"]["state"].values() for each in state.values()]
            for mine, saved in zip(self.tensors(), [*read["model"].values(), *kept], strict=True):
                mine.copy_(saved)

        return timed(load)


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def timed(do: Callable[[], Any]) -> float:
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    result = do()
    took = time.perf_counter() - started
    del result
    return took


class Case:
    """One model, optimizer and number of workers, and the folder for their notes."""

    def __init__(self, mb: int, optimizer: str, workers: int, seconds: float, folder: Path) -> None:
        self.mb, self.optimizer, self.workers, self.seconds, self.folder = mb, optimizer, workers, seconds, folder

    @contextmanager
    def peer(self, peer: Peer, name: str, **extra: str) -> Iterator[Callable[[int], list[traces.Step]]]:
        """A peer's script, running. What it yields waits for so many steps of rank 0 in an epoch, and returns all steps."""
        trace = self.folder / name
        trace.mkdir()
        settings = {
            "WORKERS": str(self.workers),
            "BATCH_SIZE": str(BATCH_SIZE),
            "SAMPLES": str(SAMPLES),
            "STEP_S": "0",
            "TRACE": str(trace),
            "MB": str(self.mb),
            "OPTIMIZER": self.optimizer,
            "PYTHONPATH": str(HERE / "kill_one"),
            **extra,
        }
        command = peer.command(HERE / "kill_one" / peer.script, self.workers)
        with child(command, settings) as process:

            def wait(count: int, epoch: int = 0, rank: int = 0) -> list[traces.Step]:
                runs = lambda: process.poll() is None  # noqa: E731
                traces.wait_for_steps(trace, rank=rank, epoch=epoch, count=count, limit_s=LIMIT_S, runs=runs)
                return traces.read(trace)

            yield wait

    def hand_written_step_s(self) -> float:
        with self.peer(PEERS["torchrun"], "hand") as wait:
            steps = wait(3)
            usual = usual_s(steps)
            return mean_s(wait(3 + max(int(self.seconds / usual), 5)))

    def kill_of_ray_train_s(self, steps: int) -> float | None:
        """From a kill in the second epoch, after so many steps, to the next step of anyone."""
        peer = PEERS["Ray Train v2"]
        if peer.missing():
            return None
        samples = str(steps * BATCH_SIZE * self.workers)
        with self.peer(peer, "ray train", SAMPLES=samples, EPOCHS="3") as wait:
            victim = next(each for each in reversed(wait(1, 1, 1)) if each.rank == 1)
            killed_at = time.monotonic()
            os.kill(victim.process, signal.SIGKILL)
            while not (after := [each for each in traces.read(self.folder / "ray train") if each.at > killed_at + 1.0]):
                if time.monotonic() > killed_at + LIMIT_S:
                    raise TimeoutError("Ray Train v2 did not continue")
                time.sleep(0.05)
            return after[0].at - killed_at


def usual_s(steps: list[traces.Step]) -> float:
    return statistics.median(after.at - before.at for before, after in pairwise(of_first(steps)))


def mean_s(steps: list[traces.Step]) -> float:
    own = of_first(steps)[1:]  # the first ones fill the allocator's memory
    return (own[-1].at - own[0].at) / (len(own) - 1)


def of_first(steps: list[traces.Step]) -> list[traces.Step]:
    return [each for each in steps if each.rank == 0]


def measure(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"mb": case.mb, "optimizer": case.optimizer, "workers": case.workers}
    hand_s = case.hand_written_step_s()
    trace = case.folder / "raysgd"
    trace.mkdir()
    config = {"mb": case.mb, "optimizer": case.optimizer, "trace": str(trace)}
    with TorchTrainer(training_operator_cls=Sized, num_workers=case.workers, use_ray=True, config=config) as trainer:
        trainer.train(num_steps=3)
        skipped = len(of_first(traces.read(trace)))
        each = max(int(case.seconds / 3 / hand_s), 2)
        for _ in range(3):
            trainer.train(num_steps=each)
        steps = of_first(traces.read(trace))[skipped - 1 :]
        usual = usual_s(steps)
        row["step_s"] = mean_s(steps)
        row["step_ratio"] = row["step_s"] / hand_s
        row["pause_s"] = traces.longest_gap(steps) - usual
        row |= kill(trainer, trace, usual)
        rounds = [trainer.apply_all_operators(lambda operator: operator.by_hand()) for _ in range(ROUNDS)]
        for name in rounds[0][0]:
            row[name] = spread([max(rank[name] for rank in ranks) for ranks in rounds])
        row |= calls(trainer, case.folder)
    try:
        row["train_v2_s"] = case.kill_of_ray_train_s(steps=4)
    except (RuntimeError, TimeoutError) as error:
        row["note"] = f"Ray Train v2 failed: {error}"
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def kill(trainer: TorchTrainer, trace: Path, usual: float) -> dict[str, Any]:
    """Kill rank 1 in the middle of a call, in which it is replaced."""
    victim, known = trainer.apply_all_workers(os.getpid)[1], len(of_first(traces.read(trace)))
    killed: list[float] = []
    driver: list[float] = []

    def strike() -> None:
        while len(of_first(traces.read(trace))) < known + 2:
            time.sleep(0.01)
        time.sleep(usual / 2)
        before = grown_mb(0.0)
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)
        while len(trainer.recoveries) < 2:
            time.sleep(0.05)
        driver.append(grown_mb(before))

    thread = threading.Thread(target=strike)
    thread.start()
    trainer.train(num_steps=3 + max(int(REPLACED_S / usual), 3))
    while thread.is_alive():
        trainer.train(num_steps=2)
    *others, joiner = trainer.apply_all_operators(lambda operator: operator.grown_mb)
    steps = of_first(traces.read(trace))
    after = next(number for number, each in enumerate(steps) if each.at > killed[0])
    lost, growth = trainer.recoveries
    return {
        "kill_s": traces.longest_gap(steps[after - 1 : after + 2]),
        "kill_still_s": lost.seconds,
        "growth_s": growth.seconds,
        "driver_mb": driver[0],
        "joiner_mb": joiner,
        "giver_mb": max(others),
    }


def calls(trainer: TorchTrainer, folder: Path) -> dict[str, Any]:
    """`save`, `load` and `get_model`, each in turn with the same by hand."""
    ours, hands = str(folder / "raysgd.pt"), str(folder / "hand.pt")
    ratios: dict[str, list[float]] = {"save_ratio": [], "load_ratio": [], "get_model_ratio": []}
    for number in range(ROUNDS + 1):
        took = timed(lambda: trainer.save(ours))
        found = {"save_ratio": took / trainer.apply_all_operators(lambda operator: operator.save_by_hand(hands))[0]}
        took = timed(lambda: trainer.load(ours))
        found["load_ratio"] = took / max(trainer.apply_all_operators(lambda operator: operator.load_by_hand(hands)))
        started = time.perf_counter()
        model = trainer.get_model()
        took = time.perf_counter() - started
        found["get_model_ratio"] = took / timed(lambda model=model: copy.deepcopy(model))
        for name, ratio in found.items() if number else ():  # the first round maps memory
            ratios[name].append(ratio)
    return {name: spread(values, 2) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[10, 100, 1000], help="MB of parameters")
    parser.add_argument("--optimizers", nargs="+", choices=["SGD", "Adam"], default=["SGD", "Adam"])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps, of raysgd and of the hand-written loop")
    parser.add_argument("--smoke", action="store_true", help="10 MB, SGD, two workers, a few steps")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.sizes, args.optimizers, args.workers, args.seconds = [10], ["SGD"], [2], 1.0

    rows: list[dict[str, Any]] = []
    for mb in args.sizes:
        for optimizer in args.optimizers:
            for workers in args.workers:
                with cluster(workers), tempfile.TemporaryDirectory(prefix="sizes-") as folder:
                    try:
                        rows.append(measure(Case(mb, optimizer, workers, args.seconds, Path(folder))))
                    except ray.exceptions.OutOfMemoryError:
                        note = "this machine has too little memory"
                        rows.append({"mb": mb, "optimizer": optimizer, "workers": workers, "note": note})
                print(rows[-1], file=sys.stderr)
    emit(out, "sizes", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
