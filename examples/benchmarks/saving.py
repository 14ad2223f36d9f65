"""Checkpoints: how fast they are written and read, and how long training waits for one.

One worker holds weights of a given size. In turn, and round by round, the worker writes them with plain
`torch.save`, once more with an `fsync` behind it, and copies them in memory; the trainer saves, blocking and not;
and Lightning and Accelerate save theirs. Before every turn the files of the last one are removed, and the system's own
writing to the disk is brought to an end (`sync`).

    rate_ratio   GB/s over plain torch.save's, which leaves the file to the system's cache
    synced_ratio GB/s over torch.save's with an fsync, which leaves the file on the disk, as raysgd's save does
    pause_s      how long a call keeps the script from training on
    pause_ratio  that, over the time of one copy of the weights in memory
    load_ratio   GB/s of `load` over plain torch.load's into the same model; both read from the system's cache
    peak_mb      by how much the worker's memory grew at most in the turn (its driver's: driver_peak_mb)

    python examples/benchmarks/saving.py --sizes 10 100 1000 2000
"""

import argparse
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from contenders import cluster
from gate import Program
from processes import PEERS
from report import claim_stdout, emit, spread
from weights import Weights

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator

BASE = "torch.save"
SAVING = ("Lightning", "Accelerate")
COLUMNS = (
    "mb",
    "contender",
    "save_s",
    "save_gb_s",
    "rate_ratio",
    "synced_ratio",
    "pause_s",
    "pause_ratio",
    "load_s",
    "load_gb_s",
    "load_ratio",
    "peak_mb",
    "driver_peak_mb",
    "note",
)
Seconds = dict[str, dict[str, list[float]]]


class Holder(TrainingOperator):
    """Holds the weights; never trains. What it does by hand it times itself, so that no call is in it."""

    def setup(self, config):
        model = Weights(config["mb"])
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def plain_save(self, path: str, *, sync: bool) -> float:
        started = time.perf_counter()
        with open(path, "wb") as file:
            torch.save({"model": self.model.state_dict()}, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - started

    def plain_load(self, path: str) -> float:
        started = time.perf_counter()
        self.model.load_state_dict(torch.load(path, weights_only=True)["model"])
        return time.perf_counter() - started

    def asynchronous(self, folder: str) -> tuple[float, float]:
        """DCP's save in the background: the seconds until it returned, and until the checkpoint was there."""
        started = time.perf_counter()
        saved: Any = dcp.async_save({"model": self.model.state_dict()}, checkpoint_id=folder, no_dist=True)
        returned = time.perf_counter()
        saved.result()
        return returned - started, time.perf_counter() - started

    def copy(self) -> float:
        started = time.perf_counter()
        copied = [piece.detach().clone() for piece in self.model.parameters()]
        took = time.perf_counter() - started
        del copied
        return took


class Desk:
    """A trainer and a folder; each method is one contender's turn, and says what it took."""

    def __init__(self, trainer: TorchTrainer, folder: str) -> None:
        self.trainer, self.folder = trainer, Path(folder)

    def _by_hand(self, do: Callable[[Holder], float]) -> float:
        return float(self.trainer.apply_all_operators(do)[0])

    def plain(self) -> dict[str, float]:
        path = str(self.folder / "plain.pt")
        save_s = self._by_hand(lambda holder: holder.plain_save(path, sync=False))
        return {"save_s": save_s, "load_s": self._by_hand(lambda holder: holder.plain_load(path))}

    def plain_on_disk(self) -> dict[str, float]:
        path = str(self.folder / "synced.pt")
        return {"save_s": self._by_hand(lambda holder: holder.plain_save(path, sync=True))}

    def asynchronous(self) -> dict[str, float]:
        folder = str(self.folder / "dcp")
        pause_s, save_s = self.trainer.apply_all_operators(lambda holder: holder.asynchronous(folder))[0]
        return {"pause_s": pause_s, "save_s": save_s}

    def copy(self) -> dict[str, float]:
        return {"pause_s": self._by_hand(lambda holder: holder.copy())}

    def blocking(self) -> dict[str, float]:
        path = self.folder / "raysgd.pt"
        started = time.perf_counter()
        self.trainer.save(path)
        took = time.perf_counter() - started
        saved = time.perf_counter()
        self.trainer.load(path)
        return {"save_s": took, "pause_s": took, "load_s": time.perf_counter() - saved}

    def in_background(self) -> dict[str, float]:
        started = time.perf_counter()
        handle = self.trainer.save(self.folder / "background.pt", blocking=False)
        returned = time.perf_counter()
        handle.result(timeout=600)
        return {"save_s": time.perf_counter() - started, "pause_s": returned - started}


class PeersDesk:
    """A program of a peer's with one rank that saves in one turn, and loads in the next."""

    def __init__(self, name: str, mb: int, folder: str) -> None:
        extra = {"MB": str(mb), "FOLDER": folder}
        self.program = Program.of(PEERS[name], extra, 1, script=f"saving_{PEERS[name].script}")

    def turn(self) -> dict[str, float]:
        started = time.perf_counter()
        self.program.epoch()
        saved = time.perf_counter()
        self.program.epoch()
        return {"save_s": saved - started, "pause_s": saved - started, "load_s": time.perf_counter() - saved}


def measure(mb: int, rounds: int, folder: str) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="saving-", dir=folder, ignore_cleanup_errors=True) as own,
        contextlib.ExitStack() as peers,
        TorchTrainer(
            training_operator_cls=Holder,
            num_workers=1,
            use_ray=True,
            config={"mb": mb},
            elastic=ElasticConfig(snapshot_every=None),  # the one after a load would be sent in the next turn's time
        ) as trainer,
    ):
        desk = Desk(trainer, own)
        turns: dict[str, Callable[[], dict[str, float]]] = {
            BASE: desk.plain,
            "torch.save and fsync": desk.plain_on_disk,
            "one copy in memory": desk.copy,
            "raysgd": desk.blocking,
            "raysgd, blocking=False": desk.in_background,
            "DCP async_save": desk.asynchronous,
        }
        for name in SAVING:
            if not PEERS[name].missing():
                peer = PeersDesk(name, mb, own)
                peers.callback(peer.program.stop)
                turns[name] = peer.turn
        seconds: Seconds = {name: {} for name in turns}
        # The first round is not counted: programs start in it, files are opened, memory is mapped.
        for number in range(rounds + 1):
            order = list(turns) if number % 2 else list(reversed(turns))
            for name in order:
                clear(Path(own))
                for key, value in measured(turns[name], trainer).items():
                    if number > 0:
                        seconds[name].setdefault(key, []).append(value)
            print(f"{mb} MB, round {number}: {told(seconds)}", file=sys.stderr)
    return [row(mb, name, seconds) for name in turns]


