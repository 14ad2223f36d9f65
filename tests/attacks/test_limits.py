"""Limits on what clients without the key can use up: the driver's memory and its file descriptors.

The driver is a separate process, so that its memory can be measured, and its limit of open files can be lowered.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.attackers import Storm, listening, note_ports
from tests.background import Background
from tests.faults import Fault, Ground
from tests.storage.damage import megabytes_of

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc and netlink"),
]

ROOT = Path(__file__).resolve().parents[2]
FLOODS = ["silent-300", "push-300", "huge-length", "wrong-key", "drip"]


def run(background: Background) -> dict[str, Any]:
    folder = background.folder()
    done = background.run("-m", "tests.attacks.test_limits", str(folder), connected=True, folder=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**measured, "log": done.stderr}


@pytest.mark.script(run=run)
def test_memory_and_descriptors(outcome: Callable[[], dict[str, Any]]) -> None:
    measured = outcome()
    assert measured["control"] > 20, f"64 MiB were seen as {measured['control']} MiB"
    assert measured["tried"] > 600 and measured["pushed_mib"] > 8
    assert measured["grown"] < 48, f"the driver held {measured['grown']:.0f} MiB more under attack"
    assert measured["failures"] == ["worker death"], "only the worker that was killed has failed"
    assert measured["world_size"] == 2
    assert "cannot accept connections of workers ([Errno 24] Too many open files)" in measured["log"]


def main(folder: Path) -> None:
    import ray

    ray.init(log_to_driver=False)
    note_ports(str(folder))
    ground = Ground(folder / "marks", num_workers=2, config={"samples": 80, "pace": 0.02})
    ground.trainer.train()
    ground.assert_epoch_exact()
    measured: dict[str, Any] = {"control": megabytes_of(lambda: b"1" * (64 << 20))}
    storm = Storm(folder, FLOODS, host=ray.util.get_node_ip_address())

    def attacked() -> None:
        with storm:
            for _ in range(3):
                ground.trainer.train()
                ground.assert_epoch_exact()

    measured["grown"] = megabytes_of(attacked)
    measured |= {"tried": storm.report.tried, "pushed_mib": storm.report.pushed >> 20}
    without_descriptors(folder, ground)
    measured["failures"] = [
        each.reason for each in ground.trainer.recoveries if each.reason not in ("growth", "shrink")
    ]
    measured["world_size"] = ground.trainer.world_size
    ground.trainer.shutdown()
    print(json.dumps(measured))


def without_descriptors(folder: Path, ground: Ground) -> None:
    """Clients use up all descriptors of the driver. Training continues, and a replacement is accepted later."""
    theirs = set(json.loads((folder / str(os.getpid())).read_text(encoding="ascii")))
    ports = [(each.host, each.port) for each in listening([os.getpid()]) if each.inode not in theirs]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < used:  # until no lower one is free
        held.append(os.open(os.devnull, os.O_RDONLY))
    # The clients are another process, which has its own limit.
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKER, json.dumps(ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 8, hard))
    try:
        assert taker.stdin is not None and taker.stdout is not None
        taker.stdin.write("go\n")
        taker.stdin.flush()
        assert taker.stdout.readline() == "connected\n"
        time.sleep(2.0)
        ground.trainer.train()
    finally:
        taker.communicate()
        list(map(os.close, held))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ground.assert_epoch_exact()
    ground.arm(Fault(1, 3))
    ground.trainer.train()
    ground.assert_epoch_exact()
    ground.whole_again(2)


TAKER = """
import json, socket, sys
sys.stdin.readline()
held = [socket.create_connection(tuple(port)) for port in json.loads(sys.argv[1]) for _ in range(60)]
print("connected", flush=True)
sys.stdin.read()
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
