"""A place at which no checkpoint can be is the same error in every call that gets it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ConfigError
from raysgd.train import Checkpoint
from tests.torch.small import Line, inline

WRONG = {
    "None": (None, "must be a path, or a URI"),
    "an empty text": ("", "must be a path, or a URI"),
    "a number": (3, "must be a path, or a URI"),
    "bytes": (b"a", "must be a path, or a URI"),
    "a store that fsspec does not know": ("foo://bucket/name", "does not support this kind of storage"),
    "a store without a name in it": ("s3://", "names no file or folder in the store"),
    "another machine": ("file://elsewhere/name", "is on the machine 'elsewhere'"),
    "a null character": ("a\0b", "cannot be a path: embedded null byte"),
    "a long name": ("a" * 300, "cannot be a path here: File name too long"),
    "a device": ("/dev/null", "is a character device"),
    "a pipe": ("pipe", "is a named pipe"),
    "a link to itself": ("loop", "cannot be a path here: Too many levels of symbolic links"),
    "below a file": ("file/name", "cannot be a path here: Not a directory"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_same_mistake_is_the_same_error(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("file").write_text("a file", encoding="utf-8")
    where, said = WRONG[mistake]
    with inline(Line) as trainer:
        calls: list[Callable[[Any], Any]] = [
            trainer.save,
            trainer.load,
            lambda where: trainer.save(where, blocking=False),
            lambda where: trainer.save(where, sharded=True),
            lambda where: trainer.load(where, trusted=True),
            Checkpoint.from_dict({"epoch": 1}).to_uri,
        ]
        texts = set()
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call(where)
            texts.add(str(caught.value))
    assert len(texts) == 1 and said in texts.pop()


def test_a_folder_that_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    """And not to need trust, which would not help."""
    (tmp_path / "notes.txt").write_text("not a part of a checkpoint")
    with inline() as trainer, pytest.raises(CheckpointError, match="not a complete sharded checkpoint"):
        trainer.load(tmp_path)