def measured(turn: Callable[[], dict[str, float]], trainer: TorchTrainer) -> dict[str, float]:
    """A turn, and by how much it made the driver and the worker grow."""
    before = grown_mb(0.0), trainer.apply_all_operators(lambda holder: grown_mb(0.0))[0]
    figures = turn()
    peak_mb = trainer.apply_all_operators(lambda holder: grown_mb(before[1]))[0]
    return {**figures, "driver_peak_mb": grown_mb(before[0]), "peak_mb": peak_mb}


def grown_mb(before: float) -> float:
    """By how many MB this process's largest size since the last call exceeds `before`; then count from its present size."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    peak = next(
        int(line.split()[1]) * 1024 / 1e6 for line in status.read_text().splitlines() if line.startswith("VmHWM")
    )
    Path("/proc/self/clear_refs").write_text("5")  # the largest size is the present one from now on
    if before == 0.0:
        text = status.read_text()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line.startswith("VmRSS"))
    return peak - before


def clear(folder: Path) -> None:
    """Everybody writes new files, on a disk that is idle: what the turn before left is removed first."""
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    os.sync()


def told(seconds: Seconds) -> str:
    return ", ".join(f"{name} {next(iter(own.values()))[-1]:.2f} s" for name, own in seconds.items() if own)


def row(mb: int, name: str, seconds: Seconds) -> dict[str, Any]:
    own, plain = seconds[name], seconds[BASE]
    copies = seconds["one copy in memory"]["pause_s"]
    result: dict[str, Any] = {"mb": mb, "contender": name, "note": ""}
    for what in ("save", "load"):
        if took := own.get(f"{what}_s"):
            result[f"{what}_s"] = spread(took)
            result[f"{what}_gb_s"] = round(mb / 1000 / result[f"{what}_s"]["median"], 3)
            ratio = "rate_ratio" if what == "save" else "load_ratio"
            result[ratio] = spread([base / mine for mine, base in zip(took, plain[f"{what}_s"], strict=True)], 3)
    if took := own.get("save_s"):
        synced = seconds["torch.save and fsync"]["save_s"]
        result["synced_ratio"] = spread([base / mine for mine, base in zip(took, synced, strict=True)], 3)
    if name not in SAVING:  # whose memory is in other processes
        result |= {key: spread(own[key], 0) for key in ("peak_mb", "driver_peak_mb")}
    if paused := own.get("pause_s"):
        result["pause_s"] = spread(paused)
        result["pause_ratio"] = spread([mine / copy for mine, copy in zip(paused, copies, strict=True)], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[10, 100, 1000], help="MB of weights; needs nine times as much memory"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files go (default: the system's folder for temporary ones)")
    parser.add_argument("--smoke", action="store_true", help="10 MB, one round")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.sizes, args.rounds = [10], 1

    rows: list[dict[str, Any]] = []
    with cluster(1):
        for mb in args.sizes:
            rows += measure(mb, args.rounds, args.folder or tempfile.gettempdir())
    emit(out, "saving", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
