"""`raysgd top`: what a running trainer publishes, and files that are hostile."""

import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raysgd import train
from raysgd.callbacks import Callback, Throughput
from raysgd.callbacks.status import OFF, status_folder
from raysgd.cli import main
from raysgd.cli.top import BYTES_AT_MOST
from tests.faults import Fault, Ground
from tests.torch.small import Line, inline


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return status_folder()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write at each occasion, and not once per second."""
    monkeypatch.setattr("raysgd.callbacks.status.EVERY_S", 0.0)


def top() -> str:
    done = CliRunner().invoke(main, ["top", "--once"])
    assert done.exit_code == 0, done.output
    return done.output


def cells(output: str) -> dict[str, str]:
    """Return the cells of the only trainer, by the names of the columns."""
    header, row = output.splitlines()[:2]
    return dict(zip(header.split(), row.replace(" s", "s").split(), strict=True))


class Watching(Callback):
    """Runs `raysgd top --once` while the trainer trains, and notes the newest output of each state."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def on_progress(self, now: Any) -> None:
        if now.progress.batches > 1:
            self.seen.append(cells(top()))


# -- a running trainer --------------------------------------------------------------------------------


@pytest.mark.elastic
def test_a_trainer_whose_worker_is_killed(tmp_path: Path, ray_cluster: None, at_once: None, folder: Path) -> None:
    watching = Watching()
    callbacks = [Throughput(), watching]
    ground = Ground(tmp_path / "marks", num_workers=2, callbacks=callbacks, config={"pace": 0.02}, backend="gloo")
    with ground.trainer as trainer:
        ground.arm(Fault(1, 12))
        trainer.train()
        assert ground.fired() == 1
        before, after = watching.seen[0], watching.seen[-1]
        assert before["PID"] == str(os.getpid()) and before["TRAINER"] == "TorchTrainer(LedgerOperator)"
        assert (before["STATE"], before["WORKERS"], before["RECOVERIES"], before["EPOCH"]) == (
            "training",
            "2/2",
            "0",
            "1",
        )
        assert int(after["RECOVERIES"]) == len(trainer.recoveries) >= 1
        assert 0 < int(after["BATCH"].split("/")[0]) <= 60 and float(after["SAMPLES/S"].replace(",", "")) > 0
        assert after["COMPUTE"].endswith("%") and after["DATA"].endswith("%")
        idle = top()
        for rank, pid in enumerate(trainer.apply_all_workers(os.getpid)):
            assert f"rank {rank} is process {pid}" in idle
        assert cells(idle)["STATE"] == "idle" and "train_loss" in idle and "last recovery: " in idle
        (path,) = folder.iterdir()
        assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not folder.exists() and "no trainer" in top()


def test_it_writes_at_most_once_in_each_interval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []
    rename = Path.rename

    def noted(path: Path, target: Any) -> Path:
        written.append(time.monotonic())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    monkeypatch.setattr("raysgd.callbacks.status.EVERY_S", 3600.0)
    with inline(Line) as trainer:
        trainer.train()
        assert not written and not folder.exists()
        monkeypatch.setattr("raysgd.callbacks.status.EVERY_S", 0.3)
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            trainer.train()
        slow = sum(row["seconds"] >= 0.3 for row in trainer.history)
        assert len(trainer.history) > 10 and 1 <= len(written) <= (time.monotonic() - began) / 0.3 + 1 + slow


def test_a_training_function(at_once: None, folder: Path) -> None:
    seen = []

    class Each(Callback):
        def on_recovery(self, recovery: Any) -> None: ...

        def on_result(self, result: Any) -> None:
            seen.append(top())

    def function() -> None:
        for loss in (0.5, 0.25):
            train.report(loss=loss, num_samples=10)

    trainer = train.Trainer("torch", num_workers=1, use_gpu=False)
    trainer.start()
    pids = trainer._executor.worker_group.execute(os.getpid)
    trainer.run(function, callbacks=[Each()])
    trainer.shutdown()
    assert f"rank 0 is process {pids[0]}" in seen[-1]
    assert "Trainer(function)" in seen[-1] and "loss 0.5" in seen[-1] and "running" in seen[-1]
    assert not folder.exists()


def test_it_can_be_switched_off(at_once: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF, "0")
    with inline(Line) as trainer:
        trainer.train()
        assert not folder.exists()


@pytest.mark.parametrize("made", ["open to all", "a link", "a file"])
def test_a_folder_that_somebody_else_prepared(
    made: str, at_once: None, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    if made == "a link":
        folder.symlink_to(victim)
    elif made == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with caplog.at_level(logging.INFO, "raysgd"), inline(Line) as trainer:
        trainer.train()
    assert len([each for each in caplog.messages if "mode 700" in each]) == 1
    assert not list(victim.iterdir()) and (made == "a file" or not list(folder.iterdir()))


# -- hostile files ------------------------------------------------------------------------------------


def status(**more: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "trainer": "TorchTrainer",
        "name": "Digits",
        "state": "idle",
        "updated": time.time(),
        **more,
    }


def test_files_that_are_no_status_are_left_out(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    contents = [b"", b"[1, 2]", b"{", b"[" * 8000, b'{"pid": 1' + b" " * BYTES_AT_MOST + b"}", b"\xff\xfe", b"1" * 9000]
    for number, content in enumerate(contents):
        (folder / f"{number}.json").write_bytes(content)
    os.mkfifo(folder / "pipe.json")
    (folder / "outside").write_text(json.dumps(status(name="outside")), encoding="utf-8")
    (folder / "link.json").symlink_to(folder / "outside")
    (folder / "folder.json").mkdir()
    (folder / "good.json").write_text(json.dumps(status()), encoding="utf-8")
    assert len(top().splitlines()) == 2 and "TorchTrainer(Digits)" in top()


def test_values_of_other_types_and_control_characters(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    hostile = "\x1b]0;title\x07\x1b[2J\n\r\u202eevil" + "x" * 10_000
    bad: list[Any] = [float("nan"), float("inf"), 10**400, -(10**30), True, None, [1], {"a": {}}, hostile]
    names = ["epoch", "batch", "batches", "workers", "wanted", "samples_per_second", "recoveries", "updated", "started"]
    names += [
        "processes",
        "data_seconds",
        "compute_seconds",
        "communication_seconds",
        "waits_for",
        "last_recovery",
        "metrics",
        "state",
    ]
    for number, value in enumerate(bad):
        content = status(**{**dict.fromkeys(names, value), "metrics": {hostile: value}})
        content |= {"processes": [value, [value], [value, value, value]]} if number % 2 else {}  # also a list of it
        (folder / f"{number}.json").write_text(json.dumps(content), encoding="utf-8")
    output = top()
    assert len(output.splitlines()) >= 1 + len(bad)
    assert all(character.isprintable() for line in output.split("\n") for character in line)
    assert max(map(len, output.splitlines())) < 400


def test_the_file_of_a_process_that_was_killed_is_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "killed.json").write_text(json.dumps(status(pid=2**22 + 1)), encoding="utf-8")
    assert "no trainer" in top() and list(folder.iterdir())  # it may be in another container
    (folder / "killed.json").write_text(json.dumps(status(pid=2**22 + 1, updated=time.time() - 61)), encoding="utf-8")
    assert "no trainer" in top() and not list(folder.iterdir())
