"""Checkpoints of functions: conversions between their forms, storage, and reading without running code."""

import collections
import gc
import io
import os
import pickle
import random
import re
import tarfile
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pytest

from raysgd.errors import CheckpointError, ConfigError
from raysgd.train import Checkpoint
from raysgd.train import checkpoint as checkpoints
from raysgd.train.run.job import pack_checkpoint
from raysgd.workers.serialization import pickler_class
from tests import storing
from tests.storage.damage import Touches, flipped, zipped
from tests.storage.function_cases import same


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"123")
    return source


def test_dict_round_trip() -> None:
    checkpoint = Checkpoint.from_bytes(Checkpoint.from_dict({"epoch": 3}).to_bytes())
    assert checkpoint.to_dict() == {"epoch": 3}
    assert checkpoint.get_internal_representation() == ("data_dict", {"epoch": 3})
    assert checkpoint.path is None


def test_a_checkpoint_of_another_class_and_its_uri(directory: Path) -> None:
    class Own(Checkpoint):
        pass

    made = Own.from_checkpoint(Checkpoint.from_bytes(Checkpoint.from_directory(directory).to_bytes()))
    with made.as_directory() as folder:
        assert type(made) is Own and (Path(folder) / "weights.bin").read_bytes() == b"123"
    assert Checkpoint.from_directory(directory).uri == f"file://{directory}"
    assert Checkpoint("memory://bucket/run").uri == "memory://bucket/run"
    assert Own.from_checkpoint(Checkpoint.from_dict({"epoch": 3})).to_dict() == {"epoch": 3}
    assert Checkpoint.from_dict({}).uri is None


def test_metadata_round_trip(directory: Path) -> None:
    for checkpoint in (Checkpoint.from_dict({"epoch": 1}), Checkpoint.from_directory(directory)):
        checkpoint.set_metadata({"model": "small"})
        checkpoint.update_metadata({"version": 2})
        arrived = Checkpoint.from_bytes(checkpoint.to_bytes())
        assert arrived.get_metadata() == {"model": "small", "version": 2}


def test_metadata_must_be_plain() -> None:
    with pytest.raises(TypeError, match="JSON"):
        Checkpoint.from_dict({}).set_metadata({"model": object()})


