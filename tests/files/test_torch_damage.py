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

from raysgd.torch import TorchTrainer
from tests import storing
from tests.files.damage import Tally, show
from tests.files.torch_cases import Bench, bench, flipped, rich, same, seed_all, stored, weights
from tests.tiers import NIGHTLY

FLIPS = 20_000 if NIGHTLY else 1_000


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def counts(here: Bench, request: pytest.FixtureRequest) -> Iterator[None]:
    here.tally.clear()
    yield
    print("\n" + here.report(request.node.name))
    assert not here.tally["silent difference"]


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(content: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def small_file() -> bytes:
    """Return a file with all kinds of values, in which thousands of bits can be flipped in a few seconds."""
    tensors = {
        "weight": torch.arange(6.0).view(3, 2),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "no": torch.zeros(0),
    }
    return storing.state_file(
        {"models": [tensors], "optimizers": [{"lr": 0.1, "text": "é"}], "epoch": 3, "operator": [None, 1]}
    )


def read(data: bytes) -> Any:
    """Read a file as `load` does before the trainer changes."""
    assert storing.has_checksums(data), (
        "only a file without an archive has no checksums, and such a file is refused next"
    )
    return storing.parsed_state(data)


def read_any(data: bytes) -> Any:
    return read(data) if data[:2] == b"PK" else storing.parsed_state(data)


def test_no_damage_of_a_small_file_loads_silently(request: pytest.FixtureRequest) -> None:
    """Every bit is flipped in `make nightly`, and otherwise all in the list of parts and some in each other byte; every truncation;
    every missing part."""
    good, tallies = small_file(), []
    expected, size = read(good), 8 * len(good)
    listed = 8 * good.index(b"PK\1\2")
    bits = range(size) if NIGHTLY else [*range(0, listed, 5), *range(listed, size)]
    for name, damaged in {
        "flipped bits": ((f"bit {bit}", flipped(good, bit)) for bit in bits),
        "truncations": ((f"cut to {length}", good[:length]) for length in range(len(good))),
        "missing parts": (
            (f"no {name}", zipped({other: data for other, data in members(good).items() if other != name}))
            for name in members(good)
        ),
        "two flipped bits": (
            (f"bits {seed}", flipped(flipped(good, chance.randrange(size)), chance.randrange(size)))
            for seed in range(20_000 if NIGHTLY else 500)
            for chance in [random.Random(seed)]
        ),
    }.items():
        tally = Tally(f"TorchTrainer, {name}")
        for what, data in damaged:
            tally.attempt(what, lambda data=data: read_any(data), lambda found: same(found, expected))  # type: ignore[misc]
        tallies.append(tally)
    show(request, *tallies)
    for tally in tallies:
        tally.check()
        assert tally.rejected > 0.5 * tally.tried
    assert tallies[1].rejected == tallies[1].tried


def test_a_trainer_refuses_flipped_bits_and_does_not_change(here: Bench) -> None:
    chance = random.Random(11)
    for number in range(FLIPS):
        here.try_file(flipped(here.good, chance.randrange(8 * len(here.good))))
        if number % 500 == 0:
            here.next_steps_are_right()
    assert here.tally["rejected"] >= 0.7 * here.tally["tried"]
    here.next_steps_are_right()


def test_a_trainer_refuses_truncated_files(here: Bench) -> None:
    length, chance = len(here.good), random.Random(12)
    lengths = {*range(80), *range(length - 200, length)} | {chance.randrange(length) for _ in range(150)}
    for cut in sorted(lengths):
        here.try_file(here.good[:cut])
    assert here.tally["rejected"] == here.tally["tried"]
    here.next_steps_are_right()


def test_other_damage_is_detected(here: Bench) -> None:
    good, chance = here.good, random.Random(13)
    for _ in range(500 if NIGHTLY else 40):
        first, second = sorted(chance.sample(range(len(good)), 2))
        piece = good[first:second]
        here.try_file(good[:first] + bytes(len(piece)) + good[second:])
        here.try_file(good[:first] + good[second:])
        here.try_file(good[:second] + piece + good[second:])
        here.try_file(good[:first] + chance.randbytes(len(piece)) + good[second:])
    damaged = flipped(good, 8 * good.index(b"archive/data/0") + 8 * 64)
    for changed in (b"x" + good, good + good, damaged + good, good + damaged, good[::-1], bytes(len(good)), b""):
        here.try_file(changed)
    here.next_steps_are_right()


def test_parts_of_another_file_are_detected(here: Bench) -> None:
    """The archive is well-formed, but one part is that of another checkpoint, with its own checksum, or is missing."""
    mine, other = members(here.good), members(stored(here.start))
    assert mine.keys() == other.keys()
    for name in mine:
        here.try_file(zipped({each: data for each, data in mine.items() if each != name}))
    compressed = here.try_file(zipped(mine, zipfile.ZIP_DEFLATED))
    assert "is compressed" in compressed
    assert here.try_file(zipped(mine)) == "identical"


def loaded_with(trainer: TorchTrainer, path: Path, caplog: pytest.LogCaptureFixture, **given: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "raysgd"):
        trainer.load(path, **given)
    return [record.getMessage() for record in caplog.records]


def test_a_file_without_checksums_loads_with_one_warning(here: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """RaySGD wrote torch's old format, which has none; and `set_crc32_options(False)` makes torch write none."""
    old, new = here.folder / "old.pt", here.folder / "good.pt"
    v1 = {"epoch": 7, "operator": here.after[0]["operator"]}
    v1 |= {name: here.after[0][name] for name in ("models", "optimizers", "schedulers")}
    for content in (here.after[0], v1):
        for zipped_format in (True, False):
            torch.serialization.set_crc32_options(False)
            torch.save(content, old, _use_new_zipfile_serialization=zipped_format)
            torch.serialization.set_crc32_options(True)
            messages = loaded_with(here.trainer, old, caplog)
            assert len(messages) == 1, messages
            assert str(old) in messages[0] and "no checksums" in messages[0] and "Save it again" in messages[0]
            assert torch.equal(weights(here.trainer), torch.cat([t.flatten() for t in tensors(content)]))
            here.back()
    assert loaded_with(here.trainer, new, caplog) == []
    assert loaded_with(here.trainer, new, caplog, trusted=True) == []
    torch.save(here.after[0], old)
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
def test_every_save_has_checksums(ray_cluster: None, tmp_path: Path, blocking: bool) -> None:
    """Also if the user has turned them off for their own files, which stays so."""
    seed_all(1)

    def turn_off(operator: Any) -> None:
        torch.serialization.set_crc32_options(False)

    with rich(num_workers=2) as trainer:
        trainer.apply_all_operators(turn_off)
        trainer.train(num_steps=1)
        saved = trainer.save(tmp_path / "x.pt", blocking=blocking)
        if not blocking:
            saved.result(60)
        kept = trainer.apply_all_operators(lambda operator: torch.serialization.get_crc32_options())
        assert kept == [False, False]
    with open(tmp_path / "x.pt", "rb") as file:
        assert storing.has_checksums(file)
