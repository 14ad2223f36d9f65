"""Every user can create files and folders in the temporary folder, also with the names that raysgd uses there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from raysgd import TrainingOperator
from raysgd.storage.durable import private_folder, private_place
from tests.torch.small import inline
from tests.torch.test_creators import loader, model, optimizer

REFUSED = "must be a folder of this user that no other user can open"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of all users."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_lock_that_somebody_else_prepared_changes_no_file(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("important")
    (shared / f"raysgd-data-{os.getuid()}.lock").symlink_to(victim)
    for _ in range(2):  # the second time, the folder exists
        with inline(TrainingOperator.from_creators(model, optimizer, loader, nn.MSELoss)) as trainer:
            assert trainer.train()["num_samples"] > 0
    assert victim.read_text() == "important"


PLANTED: dict[str, Callable[[Path], None]] = {
    "a file": Path.touch,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a folder": lambda path: path.symlink_to("."),
    "a folder that others can read": lambda path: (path.mkdir(), path.chmod(0o755))[0],
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_somebody_else_prepared_is_refused(shared: Path, kind: str) -> None:
    place = private_place("data")
    PLANTED[kind](place)
    with pytest.raises(PermissionError, match=f"{place} {REFUSED}"):
        private_folder(place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(shared: Path) -> None:
    place = private_folder(private_place("data"))
    os.chown(place, 12345, 12345)
    with pytest.raises(PermissionError, match=r"is not \(user 12345, mode 700\)"):
        private_folder(place)
