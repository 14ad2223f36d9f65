"""Hostile files: they run no code, and a small file cannot make the trainer use much memory."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.storage import digest
from tests.files.torch_cases import Bench, bench, stored

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("hostile"))


# -- archives -----------------------------------------------------------------------------------------


def archive(records: dict[str, bytes], *, compress: int = zipfile.ZIP_STORED, **attributes: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compress) as made:
        for name, content in records.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = compress
            for key, value in attributes.items():
                setattr(entry, key, value)
            made.writestr(entry, content)
    return buffer.getvalue()


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def with_index(change: Callable[[bytes], bytes], data: bytes) -> bytes:
    return archive({name: change(b) if name.endswith("data.pkl") else b for name, b in records(data).items()})


def index(*operations: bytes) -> bytes:
    """Return an archive as torch writes it, with these pickle operations as its index, and one storage of 16 bytes."""
    content = b"\x80\x02" + b"".join(operations) + b"."
    return archive({"x/data.pkl": content, "x/version": b"3\n", "x/byteorder": b"little", "x/data/0": bytes(16)})


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def called(name: str, *arguments: bytes) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def storage(count: int, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(store: bytes, offset: int, size: list[int], stride: list[int], kind: str = "_v2") -> bytes:
    shape = b"".join(b"(" + b"".join(map(number, each)) + b"t" for each in (size, stride))
    hooks = called("collections.OrderedDict")
    return called(f"torch._utils._rebuild_tensor{kind}", store, number(offset), shape, b"\x89", hooks)


def state(value: bytes) -> bytes:
    """Return the pickle of {"models": [], "optimizers": [], "operator": value}."""
    return b"}(" + text("models") + b"]" + text("optimizers") + b"]" + text("operator") + value + b"u"


def hidden_in(data: bytes, name: str, size: int) -> bytes:
    """Return the archive with this size for one entry in its directory."""
    changed = bytearray(data)
    at = data.rfind(name.encode()) - 46
    assert data[at : at + 4] == b"PK\1\2"
    changed[at + 20 : at + 28] = struct.pack("<2L", size, size)
    return bytes(changed)


def overlapping(data: bytes) -> bytes:
    """Return the archive with all entries at the same position."""
    changed, at = bytearray(data), data.rfind(b"PK\5\6")
    place, first = struct.unpack_from("<L", data, at + 16)[0], None
    while data[place : place + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<3H", data, place + 28)
        first = struct.unpack_from("<L", data, place + 42)[0] if first is None else first
        changed[place + 42 : place + 46] = struct.pack("<L", first)
        place += 46 + sum(lengths)
    return bytes(changed)


SMALL = stored({"models": [], "optimizers": []}, seal=False)
BIG = 1 << 40

HOSTILE: dict[str, Callable[[], bytes]] = {
    "deflated index": lambda: archive(
        {"x/data.pkl": b"\x80\x02" + b"]" * 100 * MB + b".", "x/version": b"3\n"}, compress=zipfile.ZIP_DEFLATED
    ),
    "deflated tensor": lambda: archive(
        {**records(SMALL), "archive/data/0": bytes(100 * MB)}, compress=zipfile.ZIP_DEFLATED
    ),
    "bzip2": lambda: archive({**records(SMALL), "archive/data/0": bytes(100 * MB)}, compress=zipfile.ZIP_BZIP2),
    "claimed size of the index": lambda: hidden_in(archive(records(SMALL)), "archive/data.pkl", 3 << 30),
    "claimed size of a tensor": lambda: hidden_in(index(state(tensor(storage(4), 0, [4], [1]))), "x/data/0", 3 << 30),
    "overlapping records": lambda: overlapping(index(state(tensor(storage(4), 0, [4], [1])))),
    "storage larger than its record": lambda: index(state(tensor(storage(BIG), 0, [4], [1]))),
    "storage of another record": lambda: index(state(tensor(storage(4, "7"), 0, [4], [1]))),
    "storage outside": lambda: index(state(tensor(storage(4, "../../../etc/passwd"), 0, [4], [1]))),
    "storage as another type": lambda: index(
        state(
            b"]" + tensor(storage(4), 0, [4], [1]) + b"a" + tensor(storage(2, kind="DoubleStorage"), 0, [2], [1]) + b"a"
        )
    ),
    "storage of an unknown type": lambda: index(state(tensor(storage(4, kind="ThingStorage"), 0, [4], [1]))),
    "tensor beyond its storage": lambda: index(state(tensor(storage(4), 2, [4], [1]))),
    "tensor with huge strides": lambda: index(state(tensor(storage(4), 0, [2, 2], [BIG, 1]))),
    "tensor with a negative offset": lambda: index(state(tensor(storage(4), -4, [4], [1]))),
    "tensor with negative strides": lambda: index(state(tensor(storage(4), 3, [4], [-1]))),
    "tensor with a negative size": lambda: index(state(tensor(storage(4), 0, [-4], [1]))),
    "expanded tensor": lambda: index(state(tensor(storage(4), 0, [BIG], [0]))),
    "set of an expanded tensor": lambda: index(state(called("__builtin__.set", tensor(storage(4), 0, [BIG], [0])))),
    "FloatTensor(n)": lambda: index(state(called("torch.FloatTensor", number(BIG)))),
    "FloatStorage(n)": lambda: index(state(called("torch.FloatStorage", number(BIG)))),
    "UntypedStorage(n)": lambda: index(state(called("torch.storage.UntypedStorage", number(1 << 32)))),
    "Tensor(n)": lambda: index(state(called("torch.Tensor", number(BIG)))),
    "bytearray(n)": lambda: index(state(called("__builtin__.bytearray", number(1 << 32)))),
    "bytearray(tensor)": lambda: index(
        state(called("__builtin__.bytearray", tensor(storage(2, kind="LongStorage"), 0, [], [])))
    ),
    "bytearray(4 GB)": lambda: b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
    "bytes(4 GB)": lambda: index(b"\x8e" + struct.pack("<Q", 1 << 32)),
    "text of 4 GB": lambda: index(b"X\xff\xff\xff\xff"),
    "encode with another codec": lambda: index(state(called("_codecs.encode", text("a" * 99), text("punycode")))),
    "memo of two billion": lambda: index(b"]r\xff\xff\xff\x7f"),
    "deep tuples as a key": lambda: index(state(b"}" + b")" + b"\x85" * 1_000_000 + b"Ns")),
    "shared tuples as a key": lambda: index(state(b"}" + DOUBLED_TUPLES + b"Ns")),
    "deep lists": lambda: index(state(b"]" * 100_000 + b"a" * 99_999)),
    "shared lists": lambda: index(state(DOUBLED_LISTS)),
    "an empty stack": lambda: index(b"tR"),
    "no end": lambda: archive({"x/data.pkl": b"\x80\x02]", "x/version": b"3\n"}),
    "a list that has itself": lambda: index(state(b"]q\x01h\x01a")),
    "build on a function": lambda: index(state(b"ctorch._utils\n_rebuild_tensor_v2\n}" + text("a") + b"Nsb")),
    "build on a tensor": lambda: index(state(tensor(storage(4), 0, [4], [1]) + b"}" + text("a") + b"Nsb")),
    "encrypted": lambda: flagged(archive(records(SMALL)), 1),
    "TorchScript": lambda: archive({**records(SMALL), "archive/constants.pkl": b"\x80\x02]."}),
    "no index": lambda: archive({"x/version": b"3\n"}),
    "two roots": lambda: archive({**records(SMALL), "other/data.pkl": b"\x80\x02]."}),
    "names that differ in case": lambda: archive({**records(SMALL), "archive/DATA.PKL": b"\x80\x02]."}),
    "parent folder": lambda: archive({**records(SMALL), "archive/../../evil": b"x"}),
    "absolute": lambda: archive({**records(SMALL), "/etc/evil": b"x"}),
    "a link's mode, to elsewhere": lambda: archive(
        {"../link": b"/etc/passwd", **records(SMALL)}, external_attr=0o120777 << 16, create_system=3
    ),
    "many entries": lambda: archive({f"x/{n}": b"" for n in range(30_000)}),
    "a claimed number of entries": lambda: entries(archive(records(SMALL)), 60_000),
    "a tar": lambda: (b"storages" + bytes(92)).ljust(10_240, b"\0"),
    "an old pickle that claims much": lambda: legacy(lambda data: data.replace(b"K\x04Nt", b"J\0\0\0\x40Nt", 1)),
}


def doubled(first: bytes, again: Callable[[bytes], bytes]) -> bytes:
    """Return a pickle of nested values, of which each contains the one before twice."""
    names = [b"h" + bytes([n]) for n in range(100)]
    return first + b"q\0" + b"".join(again(names[n] * 2) + b"q" + bytes([n + 1]) for n in range(99))


DOUBLED_TUPLES = doubled(b")", lambda twice: twice + b"\x86")
DOUBLED_LISTS = doubled(b"]", lambda twice: b"](" + twice + b"e")


def flagged(data: bytes, flag: int) -> bytes:
    changed = bytearray(data)
    place = data.rfind(b"PK\1\2")
    changed[place + 8] |= flag
    return bytes(changed)


def entries(data: bytes, count: int) -> bytes:
    at = data.rfind(b"PK\5\6")
    return data[: at + 8] + struct.pack("<2H", count, count) + data[at + 12 :]


def legacy(change: Callable[[bytes], bytes]) -> bytes:
    buffer = io.BytesIO()
    torch.save({"models": [{"w": torch.ones(4)}], "optimizers": []}, buffer, _use_new_zipfile_serialization=False)
    changed = change(buffer.getvalue())
    assert changed != buffer.getvalue()
    return changed


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(here: Bench, name: str) -> None:
    data = HOSTILE[name]()
    here.tally.clear()
    here.try_file(data)
    assert here.tally["rejected"] == 1
    if data[:2] == b"PK" and data[-2:] == b"\0\0":  # a digest does not show that a file is harmless
        here.try_file(digest.sealed(data))
        assert here.tally["rejected"] == 2


MEASURED = """
import json, resource, sys
from pathlib import Path
from raysgd import CheckpointError
from tests.files.torch_cases import rich

