"""Checkpoints that several workers write, and checkpoints in an object store.

    disk   `save(sharded=True)` of weights that 1, 2 and 4 workers share (FSDP). Compared with what as many processes reach that write equal
           parts with `torch.save` and an `fsync` at the same time, and read them again.
    S3     `save` and `load` of one worker with an S3 server on this machine (moto). Compared with fsspec's `pipe` and `cat` of as many
           bytes in the same worker. The server is one Python process, so its own speed is what is measured.

`save_ratio` and `load_ratio` are GB/s over that; `peak_mb` is by how much rank 0 grew at most in a turn.

    python examples/benchmarks/saving_elsewhere.py
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import cluster
from report import claim_stdout, emit, spread
from saving import clear, grown_mb
from weights import Weights

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions

COLUMNS = ("where", "workers", "contender", "save_s", "save_ratio", "load_s", "load_ratio", "peak_mb", "note")
OWN, DISK_BASE, S3_BASE = "raysgd", "torch.save and fsync, in parts", "fsspec"
ADDRESS = re.compile(r"http://[0-9.:]+")
Figures = dict[str, float]


class Holder(TrainingOperator):
    """Holds the weights; never trains."""

    def setup(self, config):
        model = Weights(config["mb"])
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
        mine = config["mb"] * 250_000 // self.world_size
        self.part = torch.randn(mine)


def written(folder: str, holder: Holder) -> Figures:
    """Write this rank's part by hand, and read it again."""
    path, began = Path(folder) / f"{holder.world_rank}.pt", time.perf_counter()
    with path.open("wb") as file:
        torch.save(holder.part, file)
        file.flush()
        os.fsync(file.fileno())
    saved = time.perf_counter()
    torch.load(path, weights_only=True)
    return {"save_s": saved - began, "load_s": time.perf_counter() - saved}


def piped(uri: str, holder: Holder) -> Figures:
    """Send as many bytes to the store by hand, and get them again."""
    import fsspec

    store, path = fsspec.url_to_fs(f"{uri}/by-hand")
    content = holder.part.numpy().tobytes()
    began = time.perf_counter()
    store.pipe_file(path, content)
    saved = time.perf_counter()
    assert len(store.cat_file(path)) == len(content)
    return {"save_s": saved - began, "load_s": time.perf_counter() - saved}


def by_hand(trainer: TorchTrainer, do: Callable[[Holder], Figures]) -> Figures:
    """What the slowest rank took."""
    found = trainer.apply_all_operators(do)
    return {name: max(each[name] for each in found) for name in found[0]}


def by_trainer(trainer: TorchTrainer, target: str, *, sharded: bool) -> Figures:
    before = trainer.apply_all_operators(lambda holder: grown_mb(0.0))[0]
    began = time.perf_counter()
    trainer.save(target, sharded=sharded)
    saved = time.perf_counter()
    trainer.load(target, trusted=sharded)
    took = {"save_s": saved - began, "load_s": time.perf_counter() - saved}
    return took | {"peak_mb": trainer.apply_all_operators(lambda holder: grown_mb(before))[0]}


def measure(where: str, mb: int, workers: int, rounds: int, target: str) -> list[dict[str, Any]]:
    disk = where == "disk"
    options = TrainingOptions(parallel="fsdp") if disk and workers > 1 else None
    with TorchTrainer(
        training_operator_cls=Holder, num_workers=workers, use_ray=True, config={"mb": mb}, options=options
    ) as trainer:
        base = DISK_BASE if disk else S3_BASE
        own_target = f"{target}/own" if disk else f"{target}/own.pt"
        turns: dict[str, Callable[[], Figures]] = {
            base: partial(by_hand, trainer, partial(written if disk else piped, target)),
            OWN: partial(by_trainer, trainer, own_target, sharded=disk),
        }
        found: dict[str, list[Figures]] = {name: [] for name in turns}
        for number in range(rounds + 1):  # the first one is not counted
            for name in list(turns) if number % 2 else list(turns)[::-1]:
                if disk:
                    clear(Path(target))
                figures = turns[name]()
                if number > 0:
                    found[name].append(figures)
                print(f"{where}, {workers} worker(s), {name}: {figures}", file=sys.stderr)
    return [row(where, workers, name, each, found[base]) for name, each in found.items()]


def row(where: str, workers: int, name: str, own: list[Figures], base: list[Figures]) -> dict[str, Any]:
    result: dict[str, Any] = {"where": where, "workers": workers, "contender": name, "note": ""}
    for what in ("save", "load"):
        key = f"{what}_s"
        result[key] = spread([each[key] for each in own])
        result[f"{what}_ratio"] = spread([b[key] / o[key] for o, b in zip(own, base, strict=True)], 3)
    if "peak_mb" in own[0]:
        result["peak_mb"] = spread([each["peak_mb"] for each in own], 0)
    return result


def with_s3(mb: int, rounds: int) -> list[dict[str, Any]]:
    missing = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
    if missing:
        return [{"where": "S3", "workers": 1, "contender": OWN, "note": f"not installed: {', '.join(missing)}"}]
    import s3fs

    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        address = next(found[0] for line in server.stderr if (found := ADDRESS.search(line)))
        own = {"AWS_ACCESS_KEY_ID": "anybody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(own, AWS_ENDPOINT_URL=address)
        s3fs.S3FileSystem().mkdir("saving")
        with cluster(2):
            return measure("S3", mb, 1, rounds, "s3://saving")
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=512, help="MB of weights on the disk")
    parser.add_argument("--s3-mb", type=int, default=128, help="MB of weights in the store")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a few MB, one round")
    args = parser.parse_args()
    out = claim_stdout()
    if args.smoke:
        args.mb, args.s3_mb, args.workers, args.rounds = 16, 4, [1, 2], 1

    rows = []
    with cluster(max(args.workers)):
        for workers in args.workers:
            with tempfile.TemporaryDirectory(prefix="saving-", ignore_cleanup_errors=True) as folder:
                rows += measure("disk", args.mb, workers, args.rounds, folder)
    rows += with_s3(args.s3_mb, args.rounds)
    emit(out, "saving_elsewhere", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
