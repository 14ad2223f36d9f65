"""`save(sharded=True)` to URIs and in the background: the content, what replaces what, and what a failure leaves."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from raysgd import CheckpointError, ConfigError, TorchTrainer
from tests import storing
from tests.torch.small import inline
from tests.torch.small import weights as whole
from tests.torch.test_fsdp import same, trainer, weights


@pytest.fixture(scope="module")
def two(ray_cluster: None, s3: str) -> Iterator[TorchTrainer]:
    keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with trainer(2, 6, parallel="fsdp") as sharded:
        sharded.apply_all_workers(lambda: os.environ.update(keys))
        yield sharded


def objects(uri: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(uri)
    system.invalidate_cache()
    return sorted(str(each).partition(path)[2] for each in system.find(path))


@pytest.mark.parametrize(
    ("place", "blocking"), [("path", True), ("s3", False), pytest.param("memory", False, marks=pytest.mark.more)]
)
def test_a_save_holds_the_state_of_its_call(
    two: TorchTrainer, bucket: str, tmp_path: Path, place: str, blocking: bool
) -> None:
    places = {"s3": bucket, "memory": f"memory://{uuid.uuid4().hex}", "path": str(tmp_path)}
    uri = f"{places[place]}/parts"
    for _ in range(2):  # the second save replaces the first
        two.train()
        expected = weights(two)
        given = two.save(uri, sharded=True, blocking=blocking)
        two.train()
        assert (given if isinstance(given, str) else given.result(120)) == uri
    left = [each for each in Path(uri).rglob("*") if each.is_file()] if place == "path" else objects(uri)
    assert len(left) == 5, left  # of the first save, nothing is left
    assert not same(weights(two), expected)
    two.load(uri, trusted=True)
    assert same(weights(two), expected)
    two.train()
    later = weights(two)
    if place != "s3":  # the only worker of this process sees no S3 server
        with trainer(1, 12, {"seed": 8}) as one:
            one.load(uri, trusted=True)
            assert same(weights(one), expected)
            one.train()
            assert same(weights(one), later)


def test_damage_at_a_uri_is_an_error(two: TorchTrainer, bucket: str) -> None:
    two.save(f"{bucket}/parts", sharded=True)
    with pytest.raises(CheckpointError, match="trusted=True"):
        two.load(f"{bucket}/parts")
    before = weights(two)
    system = fsspec.filesystem("s3")
    for name in [each for each in objects(f"{bucket}/parts") if not each.endswith(storing.LIST)]:
        path = f"{bucket}/parts{name}"
        good = system.cat_file(path)
        storing.write(path, good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        with pytest.raises(CheckpointError, match=r"raysgd-folder|changed|damaged"):
            two.load(f"{bucket}/parts", trusted=True)
        storing.write(path, good)
    assert same(weights(two), before)
    two.load(f"{bucket}/parts", trusted=True)


def test_a_save_replaces_nothing_else(two: TorchTrainer, bucket: str, tmp_path: Path) -> None:
    storing.write(f"{bucket}/one.pt", b"a file")
    with storing.new_folder(f"{bucket}/folder") as folder:
        (folder / "note").write_text("a folder of another kind")
    for name in ("one.pt", "folder"):
        with pytest.raises(ConfigError, match="exists and contains something else"):
            two.save(f"{bucket}/{name}", sharded=True)
    with pytest.raises(CheckpointError, match="not a complete sharded checkpoint"):
        two.load(f"{bucket}/folder", trusted=True)
    assert objects(bucket) == ["/folder/.raysgd-folder.json", "/folder/note", "/one.pt"]


def test_a_save_that_fails_at_its_end_leaves_the_old_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(real: Any, where: Any, *given: Any) -> Any:
        raise OSError("no space left on device")

    where = tmp_path / "parts"
    with inline() as alone:
        old = whole(alone)
        alone.save(where, sharded=True)
        alone.train()
        with monkeypatch.context() as patch:
            storing.instead(patch, "write", fails)
            with pytest.raises(OSError, match="no space"):
                alone.save(where, sharded=True)
        alone.load(where, trusted=True)
        assert torch.equal(whole(alone), old)
        alone.train()
        new = whole(alone)
        with monkeypatch.context() as patch:
            storing.instead(patch, "delete", fails)
            alone.save(where, sharded=True)
        assert "which was replaced, could not be deleted: no space" in caplog.text
        alone.train()
        alone.load(where, trusted=True)
        assert torch.equal(whole(alone), new)
    assert os.listdir(tmp_path) == ["parts"]


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_a_worker_in_this_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raysgd")
    with inline() as alone:
        handle = alone.save(tmp_path / "parts", sharded=True, blocking=False)
        assert handle.result(60) == str(tmp_path / "parts")
        assert caplog.text.count("saved the checkpoint") == 1
        name = f"memory://{uuid.uuid4().hex}"
        assert alone.save(name, sharded=True) == name
        expected = whole(alone)
        alone.train()
        for place in (tmp_path / "parts", name):
            alone.load(place, trusted=True)
            assert torch.equal(whole(alone), expected)
