"""Each format of checkpoints at each kind of place: a damaged one is refused and changes nothing, or loads as it was saved.

`make nightly` flips every bit of the local files, and one bit of each byte elsewhere; `make test` takes a few of them. Every file
of a folder is also cut to several lengths, and deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.storage import locations, remote
from raysgd.storage.locations import Place
from raysgd.train import Checkpoint
from tests import peek
from tests.files.damage import flipped, lengths, tallied
from tests.files.function_cases import CONTENT, FOLDER_WAYS, LIST, same
from tests.tiers import NIGHTLY
from tests.torch.small import Line, inline

pytest.importorskip("fsspec")

FLIPS = 20  # of each file, if not all bits are flipped


@dataclass
class Format:
    """A checkpoint that `save(place)` writes, and `load(place)` returns in a form that can be compared."""

    save: Callable[[str], Any]
    load: Callable[[str], Any]
    end: Callable[[], Any] = lambda: None


def of_trainer(trainer: Any, **sharded: Any) -> Format:
    """Return a trainer's format. Random states fill nine tenths of a file, and so of the bits, so they are left out. A refused
    checkpoint does not change the trainer."""

    def state() -> Any:
        found = {name: value for name, value in trainer.state_dict().items() if name != "rng"}
        return {**found, "position": {**found["position"], "loads": 0}}  # which counts these loads

    def load(where: str) -> Any:
        before = state()
        try:
            trainer.load(where, **({"trusted": True} if sharded else {}))
        except CheckpointError:
            assert same(state(), before), "it was refused, and the trainer is another one"
            raise
        return state()

    peek.save_no_random_states(trainer)
    return Format(lambda where: trainer.save(where, **sharded), load, trainer.shutdown)


def tensorflow() -> Format:
    from raysgd.tf import TFTrainer
    from tests.tf.small import Small

    return of_trainer(TFTrainer(training_operator_cls=Small))


def function_folder(source: Path, way: str) -> Format:
    source.mkdir()
    (source / "weights.bin").write_bytes(bytes(range(100)))
    (source / "none").write_bytes(b"")
    Checkpoint.from_directory(source).set_metadata({"model": "small"})
    return Format(
        lambda where: Checkpoint.from_directory(source).to_uri(where),
        lambda where: FOLDER_WAYS[way](where, source.parent / uuid.uuid4().hex),
    )


def function_dictionary(**given: Any) -> Format:
    return Format(Checkpoint.from_dict(CONTENT).to_uri, lambda where: Checkpoint(where, **given).to_dict())


FORMATS: dict[str, Callable[[Path], Format]] = {
    "TorchTrainer": lambda source: of_trainer(inline(Line)),
    "TorchTrainer, sharded": lambda source: of_trainer(inline(Line), sharded=True),
    "TFTrainer": lambda source: tensorflow(),
    "function, dictionary": lambda source: function_dictionary(),
    "function, trusted dictionary": lambda source: function_dictionary(trusted=True),
    **{f"function, folder {way}": partial(function_folder, way=way) for way in FOLDER_WAYS},
}


def files_of(where: Place) -> list[Place]:
    if not where.is_dir():
        return [where]
    if isinstance(where, Path):
        return sorted(each for each in where.rglob("*") if each.is_file())
    return [where / (entry.at or name) for name, entry in remote.listed(where).items()] + [where / LIST]


def replace(where: Place, data: bytes) -> None:
    if isinstance(where, Path):
        where.write_bytes(data)  # without waiting for the disk
    else:
        locations.write(where, data)


def bits(size: int, *, local: bool) -> Iterator[int]:
    step = 1 if NIGHTLY and local else 9 if NIGHTLY else max(8 * size // FLIPS, 1)
    return iter(range(0, 8 * size, step))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *((name, at) for name in FORMATS for at in ("local", "memory")),
        *(pytest.param(name, "s3", marks=pytest.mark.more) for name in FORMATS if " to_" not in name),
    ],
)
def test_a_damaged_checkpoint_is_refused_or_loads_as_it_was_saved(
    name: str, at: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    roots = {
        "local": lambda: str(tmp_path),
        "memory": lambda: "memory://every",
        "s3": lambda: request.getfixturevalue("s3"),
    }
    where, made = f"{roots[at]()}/{uuid.uuid4().hex[:8]}", FORMATS[name](tmp_path / "source")
    named = where.rpartition("/")[2]
    made.save(where)
    expected = made.load(where)
    try:
        with tallied(f"{name}, {at}") as tally:
            for place in files_of(locations.place(where)):
                good = locations.read(place)
                damaged = [(f"bit {bit}", flipped(good, bit)) for bit in bits(len(good), local=at == "local")]
                damaged += [
                    (f"cut to {length}", good[:length]) for length in lengths(len(good))[:: 1 if NIGHTLY else 3]
                ]
                for what, data in damaged:
                    replace(place, data)
                    tally.attempt(f"{place.name}: {what}", lambda: made.load(where), lambda f: same(f, expected), named)
                locations.delete(place)
                if at != "local" or "folder" not in name or place.name != LIST:  # a plain folder needs no list
                    tally.attempt(f"{place.name}: missing", lambda: made.load(where), lambda found: False, named)
                replace(place, good)
        assert same(made.load(where), expected) and tally.rejected > tally.tried // 2
    finally:
        made.end()
