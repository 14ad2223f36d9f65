"""Create, train, save, end a worker and shut down, again and again in one driver: `python cycles.py KIND:COUNT ...`.

After each cycle, print one JSON object with what this process and its workers hold. KIND is torch or function.
"""

import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "RAYSGD_TEST_RUN"


def torch_cycle(folder: Path, number: int) -> None:
    from raysgd import ElasticConfig
    from tests.faults import Ground

    # In every second cycle a replacement is still starting when the trainer is shut down.
    elastic = ElasticConfig(min_workers=1, grow=number % 2 == 1)
    config = {"samples": 80, "loader": {"num_workers": 1} if number % 4 == 3 else {}}
    ground = Ground(folder / f"marks-{number}", num_workers=2, config=config, elastic=elastic)
    with ground.trainer as trainer:
        trainer.train()
        saved: Any = trainer.save(folder / "checkpoint.pt", blocking=number % 2 == 0)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        trainer.train()
        if number % 2:
            saved.result(timeout=60)
    (folder / f"marks-{number}").rmdir()


def function_cycle(folder: Path, number: int) -> None:
    from raysgd import train

    mark = folder / f"mark-{number}"

    def work() -> int:
        import torch
        import torch.distributed as dist

        state = train.load_checkpoint() or {"epoch": 0}
        for epoch in range(state["epoch"], 3):
            dist.all_reduce(torch.ones(1))
            train.save_checkpoint(epoch=epoch + 1)
            train.report(epoch=epoch)
            if epoch == 1 and train.world_rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return train.world_rank()

    with train.Trainer(backend="torch", num_workers=2, logdir=str(folder / "runs")) as trainer:
        trainer.run(work)
    mark.unlink()


CYCLES: dict[str, Callable[[Path, int], None]] = {"torch": torch_cycle, "function": function_cycle}


def held(folder: Path, temporary: Path, processes: set[int]) -> dict[str, Any]:
    """Return what this process holds, and what its workers have left."""
    gc.collect()
    links = [_link(path) for path in Path("/proc/self/fd").iterdir()]
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    alive = workers()
    processes.update(alive)
    return {
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "listening": len(_listening() & {link[8:-1] for link in links if link.startswith("socket:")}),
        "threads": _number(status, "Threads"),
        "workers": len(alive),
        "actors": _live_actors(),
        "objects": _own_objects(),
        "files": sorted(path.name for path in folder.iterdir()),
        "temporary": sorted(path.name for path in temporary.iterdir() if "torchinductor_" not in path.name),
        "shared_memory": [path.name for path in Path("/dev/shm").iterdir() if processes & _numbers(path.name)],
        "rss_kb": _number(status, "VmRSS"),
    }


def workers() -> set[int]:
    """Return the processes of this run that have an actor, and their children. Ray keeps some idle ones, which do not count."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mark, name = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        if f"{MARK}={os.environ[MARK]}".encode() in mark and re.search(rb"^ray::(?!IDLE)|multiprocessing", name):
            found.add(int(folder.name))
    return found


def _live_actors() -> int:
    import ray

    return sum(actor["State"] not in ("DEAD", "3") for actor in ray._private.state.actors().values())


def _own_objects() -> dict[str, int]:
    """Return, by class, how many instances of raysgd's classes exist."""
    found: dict[str, int] = {}
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("raysgd"):
            found[kind.__name__] = found.get(kind.__name__, 0) + 1
    return found


def _listening() -> set[str]:
    """Return the inodes of all listening TCP sockets of this machine."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _number(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def _numbers(name: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", name)}


def main(*kinds: str) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="cycles-") as name:
        folder, temporary = Path(name, "files"), Path(name, "tmp")
        folder.mkdir()
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        import ray

        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        processes: set[int] = set()
        for each in kinds:
            kind, _, count = each.partition(":")
            for number in range(int(count)):
                CYCLES[kind](folder, number)
                until = time.monotonic() + 60
                while workers() and time.monotonic() < until:
                    time.sleep(0.1)
                row = {"kind": kind, "cycle": number + 1, **held(folder, temporary, processes)}
                print(json.dumps(row), flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
