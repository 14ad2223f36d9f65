"""Pickles that claim large sizes, multiply values or call functions are refused, with little memory."""

import io
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.storage import digest
from raysgd.train import Checkpoint
from tests.files.archives import ARCHIVES
from tests.files.damage import quiet, show
from tests.files.function_cases import CONTENT

torch = pytest.importorskip("torch")

__all__ = ["quiet"]

# -- hostile pickles ----------------------------------------------------------------------------------

HEAD = b"\x80\x05}\x8c\x01a"
BIG = struct.pack("<Q", 4 << 30)


def call(module: str, name: str, arguments: bytes) -> bytes:
    return HEAD + f"c{module}\n{name}\n".encode() + arguments + b"Rs."


def nested(levels: int, last: bytes = b"K\x01") -> bytes:
    """Return the pickle of ((x, x), (x, x)), ...: it is short in the file, and has 2 ** levels values when they are visited."""
    steps = last + b"\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(levels))
    return b"\x80\x05}" + steps


def repeated(function: bytes, argument: bytes, count: int) -> bytes:
    """Return a pickle with one long argument, and many calls with it."""
    return HEAD + b"(" + function + b"\x94" + argument + b"\x94" + b"h\x00h\x01\x85R" * count + b"ts."


def legacy_storage(numel: int) -> bytes:
    """Return the pickle of a tensor's storage that claims this many elements."""
    stream = io.BytesIO()
    torch.save(torch.ones(3).untyped_storage(), stream, _use_new_zipfile_serialization=False)
    real = pickle.dumps(3, 2)[2:-1]
    assert real in stream.getvalue() or b"K\x0c" in stream.getvalue()
    return stream.getvalue().replace(b"K\x0c", b"\x8a\x06" + numel.to_bytes(6, "little"), 1)


def storage_call(data: bytes) -> bytes:
    return call("torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", len(data)) + data + b"\x85")


def zipped_storage() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(3).untyped_storage(), stream)
    return stream.getvalue()