trainer, good = rich(), sys.argv[1]
trainer.train(num_steps=1)
trainer.save(good)
trainer.load(good)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answers = {}
for path in sys.argv[2:]:
    try:
        trainer.load(path)
        answers[path] = "loaded"
    except CheckpointError:
        answers[path] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps(answers))
"""


@pytest.mark.nightly
def test_refusing_hostile_files_needs_little_memory(tmp_path: Path) -> None:
    """Run in a separate process to measure its peak memory. The files have up to 2 MB."""
    paths = []
    for place, (name, make) in enumerate(HOSTILE.items()):
        paths.append(tmp_path / f"{place}.pt")
        data = make()
        assert len(data) < 4 * MB, name
        paths[-1].write_bytes(data)
    paths.append(tmp_path / "wide.pt")
    paths[-1].write_bytes(index(b"(" + b")\x85" * (MB // 2) + b"t"))
    paths.append(tmp_path / "lists.pt")
    paths[-1].write_bytes(index(b"(" + b"]" * MB + b"t"))
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "good.pt"), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3_000:]
    grown = json.loads(run.stdout)
    assert "loaded" not in grown.values(), grown
    most = max(grown.values())
    print(f"\n{len(paths)} hostile files refused, {most:.0f} MB at most")
    assert most < 400, grown


# -- pickles ------------------------------------------------------------------------------------------


class Touches:
    """Creates a file when it is unpickled, by one of several functions."""

    def __init__(self, way: str, trace: Path) -> None:
        self.way, self.trace = way, str(trace)

    def __reduce__(self) -> Any:
        code = f"open({self.trace!r}, 'w')"
        ways: dict[str, Any] = {
            "open": (open, (self.trace, "w")),
            "eval": (eval, (code,)),
            "exec": (exec, (code,)),
            "system": (os.system, (f"touch {self.trace}",)),
            "subprocess": (subprocess.run, (["touch", self.trace],)),
            "path": (Path.touch, (Path(self.trace),)),
            "getattr": (getattr, (os, "system")),
            "pickle": (pickle.loads, (pickle.dumps(Path(self.trace)),)),
        }
        return ways[self.way]


WAYS = ["open", "eval", "exec", "system", "subprocess", "path"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["operator", "models", "optimizers", "whole", "bare pickle", "old format"])
def test_no_code_from_a_file_runs(here: Bench, tmp_path: Path, way: str, where: str) -> None:
    trace = tmp_path / "trace"
    bomb = Touches(way, trace)
    here.tally.clear()
    contents: dict[str, Callable[[], bytes]] = {
        "operator": lambda: stored({**here.start, "operator": bomb}),
        "models": lambda: stored({**here.start, "models": [bomb]}),
        "optimizers": lambda: stored({**here.start, "optimizers": [bomb]}),
        "whole": lambda: stored(bomb, seal=False),
        "bare pickle": lambda: pickle.dumps({"models": [], "optimizers": [], "operator": bomb}),
        "old format": lambda: old_format({**here.start, "operator": bomb}),
    }
    here.try_file(contents[where]())
    assert here.tally["rejected"] == 1 and not trace.exists()


def old_format(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_objects_of_allowed_classes_load(here: Bench) -> None:
    """The user has added their classes to torch's safe globals."""
    import collections

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


