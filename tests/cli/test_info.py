"""`raysgd info`: it says what a checkpoint contains, verifies its digests, and runs no code from it."""

import datetime
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from raysgd import AutoCheckpoint
from raysgd.cli import main
from raysgd.train import Checkpoint
from tests.torch.small import Line, inline


def info(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["info", str(path), *options])


def row(done: Result, name: str) -> str:
    """Return what is said about this name."""
    assert done.exit_code == 0, done.output
    (found,) = (
        line.strip().removeprefix(name).strip() for line in done.output.splitlines() if line.strip().startswith(name)
    )
    return found


class Noted(Line):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": 0.25, **self.config.get("more", {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with inline(Noted) as trainer:
        trainer.train()
        trainer.save(tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_the_list_of_commands_is_not_cut() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=60).output.partition("Commands:")[2].split())
    assert "..." not in text
    assert text.startswith(
        "doctor Check this machine, or all nodes of the Ray cluster that runs on it or that RAY_ADDRESS names."
    )


def test_a_torch_checkpoint(saved: Path) -> None:
    done = info(saved)
    assert row(done, "digest") == "correct" and row(done, "written by").startswith("TorchTrainer.save()")
    assert row(done, "progress") == "steps 3, epochs 1, workers 1"
    assert row(done, "model 0") == "3 numbers in 2 tensors, 12 bytes, float32"
    assert row(done, "optimizer 0").startswith("1 parameter group(s): lr=0.1, ")
    assert row(done, "operator") == "state_dict(): {best=0.25}"
    assert "(1, 2)" not in done.output and row(info(saved, "--tensors"), "weight") == "float32 (1, 2)"


def test_a_damaged_file_is_named(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    saved.write_bytes(data)
    done = info(saved)
    assert done.exit_code == 1 and "damaged" in done.output


def test_objects_of_other_types_are_named_and_not_created(tmp_path: Path) -> None:
    with inline(Noted, config={"more": {"since": datetime.date(2026, 1, 1)}}) as trainer:
        trainer.save(tmp_path / "dated.pt")
    done = info(tmp_path / "dated.pt")
    assert row(done, "digest") == "correct" and "datetime.date" in done.output
    torch.save({"models": [Harmful(tmp_path / "made")]}, tmp_path / "harmful.pt")
    assert "posix.mkdir" in info(tmp_path / "harmful.pt").output
    (tmp_path / "harmful.pkl").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    done = info(tmp_path / "harmful.pkl")
    assert done.exit_code == 1
    assert not (tmp_path / "made").exists()


def test_a_folder_of_automatic_checkpoints(tmp_path: Path) -> None:
    with inline(Noted, checkpoints=AutoCheckpoint(path=tmp_path / "runs", best="train_loss")) as trainer:
        trainer.fit(2)
    done = info(tmp_path / "runs")
    assert row(done, "loop1-epoch00002").split("  ")[1].startswith("epoch 2, step 6, score 0.")
    assert row(done, "loop1-epoch00001").split("  ")[1].startswith("epoch 1, step 3, score ")


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    with inline(Noted) as trainer:
        trainer.save(tmp_path / "shards", sharded=True)
    done = info(tmp_path / "shards")
    assert "sharded" in row(done, "folder") and row(done, "digests").startswith("correct, of ")
    next((tmp_path / "shards").glob("*.distcp")).write_bytes(b"")
    assert info(tmp_path / "shards").exit_code == 1


def test_checkpoints_of_functions(tmp_path: Path) -> None:
    Checkpoint.from_dict({"epoch": 3, "weights": torch.zeros(2, 3)}).to_uri(tmp_path / "dict.pkl")
    done = info(tmp_path / "dict.pkl")
    assert row(done, "epoch") == "3" and row(done, "weights") == "float32 (2, 3)"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "vocabulary.txt").write_text("a\nb\n", encoding="utf-8")
    Checkpoint.from_directory(tmp_path / "files").to_directory(tmp_path / "stored")
    assert row(info(tmp_path / "stored"), "vocabulary.txt") == "4 bytes"


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    for path in (tmp_path, tmp_path / "notes.txt"):
        done = info(path)
        assert done.exit_code == 1 and str(path) in done.output
