"""Tracebacks show the user's frames, with the lines of a notebook's cells; a setting shows those of raysgd."""

import linecache
import traceback
from pathlib import Path
from typing import Any

import pytest

import raysgd
from raysgd.train import Trainer
from raysgd.workers.tracebacks import readable
from tests.torch.small import Line, inline

OURS = Path(raysgd.__file__).parent / "workers" / "replica_host.py"
CELL = "/tmp/ipykernel_7/123.py"
REMOTE = f"""Traceback (most recent call last):
  File "{OURS}", line 63, in perform
    value = self._method(verb)
            ^^^^^^^^^^^^^^^^^^
  File "/elsewhere/site-packages/raysgd/replica/replica_base.py", line 99, in train
    result = operator.train_epoch()
  File "{CELL}", line 2, in train_batch
  File "/home/me/helper.py", line 5, in halve
    return 1 / 0
           ~~^~~
ZeroDivisionError: division by zero"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know the source of a cell, as a notebook's kernel does."""
    monkeypatch.setitem(linecache.cache, CELL, (30, None, ["def train_batch(self):\n", "    halve(3)\n"], CELL))


@pytest.mark.usefixtures("cell")
def test_a_workers_traceback_shows_the_users_lines_only() -> None:
    assert readable(REMOTE).splitlines() == [
        "Traceback (most recent call last):",
        "  [2 frames of raysgd; the environment variable RAYSGD_FULL_TRACEBACKS=1 shows them]",
        f'  File "{CELL}", line 2, in train_batch',
        "    halve(3)",
        '  File "/home/me/helper.py", line 5, in halve',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]


def test_the_setting_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_FULL_TRACEBACKS", "1")
    assert readable(REMOTE) == REMOTE


def test_an_error_inside_raysgd_is_shown_as_it_is() -> None:
    text = "\n".join([*REMOTE.splitlines()[:4], "AssertionError"])
    assert readable(text) == text


def test_the_traceback_of_a_function_in_a_cell(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def train_func():\n    numbers = {}\n    return numbers['missing']\n"
    monkeypatch.setitem(linecache.cache, CELL, (len(source), None, source.splitlines(keepends=True), CELL))
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, CELL, "exec"), cell)
    with Trainer("torch", num_workers=1) as trainer, pytest.raises(KeyError, match="missing") as caught:
        trainer.run(cell["train_func"])
    remote = str(caught.value.__cause__).splitlines()
    at = remote.index(f'  File "{CELL}", line 3, in train_func')
    assert remote[at + 1] == "    return numbers['missing']"
    assert "frames of raysgd; the environment variable" in remote[at - 1]
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    ours = str(OURS.parent.parent)
    assert files[0] == __file__ and sum(file.startswith(ours) for file in files) <= 1, files


class Raises(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("mine")


class RaisesAtOnce(Line):
    def setup(self, config: dict[str, Any]) -> None:
        raise LookupError("mine")


def files_of(operator: type[Line]) -> list[str]:
    with pytest.raises(LookupError) as caught, inline(operator) as trainer:
        trainer.train()
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


@pytest.mark.parametrize(("operator", "most"), [(Raises, 1), (RaisesAtOnce, 3)])
def test_the_scripts_own_traceback_is_short(operator: type[Line], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = str(OURS.parent.parent)
    files = files_of(operator)
    assert files[0] == files[-1] == __file__, "the frames of the user come first and last"
    assert sum(file.startswith(ours) for file in files) <= most
    monkeypatch.setenv("RAYSGD_FULL_TRACEBACKS", "1")
    assert sum(file.startswith(ours) for file in files_of(operator)) > 5
