"""Sharded checkpoints of TorchTrainer: every file in the folder is verified before the first of them is read."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from tests import storing
from tests.storage.damage import Touches
from tests.storing import LIST
from tests.torch.checkpoint.cases import Bench
from tests.torch.checkpoint.test_contents import put

OUTLINE, INDEX = "outline.pt", ".metadata"


@pytest.fixture(scope="module")
def here(here: Bench) -> Bench:
    """The trainer, with a folder of what is in its file."""
    here.trainer.load(here.folder / "good.pt")
    here.trainer.save(here.folder / "parts", sharded=True)
    here.back()
    assert here.try_path(here.folder / "parts", trusted=True) == "identical"
    return here


def parts(folder: Path) -> Path:
    """Return the folder in a checkpoint that has its files."""
    (inner,) = [each for each in folder.iterdir() if each.is_dir()]
    return inner


def tried(here: Bench, change: Callable[[Path], Any]) -> str:
    """Return the error of loading a copy of the folder, of which this changes the files, and which is refused."""
    folder = here.folder / "tried"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(here.folder / "parts", folder)
    change(parts(folder))
    found = here.try_path(folder, trusted=True)
    assert found != "identical"
    return found


def test_the_list_has_every_file(here: Bench) -> None:
    folder = here.folder / "parts"
    listed = json.loads((folder / LIST).read_text())["files"]
    assert sorted(listed) == sorted(f"{parts(folder).name}/{path.name}" for path in parts(folder).iterdir())
    for name, known in listed.items():
        assert known == storing.entry_of(folder / name)
    assert {OUTLINE, INDEX} < {path.name for path in parts(folder).iterdir()}


def linked(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def test_links_are_refused_and_unlisted_files_are_ignored(here: Bench) -> None:
    for name in (OUTLINE, INDEX):
        assert f"{name} cannot be read" in tried(here, lambda folder, name=name: linked(folder, name))  # type: ignore[misc]
    folder = here.folder / "parts"
    (folder / "notes.txt").write_text("x")
    (parts(folder) / "__9_0.distcp").write_text("x")
    (here.folder / "latest").symlink_to(folder)
    assert here.try_path(here.folder / "latest", trusted=True) == "identical", "the folder itself may be linked"


def test_a_folder_without_its_list_is_refused(here: Bench) -> None:
    assert "which lists its files, is missing" in tried(here, lambda folder: (folder.parent / LIST).unlink())
    assert "not a complete sharded checkpoint" in here.try_path(parts(here.folder / "parts"), trusted=True)


WRONG: dict[str, Callable[[Any], Any]] = {
    "a tensor that is not there": put("models", 0, "weight")({"__tensor__": "models/9/x"}),
    "a tensor by a number": put("models", 0, "weight")({"__tensor__": 5}),
    "another tensor": put("models", 0, "weight")({"__tensor__": "models/0/bias"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_refused(here: Bench, name: str) -> None:
    def change(folder: Path) -> None:
        outline = torch.load(folder / OUTLINE, weights_only=True)
        torch.save(WRONG[name](outline), folder / OUTLINE)
        storing.list_files(folder.parent)

    tried(here, change)
    here.next_steps_are_right()


@pytest.mark.parametrize("name", [INDEX, OUTLINE, "__0_0.distcp"])
def test_nonsense_with_the_right_digest_is_refused(here: Bench, name: str) -> None:
    for content in (b"", b"nonsense", bytes(5_000), (parts(here.folder / "parts") / OUTLINE).read_bytes()):
        if name == OUTLINE and len(content) > 5_000:
            continue

        def change(folder: Path, content: bytes = content) -> None:
            (folder / name).write_bytes(content)
            storing.list_files(folder.parent)

        tried(here, change)
    here.next_steps_are_right()


def test_nothing_is_unpickled_before_all_files_are_verified(here: Bench, tmp_path: Path) -> None:
    bomb = pickle.dumps(Touches(tmp_path / "trace"))
    tried(here, lambda folder: (folder / INDEX).write_bytes(bomb))
    assert not (tmp_path / "trace").exists()
    with pytest.raises(CheckpointError, match="trusted=True"):
        here.trainer.load(here.folder / "parts")
