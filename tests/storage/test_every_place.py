"""Each format of checkpoints at each kind of place: a damaged one is refused and changes nothing, or loads as it was saved.

`make nightly` flips every bit of a small local file, one bit of each byte of others, and cuts both at every length. In stores it
takes some bytes of each header, content and entry of an archive. `make test` takes a few of those everywhere. Every file of a
folder, and every member of an archive, is also left out.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.storage import folders, locations, remote
from raysgd.storage.locations import Place
from raysgd.train import Checkpoint
from tests import peek, storing
from tests.storage.damage import Touches, flipped, lengths, members, tallied, zipped
from tests.storage.function_cases import CONTENT, FOLDER_WAYS, LIST, same
from tests.tiers import NIGHTLY
from tests.torch.small import Line, inline

pytest.importorskip("fsspec")

SMALL = 5000  # bytes
FEW = 20  # bits of each file that `make test` flips
EDGES = re.compile(rb"PK(\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x06\x07|\x07\x08)|\x93NUMPY")  # within an archive
FIELDS = (
    0,
    6,
    14,
    20,
    26,
    30,
    42,
)  # bytes of a header, or of an entry: its flags, checksum, size, lengths, name and place


@dataclass
class Format:
    """A checkpoint that `save(place)` writes, and `load(place)` returns in a form that can be compared."""

    save: Callable[[str], Any]
    load: Callable[..., Any]
    end: Callable[[], Any] = lambda: None


def of_trainer(trainer: Any, **sharded: Any) -> Format:
    """Return a trainer's format. Before each load the trainer has other weights than the checkpoint, and a refused one does not change
    them."""

    def state() -> Any:
        found = trainer.state_dict()
        return {**found, "position": {**found["position"], "loads": 0}}  # which counts these loads

    def spoil(operator: Any) -> None:
        for model in peek.models_of(operator):
            if isinstance(model, torch.nn.Module):
                torch.nn.utils.vector_to_parameters(torch.zeros(10_000), model.parameters())
            else:
                model.set_weights([0 * each for each in model.get_weights()])

    def save(where: str) -> None:
        trainer.save(where, **sharded)
        trainer.apply_all_operators(spoil)
        before.append(state())

    def load(where: str, trusted: bool = bool(sharded)) -> Any:
        try:
            trainer.load(where, **({"trusted": True} if trusted else {}))
        except CheckpointError:
            assert same(state(), before[0]), "it was refused, and the trainer is another one"
            raise
        found = state()
        trainer.apply_all_operators(spoil)
        return found

    before: list[Any] = []
    return Format(save, load, trainer.shutdown)


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
    def load(where: str, **trusted: bool) -> Any:
        return Checkpoint(where, **(trusted or given)).to_dict()

    return Format(Checkpoint.from_dict(CONTENT).to_uri, load)


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


def places(data: bytes) -> list[int]:
    """Return some bytes of each part of a file, as far as it is an archive: the fields of its headers and entries, and the content in
    between."""
    if not data:
        return []
    edges = [*(found.start() for found in EDGES.finditer(data)), len(data)]
    parts = list(pairwise(edges)) if len(edges) > 2 else [(0, len(data))]
    found = {min(start + field, end - 1) for start, end in parts for field in FIELDS}
    found |= {start + (end - start) * part // 8 for start, end in parts for part in range(1, 8)} | {len(data) - 1}
    return sorted(found)


def damages(data: bytes, *, local: bool, alone: bool) -> Iterator[tuple[str, bytes]]:
    """Yield damaged versions of a file's content."""
    if NIGHTLY and local:
        bits, cut = range(0, 8 * len(data), 1 if alone and len(data) <= SMALL else 9), list(range(len(data)))
    else:
        some, cut = places(data), lengths(len(data))
        if not NIGHTLY:
            some, cut = some[:: max(len(some) // FEW, 1)], cut[::3]
        bits = [8 * place + number % 8 for number, place in enumerate(some)]
    for bit in bits:
        yield f"bit {bit}", flipped(data, bit)
    for length in cut:
        yield f"cut to {length}", data[:length]
    if zipfile.is_zipfile(io.BytesIO(data)):
        for name, content in without_a_member(data):
            yield f"without {name}", content


def without_a_member(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the archive without each of its members. What is left has its checksums."""
    content = members(data)
    for missing in content:
        yield missing, zipped({name: each for name, each in content.items() if name != missing})


@pytest.fixture
def root(at: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return {
        "local": lambda: str(tmp_path),
        "memory": lambda: "memory://every",
        "s3": lambda: request.getfixturevalue("s3"),
    }[at]()


def every(names: Iterable[str], on_s3: Iterable[str]) -> pytest.MarkDecorator:
    rows = [(name, at) for name in names for at in ("local", "memory")]
    more = [pytest.param(name, "s3", marks=pytest.mark.more) for name in on_s3]
    return pytest.mark.parametrize(("name", "at"), [*rows, *more])


@every(FORMATS, [name for name in FORMATS if " to_" not in name])
def test_a_damaged_checkpoint_is_refused_or_loads_as_it_was_saved(
    name: str, at: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a disk takes longer than everything else
    where, made = f"{root}/{uuid.uuid4().hex[:8]}", FORMATS[name](tmp_path / "source")
    named = where.rpartition("/")[2]
    made.save(where)
    expected = made.load(where)
    try:
        with tallied(f"{name}, {at}") as tally:
            files = files_of(locations.place(where))
            for place in files:
                good = locations.read(place)
                for what, data in damages(good, local=at == "local", alone=len(files) == 1):
                    replace(place, data)
                    tally.attempt(f"{place.name}: {what}", lambda: made.load(where), lambda f: same(f, expected), named)
                locations.delete(place)
                if at != "local" or "folder" not in name or place.name != LIST:  # a plain folder needs no list
                    tally.attempt(f"{place.name}: missing", lambda: made.load(where), lambda found: False, named)
                replace(place, good)
        assert same(made.load(where), expected) and tally.rejected > tally.tried // 3
        print(tally)
    finally:
        made.end()


def with_code(name: str, where: Place, bomb: Touches) -> Iterator[str]:
    """Put an object whose unpickling runs code into a checkpoint, in one way after another, with right checksums."""
    pickled = pickle.dumps({"models": [], "optimizers": [], "operator": bomb})
    if name == "TorchTrainer, sharded":
        listed = remote.listed(where) if isinstance(where, remote.Uri) else folders.read_list(where) or {}
        (index,) = [each for each in listed if each.endswith(".metadata")]
        replace(where / index, pickled)
        replace(where / LIST, folders.dump_list({**listed, index: folders.entry_of_bytes(pickled)}))
        yield "in torch's index"
        return
    if name == "TorchTrainer":
        replace(where, storing.state_file({**torch.load(io.BytesIO(locations.read(where))), "operator": bomb}))
    else:
        replace(where, Checkpoint.from_dict({"x": bomb}).to_bytes())
    yield "in an archive"
    replace(where, pickled)
    yield "as it is"


PLAIN = ["TorchTrainer", "TorchTrainer, sharded", "TFTrainer", "function, dictionary"]


@every(PLAIN, PLAIN)
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    name: str, at: str, root: str, tmp_path: Path
) -> None:
    where, made = f"{root}/{uuid.uuid4().hex[:8]}", FORMATS[name](tmp_path / "source")
    try:
        made.save(where)
        for how in with_code(name, locations.place(where), Touches(tmp_path / "trace")):
            with pytest.raises(CheckpointError, match=where.rpartition("/")[2]):
                made.load(where, trusted=False)
            assert not (tmp_path / "trace").exists(), how
    finally:
        made.end()
