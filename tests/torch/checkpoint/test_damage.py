"""Files of TorchTrainer that were put together from parts, or have no checksums. `test_every_place.py` flips bits and truncates."""

import logging
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.torch import TorchTrainer
from tests import storing
from tests.storage.damage import flipped, members, zipped
from tests.torch.checkpoint.cases import Bench, rich, seed_all, stored, weights


def test_a_flipped_bit_in_any_part_is_detected(here: Bench) -> None:
    with zipfile.ZipFile(here.folder / "good.pt") as archive:
        parts = [each for each in archive.infolist() if each.file_size]
    for part in parts:
        lengths = struct.unpack_from(
            "<2H", here.good, part.header_offset + 26
        )  # of the name and the extra field of its header
        middle = part.header_offset + 30 + sum(lengths) + part.file_size // 2
        assert "does not have the checksum" in here.refuses(flipped(here.good, 8 * middle))


def test_compressed_parts_are_detected(here: Bench) -> None:
    """The archive is well-formed, and what is in it has its checksum."""
    mine = members(here.good)
    assert "is compressed" in here.try_file(zipped(mine, zipfile.ZIP_DEFLATED))
    assert here.try_file(zipped(mine)) == "identical"


def loaded_with(trainer: TorchTrainer, path: Path, caplog: pytest.LogCaptureFixture, **given: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "raysgd"):
        trainer.load(path, **given)
    return [record.getMessage() for record in caplog.records]


def test_a_file_without_checksums_loads(here: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """RaySGD wrote torch's old format, which has none; and `set_crc32_options(False)` makes torch write none."""
    old, new = here.folder / "old.pt", here.folder / "good.pt"
    v1 = {"epoch": 7, "operator": here.after[0]["operator"]}
    v1 |= {name: here.after[0][name] for name in ("models", "optimizers", "schedulers")}
    for content in (here.after[0], v1):
        for zipped_format in (True, False):
            torch.serialization.set_crc32_options(False)
            torch.save(content, old, _use_new_zipfile_serialization=zipped_format)
            torch.serialization.set_crc32_options(True)
            assert loaded_with(here.trainer, old, caplog) == []
            assert torch.equal(weights(here.trainer), torch.cat([t.flatten() for t in tensors(content)]))
            here.back()
    assert loaded_with(here.trainer, new, caplog) == []
    assert loaded_with(here.trainer, new, caplog, trusted=True) == []
    old.write_bytes(stored(here.after[0]))
    assert loaded_with(here.trainer, old, caplog) == [], "torch.save writes checksums"
    here.back()


def tensors(content: Any) -> list[torch.Tensor]:
    return [
        value
        for model in content["models"]
        for name, value in model.items()
        if name.rpartition(".")[2] in ("weight", "bias")
    ]


def test_other_programs_can_read_a_file(here: Bench) -> None:
    path = here.folder / "good.pt"
    assert torch.load(path, weights_only=True)["epoch"] == here.after[0]["epoch"]
    assert torch.load(path, weights_only=True, mmap=True)["global_step"] == here.after[0]["global_step"]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_link_is_followed_to_a_file(here: Bench) -> None:
    (here.folder / "gone").symlink_to(here.folder / "nowhere")
    (here.folder / "linked.pt").symlink_to(here.folder / "good.pt")
    for name in ("gone", "none"):
        assert "there is no checkpoint" in here.try_path(here.folder / name)
    assert here.try_path(here.folder / "linked.pt") == "identical"


@pytest.mark.parametrize("blocking", [True, False])
def test_every_save_has_checksums(tmp_path: Path, blocking: bool) -> None:
    """Also if the user has turned them off for their own files, which stays so."""
    seed_all(1)
    with rich() as trainer:
        torch.serialization.set_crc32_options(False)
        try:
            trainer.train(num_steps=1)
            saved = trainer.save(tmp_path / "x.pt", blocking=blocking)
            if not blocking:
                saved.result(60)
            assert not torch.serialization.get_crc32_options()
        finally:
            torch.serialization.set_crc32_options(True)
    with open(tmp_path / "x.pt", "rb") as file:
        assert storing.has_checksums(file)
