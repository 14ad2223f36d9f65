"""Who is measured, and programs as children of a benchmark: each in a session of its own, ended with all it started."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_S = 15
HOROVODRUN = "from horovod.runner.launch import run_commandline; run_commandline()"


@dataclass(frozen=True)
class Peer:
    """One who is measured: the script, which has this name in the folder of each benchmark that it takes part in, what starts
    it, and what must be installed for it."""

    name: str
    script: str
    launcher: str = ""
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.needs if importlib.util.find_spec(package) is None]

    def command(self, script: Path, ranks: int, *options: str) -> list[str]:
        """How to run a script: plainly, or by torchrun or horovodrun, which start it once for each rank."""
        plain = [sys.executable, str(script)]
        if self.launcher == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [*torchrun, *options, str(script)]
        if self.launcher == "horovodrun":
            return [sys.executable, "-c", HOROVODRUN, "--gloo", "-np", str(ranks), *plain]
        return plain


PEERS = {
    peer.name: peer
    for peer in (
        Peer("raysgd", "with_raysgd.py"),
        Peer("hand-written", "by_hand.py"),
        Peer("torchrun", "with_torchrun.py", "torchrun"),
        Peer("Ray Train v2", "with_ray_train.py", needs=("pandas", "pyarrow")),
        Peer("Lightning", "with_lightning.py", "torchrun", needs=("lightning",)),
        Peer("Accelerate", "with_accelerate.py", "torchrun", needs=("accelerate",)),
        Peer("Horovod", "with_horovod.py", "horovodrun", needs=("horovod",)),
    )
}


def search_path(more: str = "") -> str:
    """PYTHONPATH for processes that import the benchmarks' modules and raysgd."""
    return os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), more, os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def child(command: list[str], extra: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The running child; stdout is a pipe. At the end, one that still runs is asked to end, because torchrun's ranks are
    in sessions of their own, and only torchrun ends them. Then whatever is left of its session is killed."""
    path = search_path(extra.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have bytecode, so raysgd is to have it, too
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
