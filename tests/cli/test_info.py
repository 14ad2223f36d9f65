"""`raysgd info`: it says what a checkpoint contains, verifies its digests, and runs no code from it."""

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


def info(path: Path) -> Result:
    return CliRunner().invoke(main, ["info", str(path)])


class Noted(Line):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": 0.25}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Harmful:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_trainers_checkpoint_and_a_damaged_one(tmp_path: Path) -> None:
    with inline(Noted) as trainer:
        trainer.train()
        trainer.save(tmp_path / "model.pt")
    shown = info(tmp_path / "model.pt").output
    for text in (
        "checksums            correct",
        "written by           TorchTrainer.save()",
        "model 0              weight: float32 (1, 2), bias: float32 (1,)",
        "optimizer 0          [lr: 0.1, ",
        "operator             best: 0.25",
        "epoch                1",
        "global_step          3",
    ):
        assert text in shown, shown
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(b"global_step")] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    damaged = info(tmp_path / "model.pt")
    assert damaged.exit_code == 1 and "damaged" in damaged.output


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({"models": [Harmful(tmp_path / "made")]}, tmp_path / "harmful.pt")
    assert "posix.mkdir" in info(tmp_path / "harmful.pt").output
    (tmp_path / "harmful.pkl").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
    assert info(tmp_path / "harmful.pkl").exit_code == 1
    assert not (tmp_path / "made").exists()


def test_folders(tmp_path: Path) -> None:
    automatic = AutoCheckpoint(path=tmp_path / "runs", best="train_loss")
    with inline(Noted, checkpoints=automatic) as trainer:
        trainer.fit(2)
        trainer.save(tmp_path / "shards", sharded=True)
    newest, older = info(tmp_path / "runs").output.splitlines()
    assert "epoch00002-step000000006  score 0." in newest and "epoch00001-step000000003  score " in older
    shards = info(tmp_path / "shards").output
    assert "checksums            correct" in shards and "epoch                2" in shards
    next((tmp_path / "shards").glob("*/*.distcp")).write_bytes(b"")
    assert info(tmp_path / "shards").exit_code == 1


def test_checkpoints_of_functions(tmp_path: Path) -> None:
    Checkpoint.from_dict({"epoch": 3, "weights": torch.zeros(2, 3)}).to_uri(tmp_path / "dict.pkl")
    shown = info(tmp_path / "dict.pkl").output
    assert "epoch                3\n" in shown and "weights              float32 (2, 3)\n" in shown
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "vocabulary.txt").write_text("a\nb\n", encoding="utf-8")
    Checkpoint.from_directory(tmp_path / "files").to_directory(tmp_path / "stored")
    assert "vocabulary.txt       4 bytes" in info(tmp_path / "stored").output


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    for path in (tmp_path, tmp_path / "notes.txt"):
        done = info(path)
        assert done.exit_code == 1 and str(path) in done.output


@pytest.mark.parametrize("width", [60, 200])
def test_the_list_of_commands_is_complete(width: int) -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=width).output.partition("Commands:")[2].split())
    assert "..." not in text
    for command in main.commands.values():
        assert command.short_help and f"{command.name} {command.short_help}" in text
