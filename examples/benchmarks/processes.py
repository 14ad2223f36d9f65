"""Whole programs as children of a benchmark: each in a session of its own, ended with all it started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["HERE", "child", "command_for", "search_path"]

HERE = Path(__file__).resolve().parent
PATIENCE_S = 15
HOROVODRUN = "from horovod.runner.launch import run_commandline; run_commandline()"


def command_for(script: Path, *, torchrun: tuple[str, ...] = (), horovodrun: tuple[str, ...] = ()) -> list[str]:
    """How to run a script: plainly, or by torchrun or horovodrun with these options."""
    plain = [sys.executable, str(script)]
    if torchrun:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *torchrun, str(script)]
    if horovodrun:
        return [sys.executable, "-c", HOROVODRUN, "--gloo", *horovodrun, *plain]
    return plain


def search_path(more: str = "") -> str:
    """PYTHONPATH for whoever must find the benchmarks' modules and raysgd."""
    return os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), more, os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def child(command: list[str], extra: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The running child; stdout is a pipe. At the end, one that still runs is asked to end, because torchrun's ranks are
    in sessions of their own, and only torchrun ends them. Then whatever is left of its session is killed."""
    path = search_path(extra.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra, "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if not os.environ.get("BENCHMARK_DEBUG") else None,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
