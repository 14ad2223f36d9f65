"""What clients without the token can take from the driver: memory while they are not admitted, and its descriptors.

The driver is a process of its own, so that its memory can be seen, and its limit of open files can be lowered."""

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
from tests.files.tally import megabytes_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc and netlink")

ROOT = Path(__file__).resolve().parents[2]
FLOODS = ["silent-300", "push-300", "huge-length", "huge-body", "nested-json", "drip"]


def run(background: Background) -> dict[str, Any]:
    folder = background.folder()
    done = background.run("-m", "tests.attacks.test_limits", str(folder), connected=True, folder=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**said, "log": done.stderr}


@pytest.mark.script(run=run)
def test_memory_and_descriptors(outcome: Callable[[], dict[str, Any]]) -> None:
    said = outcome()
    assert said["control"] > 20, f"64 MiB were seen as {said['control']} MiB"
    assert said["tried"] > 600 and said["pushed_mib"] > 8
    assert said["grown"] < 48, f"the driver held {said['grown']:.0f} MiB more under attack"
    assert said["failures"] == ["worker death"], "only the worker that was killed has failed"
    assert said["world_size"] == 2
    assert "cannot accept connections of workers ([Errno 24] Too many open files)" in said["log"]


def main(folder: Path) -> None:
    import ray

    ray.init(log_to_driver=False)
    note_ports(str(folder))
    ground = Ground(folder / "marks", num_workers=2, config={"samples": 80, "pace": 0.02})
    ground.trainer.train()
    ground.assert_epoch_exact()
    said: dict[str, Any] = {"control": megabytes_of(lambda: b"1" * (64 << 20))}
    storm = Storm(folder, FLOODS, host=ray.util.get_node_ip_address())

    def attacked() -> None:
        with storm:
            for _ in range(3):
                ground.trainer.train()
                ground.assert_epoch_exact()

    said["grown"] = megabytes_of(attacked)
    said |= {"tried": storm.report.tried, "pushed_mib": storm.report.pushed >> 20}
    without_descriptors(folder, ground)
    said["failures"] = [each.reason for each in ground.trainer.recoveries if each.reason not in ("growth", "shrink")]
    said["world_size"] = ground.trainer.world_size
    ground.trainer.shutdown()
    print(json.dumps(said))


def without_descriptors(folder: Path, ground: Ground) -> None:
    """Clients take every descriptor that the driver may open; training continues, and later a replacement is accepted."""
    theirs = set(json.loads((folder / str(os.getpid())).read_text(encoding="ascii")))
    ports = [(each.host, each.port) for each in listening([os.getpid()]) if each.inode not in theirs]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < used:  # no lower one stays free
        held.append(os.open(os.devnull, os.O_RDONLY))
    # They are another process's, whose limit is its own.
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