def test_unusual_but_harmless_values_load(here: Bench) -> None:
    """The operator's own state can contain all values that torch loads with weights_only=True."""
    base = torch.arange(12.0)
    odd = {
        "view": base[3:9:2],
        "turned": base.view(3, 4).T,
        "expanded": torch.zeros(1).expand(100, 100),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex128),
        "flags": torch.ones(2, dtype=torch.bool),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "set": {1, 2},
        "number": 3 + 4j,
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "big": 1 << 200,
        "keys": {(1, 2): "a", None: "b"},
        "nested": [[[({"a": (1, [2])},)]]],
    }
    for seal in (True, False):
        for name, value in odd.items():
            given = stored({**here.start, "operator": {**here.start["operator"], "more": value}}, seal=seal)
            assert here.try_file(given, gives=here.before) == "identical", name


def test_a_link_to_another_file_does_not_show_its_content(here: Bench) -> None:
    """A link is followed. If its target is not a checkpoint, the error says so."""
    (here.folder / "secret").write_text("password")
    (here.folder / "secret.pt").symlink_to(here.folder / "secret")
    with pytest.raises(CheckpointError, match=r"secret\.pt: not a complete checkpoint") as caught:
        here.trainer.load(here.folder / "secret.pt")
    assert "password" not in str(caught.value)
