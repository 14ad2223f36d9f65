"""A damaged file of TorchTrainer loads exactly as it was saved, or is refused with an error that names it and the cause. A
refused file changes nothing in the trainer."""

import io
import logging
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.storage import digest
from raysgd.torch import TorchTrainer
from tests.files.torch_cases import Bench, bench, complete, flipped, rich, same, seed_all, stored, weights
from tests.tiers import NIGHTLY

FLIPS = 20_000 if NIGHTLY else 2_000


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def counts(here: Bench, request: pytest.FixtureRequest) -> Iterator[None]:
    here.tally.clear()
    yield
    print("\n" + here.report(request.node.name))
    assert not here.tally["silent difference"]


def test_any_flipped_bit_is_detected(here: Bench) -> None:
    chance = random.Random(11)
    end = 8 * (digest.SEAL_BYTES + 22)
    for number in range(FLIPS):
        first = 8 * len(here.good) - end if number % 10 == 0 else 0
        here.try_file(flipped(here.good, chance.randrange(first, 8 * len(here.good))))
        if number % 500 == 0:
            here.next_steps_are_right()
    # The last byte is a newline, which is not read.
    assert here.tally["rejected"] >= here.tally["tried"] - 20
    here.next_steps_are_right()


def edges(data: bytes) -> list[int]:
    """Return the positions around the beginning and the end of each entry of the archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        headers = [entry.header_offset for entry in archive.infolist()]
        sizes = [entry.file_size for entry in archive.infolist()]
    return [*headers, *(header + 64 + size for header, size in zip(headers, sizes, strict=True)), archive.start_dir]


def test_any_truncation_is_detected(here: Bench) -> None:
    length, chance = len(here.good), random.Random(12)
    lengths = {*range(80), *range(length - digest.SEAL_BYTES - 140, length)}
    lengths |= {edge + off for edge in edges(here.good) for off in (-1, 0, 1)}
    lengths |= {chance.randrange(length) for _ in range(1_000 if NIGHTLY else 150)}
    for cut in sorted(lengths):
        here.try_file(here.good[: max(cut, 0)])
    assert here.tally["rejected"] == here.tally["tried"]
    here.next_steps_are_right()


def test_other_damage_is_detected(here: Bench) -> None:
    good, chance = here.good, random.Random(13)
    for _ in range(500 if NIGHTLY else 60):
        first, second = sorted(chance.sample(range(len(good)), 2))
        piece = good[first:second]
        here.try_file(good[:first] + bytes(len(piece)) + good[second:] if any(piece) else good + b"\0")
        here.try_file(good[:first] + good[second:])
        here.try_file(good[:second] + piece + good[second:])
        here.try_file(good[:first] + chance.randbytes(len(piece)) + good[second:])
    for changed in (b"x" + good, good + b"\n", good + good, good[::-1], bytes(len(good)), b""):
        here.try_file(changed)
    assert here.tally["rejected"] == here.tally["tried"]
    here.next_steps_are_right()


@pytest.mark.timeout(1500 if NIGHTLY else 300)  # half of the files load, and each of these takes 0.1 s
@pytest.mark.nightly
def test_damage_of_a_file_without_a_digest_never_breaks_training(tmp_path: Path) -> None:
    """A file of an older version can load with other values, but training continues with them."""
    for here in bench(tmp_path):
        damaged_without_a_digest(here)
        print("\n" + here.report("without a digest"))


def damaged_without_a_digest(here: Bench) -> None:
    old = stored(here.start, seal=False)
    chance, taken = random.Random(14), 0
    for _ in range(5_000 if NIGHTLY else 300):
        if here.try_file(flipped(old, chance.randrange(8 * len(old)))) in ("identical", "silent difference"):
            taken += 1
    for _ in range(200 if NIGHTLY else 20):
        (here.folder / "old.pt").write_bytes(flipped(old, chance.randrange(8 * len(old))))
        try:
            here.trainer.load(here.folder / "old.pt")
        except CheckpointError:
            continue
        here.trainer.train(num_steps=1)
        here.back()
    assert taken > 0, "that is what the warning is about"


def loaded_with(trainer: TorchTrainer, path: Path, caplog: pytest.LogCaptureFixture, **given: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "raysgd"):
        trainer.load(path, **given)
    return [record.getMessage() for record in caplog.records]


def test_a_file_without_a_digest_loads_with_one_warning(here: Bench, caplog: pytest.LogCaptureFixture) -> None:
    old, new = here.folder / "old.pt", here.folder / "good.pt"
    v1 = {"epoch": 7, "operator": here.after[0]["operator"]}
    v1 |= {name: here.after[0][name] for name in ("models", "optimizers", "schedulers")}
    for content in (here.after[0], v1):
        for zipped in (True, False):
            torch.save(content, old, _use_new_zipfile_serialization=zipped)
            messages = loaded_with(here.trainer, old, caplog)
            assert (
                len(messages) == 1
                and str(old) in messages[0]
                and "no digest" in messages[0]
                and "Save it again" in messages[0]
            )
            assert torch.equal(weights(here.trainer), torch.cat([t.flatten() for t in tensors(content)]))
            here.back()
    assert loaded_with(here.trainer, new, caplog) == []
    assert loaded_with(here.trainer, new, caplog, trusted=True) == []
    here.back()


def tensors(content: Any) -> list[torch.Tensor]:
    return [
        value
        for model in content["models"]
        for name, value in model.items()
        if name.rpartition(".")[2] in ("weight", "bias")
    ]


def test_a_damaged_digest_is_detected(here: Bench) -> None:
    """The archive before the digest is complete, so other programs would read it."""
    length = len(here.good)
    for kept in range(length - digest.SEAL_BYTES, length):
        assert "the file is damaged" in here.try_file(here.good[:kept])
    unreadable = here.good[: length - digest.SEAL_BYTES] + bytes(digest.SEAL_BYTES)
    assert torch.load(io.BytesIO(unreadable), weights_only=True)["epoch"] == here.after[0]["epoch"]
    assert "the file is damaged" in here.try_file(unreadable)
    assert "the file is damaged" in here.try_file(here.good + b"more")


def test_a_file_that_torch_has_rewritten_loads_with_one_warning(here: Bench, caplog: pytest.LogCaptureFixture) -> None:
    again = here.folder / "again.pt"
    torch.save(torch.load(here.folder / "good.pt", weights_only=True), again)
    (message,) = loaded_with(here.trainer, again, caplog)
    assert str(again) in message and "no digest" in message
    assert torch.equal(weights(here.trainer), torch.cat([t.flatten() for t in tensors(here.after[0])]))
    here.back()


def test_other_programs_can_read_a_file_with_a_digest(here: Bench) -> None:
    path = here.folder / "good.pt"
    with open(path, "rb") as file:
        assert digest.verify(file)
    assert torch.load(path, weights_only=True)["epoch"] == here.after[0]["epoch"]
    assert torch.load(path, weights_only=True, mmap=True)["global_step"] == here.after[0]["global_step"]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_paths_that_are_not_files_are_refused(here: Bench) -> None:
    import os

    os.mkfifo(here.folder / "pipe")
    (here.folder / "gone").symlink_to(here.folder / "nowhere")
    (here.folder / "round").symlink_to(here.folder / "round")
    (here.folder / "linked.pt").symlink_to(here.folder / "good.pt")
    for name, says in {
        "pipe": "not a regular file",
        "gone": "there is no checkpoint",
        "round": "cannot be read",
        "x" * 300: "cannot be read",
        "none": "there is no checkpoint",
        "good.pt/inside": "cannot be read",
    }.items():
        assert says in here.try_path(here.folder / name), name
    assert "not a regular file" in here.try_path(Path("/dev/zero"))
    assert here.try_path(here.folder / "linked.pt") == "identical"


def test_bytes_from_a_remote_store_are_verified(here: Bench) -> None:
    fsspec = pytest.importorskip("fsspec")
    store, chance = fsspec.filesystem("memory"), random.Random(15)
    for number in range(60):
        bit = chance.randrange(8 * (len(here.good) - 1))
        store.pipe("/files/x.pt", flipped(here.good, bit) if number else here.good)
        if number == 0:
            here.trainer.load("memory://files/x.pt")
            assert same(complete(here.trainer), here.after)
            here.back()
            continue
        with pytest.raises(CheckpointError, match=r"memory://files/x\.pt"):
            here.trainer.load("memory://files/x.pt")
    assert same(complete(here.trainer), here.before)
    here.trainer.save("memory://files/saved.pt")
    assert digest.verify(store.cat("/files/saved.pt"))
    here.next_steps_are_right()


@pytest.mark.parametrize("blocking", [True, False])
def test_every_save_has_its_digest(ray_cluster: None, tmp_path: Path, blocking: bool) -> None:
    """The worker writes it into the driver's file."""
    seed_all(1)
    with rich(num_workers=2) as trainer:
        trainer.train(num_steps=1)
        saved = trainer.save(tmp_path / "x.pt", blocking=blocking)
        if not blocking:
            saved.result(60)
    with open(tmp_path / "x.pt", "rb") as file:
        assert digest.verify(file)
