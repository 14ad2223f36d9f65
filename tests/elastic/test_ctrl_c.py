"""Ctrl-C in the driver stops training at a batch boundary within seconds. The trainer stays usable, and nothing leaks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from raysgd.errors import CheckpointError
from tests import storing
from tests.faults import Ground, LedgerOperator, ended

pytestmark = pytest.mark.elastic

DRIVER = """
import json, os, sys, time
import ray
ray.init(sys.argv[2], log_to_driver=False)
from collections import Counter
from pathlib import Path
from raysgd.callbacks import Callback
from tests.faults import Ground

class Talks(Callback):
    said = False
    def on_progress(self, now):
        if not self.said:
            self.said = True
            print("UNDERWAY", flush=True)

ground = Ground(Path(sys.argv[1]), num_workers=2, config={"samples": 400, "pace": 0.1}, callbacks=[Talks()])
pids = ground.trainer.apply_all_workers(os.getpid)
print("PIDS", json.dumps(pids), flush=True)
try:
    ground.trainer.train()
    print("NOT INTERRUPTED", flush=True)
except KeyboardInterrupt:
    print("STOPPED", flush=True)
result = ground.trainer.train()
print("FACTS", json.dumps({"exact": ground.trained() == Counter(range(400)), "same": ground.trainer.apply_all_workers(os.getpid) == pids,
      "recoveries": len(ground.trainer.recoveries)}), flush=True)
ground.trainer.shutdown()
"""


def test_training_continues_after_ctrl_c(ray_cluster: None, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, str(script), str(tmp_path / "marks"), ray.get_runtime_context().gcs_address]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert driver.stdout is not None
    pids = _read(driver, "PIDS")
    _read(driver, "UNDERWAY")
    driver.send_signal(signal.SIGINT)
    _read(driver, "STOPPED")  # workers that did not stop in time would have been replaced, which is asserted next
    facts = _read(driver, "FACTS")
    assert facts == {"exact": True, "same": True, "recoveries": 0}
    assert driver.wait(timeout=30) == 0
    assert ended(*pids)


def _read(driver: subprocess.Popen[str], word: str) -> Any:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith(word):
            rest = line[len(word) :].strip()
            return json.loads(rest) if rest else None
    raise AssertionError(f"the driver ended without saying {word}")


def test_ctrl_c_in_a_shutdown_leaves_no_worker(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script continues, like a notebook: workers that were left would occupy their CPUs until it ends."""
    ground = Ground(tmp_path / "marks", num_workers=2)
    pids = ground.trainer.apply_all_workers(os.getpid)
    kill, calls = ray.kill, []

    def pressed(actor: object) -> None:
        calls.append(actor)
        if len(calls) == 1:
            raise KeyboardInterrupt
        kill(actor)

    monkeypatch.setattr(ray, "kill", pressed)
    with pytest.raises(KeyboardInterrupt):
        ground.trainer.shutdown()
    assert ended(*pids)
    ground.trainer.shutdown()


def test_ctrl_c_while_waiting_for_a_save_ends_the_workers(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground(tmp_path / "marks", num_workers=2, operator=SlowToSave)
    pids = ground.trainer.apply_all_workers(os.getpid)
    ground.trainer.save(tmp_path / "a.pt", blocking=False)
    with pytest.raises(KeyboardInterrupt), ground.trainer:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert ended(*pids)
    with pytest.raises(CheckpointError, match=r"the save to .*a.pt in the background failed"):
        ground.trainer.shutdown()
    assert not [path.name for path in tmp_path.iterdir() if path.name != "marks"]


def test_ctrl_c_at_the_start_of_a_save_leaves_no_file(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground(tmp_path / "marks", num_workers=2)
    before = threading.active_count()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        storing.after_a_draft_begins(patch, press)
        ground.trainer.save(tmp_path / "a.pt")
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert threading.active_count() <= before
    assert [path.name for path in tmp_path.iterdir()] == ["marks"]
    ground.trainer.save(tmp_path / "a.pt")
    ground.trainer.shutdown()


def press() -> None:
    raise KeyboardInterrupt


class Slow:
    def __deepcopy__(self, memo: object) -> "Slow":
        return self

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        time.sleep(30)
        return int, ()


class SlowToSave(LedgerOperator):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": Slow()}
