"""One trainer at a time writes to a folder, and a process that has ended is in nobody's way."""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

import pytest

from raysgd import CheckpointError, ConfigError
from raysgd.storage import claims
from raysgd.storage.claims import OWNER, FolderClaim


def test_a_claim_ends_with_its_process_although_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        with contextlib.suppress(BaseException):
            claim = FolderClaim(tmp_path)
            claim.take()
            if os.fork() == 0:
                os.write(writing, b"%d" % os.getpid())  # it has closed its copy of what is locked
            time.sleep(60)
        os._exit(0)
    fork = int(os.read(reading, 100))
    try:
        with pytest.raises(
            ConfigError, match=f"in use by the trainer of process {holder} on .*: shut that one down first"
        ):
            FolderClaim(tmp_path)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        FolderClaim(tmp_path).release()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_a_fork_does_not_release_the_claim(tmp_path: Path) -> None:
    claim = FolderClaim(tmp_path)
    child = os.fork()
    if child == 0:
        claim.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match="in use"):
        FolderClaim(tmp_path)
    claim.release()
    FolderClaim(tmp_path).release()


def test_without_locks_the_newer_claim_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")  # as on some network file systems

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    older, newer = FolderClaim(tmp_path), FolderClaim(tmp_path)
    older.take()
    older.check()
    newer.take()
    newer.check()
    with pytest.raises(CheckpointError, match=f"the trainer of process {os.getpid()} on .* uses {tmp_path}, too"):
        older.check()
    (tmp_path / OWNER).unlink()
    older.check()  # nobody else uses it


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop", "file/inner"):
        with pytest.raises(CheckpointError, match=f"{name} cannot hold checkpoints"):
            FolderClaim(tmp_path / name)
