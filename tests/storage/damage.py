"""Damage files, and count what loading them does."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def flips(size: int, count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(8 * size), k=count)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def members(data: bytes) -> dict[str, bytes]:
    """Return what the members of an archive hold."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(content: Mapping[str, bytes | str], how: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with these members, whose checksums are right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def lengths(size: int) -> list[int]:
    """Return lengths to truncate a file to: 0, a few bytes, blocks, the middle, and without all or part of the digest."""
    classes = {0, 1, 10, 64, 257, 512, size // 2, *(size - back for back in (1, 22, 64, 82, 83, 105, 513))}
    return sorted(length for length in classes if 0 <= length < size)


@dataclass
class Tally:
    """Counts, for one format, the damaged files that were refused with an error that names them, or loaded as they were saved."""

    name: str
    tried: int = 0
    rejected: int = 0
    identical: int = 0
    silent: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    def attempt(self, what: str, load: Callable[[], Any], same: Callable[[Any], bool], *named: str) -> None:
        """Load a damaged file. `same` returns whether the result is what was saved. An error must contain the texts in `named`."""
        self.tried += 1
        try:
            found = load()
        except CheckpointError as error:
            self.rejected += 1
            if not all(name in str(error) for name in named) or len(str(error)) < 20:
                self.unclear.append(f"{what}: {error}")
        except Exception as error:
            self.raw.append(f"{what}: {type(error).__name__}: {error}"[:300])
        else:
            if same(found):
                self.identical += 1
            else:
                self.silent.append(what)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tried} tried, {self.rejected} rejected, {self.identical} loaded identically, "
            f"{len(self.silent)} silent differences, {len(self.raw)} raw errors"
        )

    def check(self) -> None:
        assert not self.silent, f"{self}: {self.silent[:5]}"
        assert not self.raw, f"{self}: {self.raw[:5]}"
        assert not self.unclear, f"{self}; unclear errors: {self.unclear[:5]}"


@contextlib.contextmanager
def tallied(name: str) -> Iterator[Tally]:
    tally = Tally(name)
    yield tally
    tally.check()


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def megabytes_of(call: Callable[[], Any]) -> float:
    """Return by how many MB the memory of this process grew at most during a call."""
    if not STATUS.exists():
        pytest.skip("only Linux reports the peak memory of a process")
    RESET.write_text("5")  # resets the peak to the present value
    before = held("VmRSS")
    call()
    return max(held("VmHWM") - before, 0.0)


def held(name: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