INTEGER = b"\x8a\x06" + (10**12).to_bytes(6, "little")
SCALAR = b"cnumpy\ndtype\n\x8c\x02f8\x89\x88\x87R"
PICKLES = {
    "a huge bytearray, claimed": HEAD + b"\x96" + BIG + b"s.",
    "a huge bytearray, claimed, 55 bytes": (HEAD + b"\x96" + BIG).ljust(54, b"x") + b".",
    "a huge bytearray, called": call("builtins", "bytearray", INTEGER + b"\x85"),
    "huge bytes, claimed": HEAD + b"\x8e" + BIG + b"s.",
    "a huge text, claimed": HEAD + b"\x8d" + BIG + b"s.",
    "a huge frame": b"\x80\x05\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "a huge number": HEAD + b"\x8b\xff\xff\xff\x7f" + b"s.",
    "a huge list of a range": call("builtins", "list", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge set of a range": call("builtins", "set", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge deque of a range": call("collections", "deque", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge power": call("builtins", "int", b"cdecimal\nDecimal\n\x8c\x0a1e99999999\x85R\x85"),
    "a huge array": call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n" + INTEGER + b"\x85C\x01b\x87"),
    "a huge array of objects": HEAD
    + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
    + INTEGER
    + b"\x85cnumpy\ndtype\n\x8c\x01O\x89\x88\x87R\x89]tbs.",
    "a huge array from nothing": call(
        "numpy.core.numeric", "_frombuffer", b"(C\x01a" + SCALAR + INTEGER + b"\x85\x8c\x01Ct"
    ),
    "a huge scalar": call("numpy.core.multiarray", "scalar", b"cnumpy\ndtype\n\x8c\x0aV999999999\x89\x88\x87R\x85"),
    "a huge subarray type": call("numpy", "dtype", b"\x8c\x10(99999,99999)f8 \x89\x88\x87"),
    "a list that doubles": HEAD + b"](K\x01K\x02e\x94" + b"h\x00cbuiltins\nslice\nK\x00K\x00\x86Rh\x00s" * 40 + b"s.",
    "a bytearray that doubles": HEAD
    + b"cbuiltins\nbytearray\nC\x0512345\x85R\x94"
    + b"h\x00cbuiltins\nslice\nK\x00K\x00\x86Rh\x00s" * 40
    + b"s.",
    "a key whose hash takes for ever": nested(60) + b"K\x01s.",
    "a set of such keys": nested(60) + b"\x8fh\x3a\x85h\x3b0(h\x3c\x90K\x01s.",
    "a frozenset of such keys": nested(60) + b"(h\x3c\x91K\x01s.",
    "a text of it": nested(40)[: -0 or None] + b"cbuiltins\nstr\nh\x28\x85RK\x01s.",
    "a key so deep that its hash overflows": b"\x80\x05}" + b"K\x01" + b"\x85" * 150_000 + b"K\x01s.",
    "many copies of a list": repeated(b"cbuiltins\nset\n", b"](" + b"K\x01" * 20_000 + b"e", 20_000),
    "many copies of bytes": repeated(
        b"cbuiltins\nbytearray\n", b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20), 10_000
    ),
    "a huge storage": storage_call(legacy_storage(10**13)),
    "a storage in another form": storage_call(zipped_storage()),
    "a bytearray in a storage": storage_call(
        legacy_storage(12).replace(b"K\x0c", b"cbuiltins\nbytearray\n" + INTEGER + b"\x85R")
    ),
    "a partial that gets another function": HEAD
    + b"ctorch._utils\n_rebuild_parameter\n(cbuiltins\nbytearray\n"
    + INTEGER
    + b"\x85}Ntbs.",
    "a function": HEAD + b"ctorch._utils\n_rebuild_parameter\ns.",
    "an object by NEWOBJ": HEAD + b"ccollections\nOrderedDict\n)\x81s.",
    "an object by INST": HEAD + b"(icollections\nOrderedDict\ns.",
    "an attribute of a class": HEAD + b"ccollections\nOrderedDict\n}\x8c\x01xK\x01sbs.",
    "a class of a dictionary": HEAD + b"ccollections\nOrderedDict\n)RN}\x8c\x09__class__cbuiltins\ndict\ns\x86bs.",
    "another module's function": HEAD + b"cos\nsystem\n\x8c\x04true\x85Rs.",
    "a dotted name": HEAD + b"\x8c\x05torch\x8c\x0bload.__name\x93s.",
    "an extension": HEAD + b"\x82\x01s.",
    "a buffer from outside": HEAD + b"\x97s.",
    "a persistent id": HEAD + b"Pabc\ns.",
    "metadata that are none": b"\x80\x05}\x8c\x09_metadataK\x01s.",
}
FINE = {"metadata that are none"}  # the dictionary can still be read


@pytest.mark.parametrize("sealed", [True, False], ids=["with its digest", "without"])
@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused(tmp_path: Path, quiet: None, name: str, sealed: bool) -> None:
    path = tmp_path / "given"
    path.write_bytes(digest.sealed(PICKLES[name]) if sealed else PICKLES[name])
    tries: list[Callable[[], Any]] = [Checkpoint(path).get_metadata, Checkpoint(path).to_dict]
    for load in tries[: 1 if name in FINE else 2]:
        with pytest.raises(CheckpointError) as caught:
            load()
        assert "given" in str(caught.value) or name in FINE


def test_deep_nesting_is_read_or_refused(tmp_path: Path, quiet: None) -> None:
    (tmp_path / "deep").write_bytes(HEAD + b"]" * 100_000 + b"a" * 99_999 + b"s.")
    value = Checkpoint(tmp_path / "deep").to_dict()["a"]
    depth = 0
    while value:
        (value,), depth = value, depth + 1
    assert depth == 99_999


MEASURE = """
import contextlib, logging, resource, sys, time
from pathlib import Path
from raysgd import CheckpointError
from raysgd.train import Checkpoint
from tests.files.damage import megabytes_of

def read(path):
    with contextlib.suppress(CheckpointError):
        Checkpoint(path).to_dict()
    with contextlib.suppress(CheckpointError):
        Checkpoint.from_bytes(path.read_bytes())

logging.getLogger("raysgd").setLevel(logging.ERROR)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
read(Path(sys.argv[1], "good"))
assert megabytes_of(lambda: b"1" * (64 << 20)) > 50, "the measurement does not see 64 MiB"
for path in sorted(Path(sys.argv[1]).iterdir()):
    began = time.monotonic()
    print(path.name, "|", megabytes_of(lambda: read(path)), time.monotonic() - began)
"""


def test_hostile_files_need_little_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Run in a separate process to measure its peak memory."""
    for name, data in {**PICKLES, **ARCHIVES}.items():
        (tmp_path / name.replace(".", "dot").replace("/", "_")).write_bytes(data)
    Checkpoint.from_dict(CONTENT).to_uri(tmp_path / "good")
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], done.stdout[-500:])
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    grown = {name: float(values.split()[0]) for name, values in rows}
    seconds = {name: float(values.split()[1]) for name, values in rows}
    assert len(grown) == len(PICKLES) + len(ARCHIVES) + 1
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    worst, slowest = max(grown, key=grown.__getitem__), max(seconds, key=seconds.__getitem__)
    show(
        request,
        f"hostile files: {len(grown)}, at most +{grown[worst]:.0f} MiB for {worst!r} of {sizes[worst] >> 20} MiB, slowest "
        f"{seconds[slowest]:.2f} s for {slowest!r}",
    )
    assert grown[worst] < 100, grown
    assert seconds[slowest] < 60, seconds
