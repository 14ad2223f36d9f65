"""env and tests: what this machine is, and the tests that need a GPU."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from importlib import metadata

import torch

import raysgd
from tools.gpu import common
from tools.gpu.notes import ROOT, Notes, report

QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def environment(notes: Notes) -> None:
    machine = report().machine()
    machine["versions"] = {"raysgd": raysgd.__version__, "ray": version("ray"), "torch": torch.__version__}
    if common.gpus():
        machine["gpu"] = f"{common.gpus()} x {torch.cuda.get_device_name()}"
        machine["versions"] |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "CUDA": torch.version.cuda}
        said = subprocess.run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"], capture_output=True, check=False)
        notes.add("nvidia-smi", said.stdout.decode(), detail=True)
        free, total = torch.cuda.mem_get_info()
        notes.add("memory of a GPU", round(total / 2**30, 1), "GiB", f"{free / 2**30:.1f} free")
    notes.add("machine", machine.get("gpu", "no GPU"), note=f"torch {torch.__version__}", machine=machine)
    shared = os.statvfs("/dev/shm")
    limits = {
        "cores": len(os.sched_getaffinity(0)),
        "GiB of /dev/shm": round(shared.f_blocks * shared.f_frsize / 2**30, 1),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    notes.add("limits", ", ".join(f"{value} {name}" for name, value in limits.items()), detail=True)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def tests(notes: Notes) -> None:
    """Run the tests that need a GPU. Only their files are collected: others need packages that may be missing."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [str(path) for path in files if re.search(r"pytest\.mark\.gpu", path.read_text(encoding="utf-8"))]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=notes.left(), check=False)
    print(ended.stdout, ended.stderr)
    last = (ended.stdout.strip() or ended.stderr.strip() or "nothing").splitlines()[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, flags=re.MULTILINE)
    notes.add("pytest -m gpu", last.strip("= "), note=", ".join(failed))
