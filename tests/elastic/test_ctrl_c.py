"""Ctrl-C in the driver stops at a batch border within seconds; the trainer stays usable, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.elastic

DRIVER = """
import json, os, sys, time
import ray
ray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False)
from collections import Counter
from pathlib import Path
from tests.faults import Ground

ground = Ground(Path(sys.argv[1]), num_workers=2, config={"samples": 2000, "pace": 0.02})
pids = ground.trainer.apply_all_workers(os.getpid)
print("PIDS", json.dumps(pids), flush=True)
try:
    ground.trainer.train()
    print("NOT INTERRUPTED", flush=True)
except KeyboardInterrupt:
    print("STOPPED", flush=True)
result = ground.trainer.train()
print("FACTS", json.dumps({"exact": ground.trained() == Counter(range(2000)), "same": ground.trainer.apply_all_workers(os.getpid) == pids,
      "recoveries": len(ground.trainer.recoveries)}), flush=True)
ground.trainer.shutdown()
"""


def test_the_driver_stops_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "marks")], stdout=subprocess.PIPE, text=True, env=env
    )
    assert driver.stdout is not None
    pids = _read(driver, "PIDS")
    time.sleep(1.5)
    pressed = time.monotonic()
    driver.send_signal(signal.SIGINT)
    _read(driver, "STOPPED")
    assert time.monotonic() - pressed < 5
    facts = _read(driver, "FACTS")
    assert facts == {"exact": True, "same": True, "recoveries": 0}
    assert driver.wait(timeout=30) == 0
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(_alive(pid) for pid in pids)


def _read(driver: subprocess.Popen[str], word: str) -> object:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith(word):
            rest = line[len(word) :].strip()
            return json.loads(rest) if rest else None
    raise AssertionError(f"the driver ended without saying {word}")


def _alive(pid: int) -> bool:
    try:
        return b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except FileNotFoundError:
        return False
