"""A process that is killed at any call of the system, while it saves over an older checkpoint, leaves the old or the new one."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import storing
from tests.storage import killed_save
from tests.tiers import lacks
from tests.torch.small import Line, inline, weights

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CHANGES = ["write", "pwrite64", "ftruncate", "fsync", "fdatasync"]
NAMES = ["mkdir", "mkdirat", "rename", "renameat", "unlink", "unlinkat", "rmdir"]
CALLS = CHANGES + NAMES


def read(kind: str, where: Path) -> str:
    """Return what was saved there, as a user reads it. Raise an error if it is damaged or mixed."""
    if kind == "file":
        data = storing.read(where)
        return found({data[:3].decode(): None}, len(data) == 3000)
    with inline(Line) as trainer:
        trainer.load(where, trusted=kind == "sharded")
        values = set(weights(trainer).tolist())
    return found({"new" if value else "old": None for value in values}, values <= {0.0, 1.0})


def found(said: dict[str, None], whole: bool) -> str:
    (one,) = said
    assert whole
    return one


@contextmanager
def traced(kind: str, where: Path, *options: str) -> Iterator[list[str]]:
    """Run a save under strace, from where it begins. Yield the calls that it makes."""
    command = [sys.executable, killed_save.__file__, kind, str(where)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as script:
        assert script.stdin is not None and script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        trace = ["strace", "-f", "-p", str(script.pid), "-e", f"trace={','.join(CALLS)}", *options]
        with subprocess.Popen(trace, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            first = strace.stderr.readline()
            if "attached" not in first:
                lacks("strace", first.strip())
            script.stdin.write("\n")
            script.stdin.flush()
            lines = strace.stderr.read().splitlines()
        script.wait(60)
    yield lines


@pytest.mark.parametrize("kind", killed_save.KINDS)
def test_a_save_that_is_killed_leaves_the_old_or_the_new_checkpoint(kind: str, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        lacks("strace", "it is not installed")
    with traced(kind, tmp_path / "calm") as lines:
        made = Counter(call for line in lines for call in CALLS if f"{call}(" in line.split("=")[0])
    assert read(kind, tmp_path / "calm") == "new" and made["rename"] + made["renameat"]
    left: Counter[str] = Counter()
    for call, count in made.items():
        for number in range(1, count + 1):
            where = tmp_path / f"{call}-{number}"
            with traced(kind, where, "-e", f"inject={call}:signal=KILL:when={number}") as lines:
                killed = any("killed by SIGKILL" in line for line in lines)
            said = read(kind, where)
            left[said] += killed
            assert killed or said == "new", f"{call} {number}"
            print(call, number, said)
    assert left["old"] and sum(left.values()) >= 0.8 * sum(made.values())
