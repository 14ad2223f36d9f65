"""A process that is killed while it saves leaves a draft, which a later save of that name removes; no other draft is touched."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torch.small import Line, inline

# Stops in the middle of writing its checkpoint.
SAVER = """
import sys, time
from tests.torch.small import Line, inline

class Stuck:
    def __reduce__(self):
        print("SAVING", flush=True)
        time.sleep(600)

class Saver(Line):
    def state_dict(self):
        return {"stuck": Stuck()}

inline(Saver).save(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell which of their drafts are abandoned")
def test_an_abandoned_draft_is_removed_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for name in ("b.pt", "a.pt.old"):
        (tmp_path / f".{name}.tmp").touch()
    mine = {".a.pt.tmp", ".a.pt.mine.0123abcd.tmp"}  # named like drafts, but not created by a process of this system
    for name in mine:
        (tmp_path / name).touch()
    others = {each.name for each in tmp_path.iterdir()}
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert saver.stdout is not None and saver.stdout.readline() == "SAVING\n"
        (draft,) = {each.name for each in tmp_path.iterdir()} - others
        with inline(Line) as trainer:
            for each in tmp_path.iterdir():
                _age(each)
            trainer.save(path)
            assert (tmp_path / draft).exists(), "its process is alive"
            saver.kill()
            saver.wait()
            os.utime(tmp_path / draft)
            trainer.save(path)
            assert (tmp_path / draft).exists(), "it was written to just now"
            _age(tmp_path / draft)
            trainer.save(path)
            assert not (tmp_path / draft).exists()
            trainer.load(path)
    finally:
        saver.kill()
        saver.wait()
    assert {each.name for each in tmp_path.iterdir()} == {*others, "a.pt"}


def _age(path: Path) -> None:
    before = time.time() - 7200
    os.utime(path, (before, before))
