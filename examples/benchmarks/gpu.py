"""Images and tokens per second on GPUs, against the hand-written loop, and how much of the time the GPUs idle.

ResNet-50 on images of 224 x 224, and a GPT of 124 million parameters on blocks of 1024 tokens, in fp32, fp16 and
bf16, with as many workers as there are GPUs. Contenders and ratios are those of throughput.py. A GPU's memory may
not hold all of them at once, so in each round every contender is started, warmed up, timed for two epochs and
stopped, in turn. Data are random, and lie in the processes' own memory.

    idle         the share of samples in which `nvidia-smi` saw no kernel at work, in one more epoch for each

    python examples/benchmarks/gpu.py
    python examples/benchmarks/gpu.py --smoke        on a CPU, with small stand-ins: only to see that it runs
"""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from contenders import USUAL, Contender, cluster, standing
from interleaved import Turn, one_epoch, peak_mb
from report import claim_stdout, emit
from throughput import arguments, row, warmed_up
from workloads import GPU_WORKLOADS, SMALL_GPU_WORKLOADS, Setting, Workload

COLUMNS = (
    "workload",
    "precision",
    "workers",
    "contender",
    "samples_per_s",
    "tokens_per_s",
    "ratio",
    "raysgd_ratio",
    "idle",
    "peak_mb",
)
LOOK_MS = 50
LOOK = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={LOOK_MS}")


def measure(setting: Setting, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row per contender."""
    print(f"{setting.workload.name}, {setting.precision}, {setting.workers} workers", file=sys.stderr)
    turns: dict[str, list[Turn]] = {}
    failed: dict[str, str] = {}
    more: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            for contender in standing([] if name in failed else [name], setting):
                try:
                    if not warmed_up(contender, failed):
                        continue
                    turn, more[name] = timed(contender)
                finally:
                    contender.stop()
                turns.setdefault(name, []).append(turn)
                print(f"round {number + 1}: {name} {turn.wall:.3f} s, {more[name]}", file=sys.stderr)
    return [{**row(setting, name, turns, failed), **more.get(name, {}), **device_of(setting)} for name in names]


def timed(contender: Contender) -> tuple[Turn, dict[str, Any]]:
    processes = contender.processes()
    first, second = one_epoch(contender, processes), one_epoch(contender, processes)
    turn = Turn((first.wall + second.wall) / 2, (first.busy + second.busy) / 2)
    return turn, {"idle": idle_share(contender), "peak_mb": peak_mb(processes)}


def idle_share(contender: Contender) -> float | None:
    """Of the looks at the GPUs during an epoch: the mean share of time without a kernel, as the driver has it."""
    if shutil.which(LOOK[0]) is None:
        return None
    with subprocess.Popen(LOOK, stdout=subprocess.PIPE, text=True) as looking:
        try:
            contender.epoch()
        finally:
            looking.terminate()
        seen, _ = looking.communicate()
    busy = [float(line) for line in seen.splitlines() if line.strip().isdigit()]
    return round(1 - sum(busy) / len(busy) / 100, 3) if busy else None


def device_of(setting: Setting) -> Mapping[str, Any]:
    if setting.device != "cuda":
        return {"gpu": "none: this is a smoke run"}
    return {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}


def main() -> None:
    parser = arguments([*GPU_WORKLOADS])
    parser.description = __doc__.splitlines()[0]
    # make horovod builds for CPUs; a Horovod with NCCL can be asked for by name.
    contenders = [name for name in USUAL if name != "Horovod"]
    parser.set_defaults(contenders=contenders, precisions=["fp32", "fp16", "bf16"], workers=None, rounds=3)
    args = parser.parse_args()
    out = claim_stdout()
    gpus, device = torch.cuda.device_count(), "cuda"
    workloads: list[Workload] = [GPU_WORKLOADS[name] for name in args.workloads]
    if args.smoke:
        gpus, device, args.rounds, args.precisions = 0, "cpu", 1, args.precisions[-1:]
        workloads = [SMALL_GPU_WORKLOADS[f"{name} (small)"] for name in args.workloads]
    elif not gpus:
        sys.exit("torch sees no CUDA device here. `--smoke` shows on a CPU that the script runs")
    args.workers = args.workers or [max(1, gpus)]

    rows: list[dict[str, Any]] = []
    with cluster(max(args.workers), num_gpus=gpus):
        for workload, precision, workers in itertools.product(workloads, args.precisions, args.workers):
            shortened = workload.shortened(args.steps) if args.steps else workload
            setting = Setting(shortened, workers, precision, device)
            rows += measure(setting, args.contenders, args.rounds)
    emit(out, "gpu", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