def test_errors_say_which_call_to_use(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="as_directory"):
        Checkpoint.from_directory(directory).to_dict()
    with pytest.raises(CheckpointError, match="no directory"):
        Checkpoint.from_directory(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        Checkpoint(tmp_path / "absent").to_dict()
    with pytest.raises(ConfigError, match="takes a dict"):
        Checkpoint.from_dict([1])  # type: ignore[arg-type]


def test_an_archive_that_points_outside_is_refused() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("../outside")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(CheckpointError, match=r"\.\./outside"):
        Checkpoint.from_bytes(stream.getvalue())


def test_a_dictionary_can_be_written_to_a_folder(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_dict({"epoch": 3})
    for form in (checkpoint, Checkpoint(checkpoint.to_uri(tmp_path / "file"))):
        path = form.to_directory()
        assert Checkpoint.from_directory(path).to_dict() == {"epoch": 3}
        with form.as_directory() as inside:
            assert Checkpoint.from_directory(inside).to_dict() == {"epoch": 3}
        assert not Path(inside).exists(), "the copy for reading is deleted"


# -- URIs ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = uuid.uuid4().hex
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{name}"
    pytest.importorskip("fsspec")
    return {"path": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{name}"}[request.param]


def test_dict_round_trip_through_a_uri(root: str) -> None:
    checkpoint = Checkpoint.from_dict({"epoch": 3, "weights": [0.5]})
    checkpoint.set_metadata({"model": "small"})
    uri = checkpoint.to_uri(f"{root}/deep/saved")
    assert uri == f"{root}/deep/saved"
    there = Checkpoint.from_uri(uri)
    assert there.to_dict()["weights"] == [0.5]
    assert there.get_metadata() == {"model": "small"}
    assert there.to_bytes() == checkpoint.to_bytes()
    assert there.path is not None and there.path.endswith("deep/saved")
    assert there.get_internal_representation() == ("uri" if "3:" in uri or "mem" in uri else "local_path", there.path)
    with pytest.raises(CheckpointError, match="gives a copy"):
        there.set_metadata({})


def test_folder_round_trip_through_a_uri(root: str, directory: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_directory(directory)
    checkpoint.set_metadata({"model": "small"})
    there = Checkpoint.from_uri(checkpoint.to_uri(f"{root}/folder"))
    assert there.get_metadata() == {"model": "small"}
    with there.as_directory() as path:
        assert (Path(path) / "weights.bin").read_bytes() == b"123"
    assert (Path(there.to_directory(tmp_path / "copy")) / "weights.bin").read_bytes() == b"123"
    with Checkpoint.from_bytes(there.to_bytes()).as_directory() as path:
        assert (Path(path) / "weights.bin").read_bytes() == b"123"
    again = Checkpoint.from_uri(there.to_uri(f"{root}/copied"))
    assert again.get_metadata() == {"model": "small"}
    with pytest.raises(CheckpointError, match="as_directory"):
        again.to_dict()


def test_a_missing_checkpoint(root: str) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint at {re.escape(root)}/absent"):
        Checkpoint.from_uri(f"{root}/absent")


# -- trust --------------------------------------------------------------------------------------------


class Custom:
    """A type that needs trust."""


def test_plain_values_need_no_trust(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from raysgd.torch.group import function_backend as torch_function

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": torch_function.to_cpu(torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]).state_dict()),
        "types": [torch.float16, torch.device("cpu"), torch.Size([1])],
        "random": [torch.get_rng_state(), random.getstate()],
        "standard": [
            {1, 2},
            (3,),
            b"4",
            5j,
            None,
            True,
            collections.OrderedDict(a=1),
            {(1, 2): "a"},
            {},
            1 << 200,
            "\ud800",
        ],
    }
    for pickler in (pickle.Pickler, pickler_class()):
        (tmp_path / "saved").write_bytes(Checkpoint.from_dict(content).to_bytes(pickler=pickler))
        found = Checkpoint(tmp_path / "saved").to_dict()
        assert same(found, content) and found["model"]._metadata == content["model"]._metadata
        assert found["schedule"]["milestones"] == {1: 2, 3: 1}


def test_a_dictionary_without_torch_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "find_spec", lambda name: None)
        path = Checkpoint.from_dict({"epoch": 3, "own": Custom()}).to_uri(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"saved: it holds a pickle, as raysgd stores.*trusted=True"):
        Checkpoint(path).to_dict()
    found = Checkpoint(path, trusted=True).to_dict()
    assert found["epoch"] == 3 and type(found["own"]) is Custom
    data = (tmp_path / "saved").read_bytes()
    (tmp_path / "saved").write_bytes(flipped(data, 8 * data.index(b"epoch")))
    with pytest.raises(CheckpointError, match=r"saved: .*damaged"):
        Checkpoint(path, trusted=True).to_dict()


OWN: dict[str, Any] = {"own": Custom(), "decimal": Decimal("1.5"), "array": numpy.arange(3), "path": Path("a")}


@pytest.mark.parametrize("name", OWN)
def test_objects_of_other_types_need_trust(tmp_path: Path, name: str) -> None:
    """The error names them."""
    path = tmp_path / "saved"
    path.write_bytes(Checkpoint.from_dict({"epoch": 1, "inner": [2, OWN[name]]}).to_bytes())
    for read in (Checkpoint(path).to_dict, lambda: Checkpoint.from_bytes(path.read_bytes())):
        with pytest.raises(CheckpointError, match=rf"it holds .*{type(OWN[name]).__name__}.*trusted=True"):
            read()
    for found in (Checkpoint(path, trusted=True), Checkpoint.from_bytes(path.read_bytes(), trusted=True)):
        value = found.to_dict()["inner"][1]
        assert type(value) is type(OWN[name]) and (name == "own" or numpy.array_equal(value, OWN[name]))


def test_a_dictionary_of_ray_train_needs_trust(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "checkpoint_000001"
    path.write_bytes(pickle.dumps({"epoch": 3}))
    with pytest.raises(CheckpointError, match=r"checkpoint_000001: it holds a pickle, as Ray Train 1\.x.*trusted=True"):
        Checkpoint(path).to_dict()
    assert Checkpoint(path, trusted=True).to_dict() == {"epoch": 3}
    assert caplog.messages == []
    newer = Checkpoint(path, trusted=True).to_uri(tmp_path / "newer")
    assert Checkpoint(newer).to_dict() == {"epoch": 3}


STORED = Checkpoint.from_dict({"epoch": 1, "bytes": b"1"}).to_bytes()
BOMBS: dict[str, Callable[[Touches], bytes]] = {
    "an object": lambda bomb: Checkpoint.from_dict({"epoch": 1, "bomb": bomb}).to_bytes(),
    "by cloudpickle": lambda bomb: Checkpoint.from_dict({"bomb": bomb}).to_bytes(pickler=pickler_class()),
    "a pickle": lambda bomb: pickle.dumps({"epoch": 1, "bomb": bomb}),
    "in protocol 0": lambda bomb: pickle.dumps({"epoch": 1, "bomb": bomb}, protocol=0),
    "alone": pickle.dumps,
    "without torch": lambda bomb: zipped({checkpoints.PICKLED: pickle.dumps({"epoch": 1, "bomb": bomb})}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_reading_runs_no_code_from_the_file(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    data = BOMBS[name](Touches(trace))
    (tmp_path / "saved").write_bytes(data)
    with storing.new_folder(tmp_path / "folder") as draft:
        (draft / ".raysgd-dictionary.pt").write_bytes(data)
    tries: list[Callable[[], Any]] = [
        Checkpoint(tmp_path / "saved").to_dict,
        Checkpoint.from_directory(tmp_path / "folder").to_dict,
        Checkpoint(tmp_path / "saved").get_metadata,
        lambda: Checkpoint.from_bytes(data),
        lambda: pack_checkpoint(tmp_path / "saved"),
        lambda: pack_checkpoint(str(tmp_path / "folder")),
    ]
    for tried in tries:
        with pytest.raises(CheckpointError):
            tried()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Touches(trace)))
    assert trace.exists(), "plain pickle runs the code"


FOREIGN = {
    "text": b"hello",
    "empty": b"",
    "a zip file": b"PK\x03\x04" + b"0" * 100,
    "an incomplete dictionary": STORED[:-200],
    "a list": checkpoints.dump_dictionary([1, 2], pickle.Pickler),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_and_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "given").write_bytes(FOREIGN[name])
    tries: list[Callable[[], Any]] = [
        Checkpoint(tmp_path / "given").to_dict,
        Checkpoint(tmp_path / "given", trusted=True).to_dict,
        lambda: pack_checkpoint(tmp_path / "given"),
    ]
    for tried in tries:
        with pytest.raises(CheckpointError, match=r"given: .*(damaged|is a dictionary)") as caught:
            tried()
        assert "trusted" not in str(caught.value), "trust would not help here"
    with pytest.raises(CheckpointError, match=r"not a checkpoint|is a dictionary"):
        Checkpoint.from_bytes(FOREIGN[name])


def test_unpacked_files_are_deleted_with_the_object(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    unpacked = Checkpoint.from_bytes(Checkpoint.from_directory(tmp_path).to_bytes())
    folder = Path(str(unpacked.path))
    with unpacked.as_directory() as same:
        assert Path(same, "notes").read_text() == "mine"
    del unpacked
    gc.collect()
    assert not folder.exists() and (tmp_path / "notes").exists()


def test_other_files_are_not_deleted(root: str, directory: Path) -> None:
    storing.write(f"{root}/models/notes", b"another file")
    checkpoint = Checkpoint.from_directory(directory)
    for taken in ("models", "models/notes"):
        with pytest.raises(CheckpointError, match=f"something else at .*{taken} already"):
            checkpoint.to_uri(f"{root}/{taken}")
    assert storing.read(f"{root}/models/notes") == b"another file"


def test_replacing_a_checkpoint_deletes_only_its_own_files(directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    uri = f"memory://{uuid.uuid4().hex}/models"
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "gone").write_bytes(b"1")
    Checkpoint.from_directory(tmp_path / "older").to_uri(uri)
    storing.write(f"{uri}/notes", b"another file")
    there = Checkpoint.from_directory(directory).to_uri(uri)
    assert storing.names(uri) == sorted(["notes", *(path.name for path in directory.iterdir())])
    with Checkpoint(there).as_directory() as folder:
        assert not Path(folder, "notes").exists() and Path(folder, "weights.bin").read_bytes() == b"123"


def test_hard_links_become_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"123")
    for name in ("hard", "hard too"):
        os.link(tmp_path / "weights.bin", tmp_path / "folder" / name)
    with Checkpoint.from_bytes(Checkpoint.from_directory(tmp_path / "folder").to_bytes()).as_directory() as there:
        assert {path.name: path.read_bytes() for path in Path(there).iterdir()} == dict.fromkeys(
            ("hard", "hard too"), b"123"
        )
