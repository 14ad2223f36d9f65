"""No code from a file runs, unless the caller trusts it."""

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from tests.storage.damage import Touches
from tests.torch.checkpoint.cases import Bench, stored


def test_no_code_from_a_file_runs(here: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    bomb = Touches(trace)
    contents = {
        "operator": stored({**here.start, "operator": bomb}),
        "models": stored({**here.start, "models": [bomb]}),
        "optimizers": stored({**here.start, "optimizers": [bomb]}),
        "whole": stored(bomb),
        "bare pickle": pickle.dumps({"models": [], "optimizers": [], "operator": bomb}),
        "old format": old_format({**here.start, "operator": bomb}),
    }
    for where, data in contents.items():
        here.refuses(data)
        assert not trace.exists(), where


def old_format(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_objects_of_allowed_classes_load(here: Bench) -> None:
    """The user has added their classes to torch's safe globals."""
    given = stored({**here.start, "operator": {**here.start["operator"], "more": collections.Counter("aab")}})
    assert here.try_file(given, gives=here.before) == "identical", "torch takes it as it is"
    own = stored({**here.start, "operator": {**here.start["operator"], "more": Plain(3)}})
    assert "pass trusted=True" in here.try_file(own)
    with torch.serialization.safe_globals([Plain]):
        assert here.try_file(own, gives=here.before) == "identical"
    assert here.try_file(own, trusted=True, gives=here.before) == "identical"


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


def test_a_link_to_another_file_does_not_show_its_content(here: Bench) -> None:
    """A link is followed. If its target is not a checkpoint, the error says so."""
    (here.folder / "secret").write_text("password")
    (here.folder / "secret.pt").symlink_to(here.folder / "secret")
    with pytest.raises(CheckpointError, match=r"secret\.pt: not a complete checkpoint") as caught:
        here.trainer.load(here.folder / "secret.pt")
    assert "password" not in str(caught.value)
