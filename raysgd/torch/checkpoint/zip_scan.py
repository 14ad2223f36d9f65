"""Scan a checkpoint's file before `torch.load` reads it, and refuse one that needs more memory than its size explains. Both.

`torch.load` trusts a zip archive: it decompresses entries, and allocates as much memory as an entry claims. The entries
of a checkpoint are stored uncompressed and do not overlap, so the sum of their sizes is less than the size of the file.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from raysgd.errors import CheckpointError
from raysgd.storage.digest import SEAL_BYTES, ByteSource
from raysgd.torch.checkpoint.pickle_scan import Claim, ForeignObjectError, damaged, looks_like_ours, scan

__all__ = ["check_content", "needs_trust"]

END = struct.Struct("<4s4H2LH")
END64_LOCATOR = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
ENTRY = struct.Struct("<4s6H3L5H2L")
HEADER = struct.Struct("<4s5H3L2H")
MOST_ENTRIES = 1_000_000
LARGEST_DIRECTORY = 256 << 20
LARGEST_INDEX = 256 << 20
UNKNOWN = 0xFFFFFFFF
ENCRYPTED, SIZES_BEHIND, NAMES_IN_UTF8 = 1, 8, 1 << 11
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


class ArchiveEntry(NamedTuple):
    name: str
    header: int
    size: int


def check_content(source: Any, *, trusted: bool) -> None:
    """Raise CheckpointError unless `torch.load` can read these bytes, or this open file, with as much memory as they
    explain. A `trusted` file may contain objects of any type."""
    data = ByteSource(source)
    try:
        if data.read(0, 2) == b"PK":
            _check_archive(data, trusted=trusted)
        elif not trusted:
            _check_legacy(source, data)
    except (struct.error, UnicodeDecodeError) as error:
        raise damaged(f"its directory cannot be read ({error})") from error
    except ForeignObjectError as error:
        raise needs_trust(str(error)) from error


def needs_trust(found: str) -> CheckpointError:
    """Return the error for a file that can be read only if it is trusted."""
    return CheckpointError(
        "the checkpoint contains Python objects other than plain values and tensors (usually the operator's own state), "
        f"and reading these can run code from the file. If you trust its author, pass trusted=True. Found: {found}"
    )


def _check_archive(data: ByteSource, *, trusted: bool) -> None:
    entries = list(_entries(data))
    roots = {entry.name.partition("/")[0] for entry in entries}
    sizes = {entry.name.partition("/")[2]: entry.size for entry in entries}
    if len(roots) != 1 or len({name.lower() for name in sizes}) != len(entries) or "data.pkl" not in sizes:
        raise damaged("torch.save() did not write this zip archive")
    if "constants.pkl" in sizes:
        raise CheckpointError("not a checkpoint of raysgd: it is a TorchScript archive")
    if sizes["data.pkl"] > LARGEST_INDEX:
        raise CheckpointError(
            f"its index has {sizes['data.pkl']} bytes, and at most {LARGEST_INDEX} are allowed: keep large data of your "
            "own in tensors instead of Python objects"
        )
    entry = next(entry for entry in entries if entry.name == f"{min(roots)}/data.pkl")
    index = data.read(_begin(data, entry), entry.size)
    try:
        scan(io.BytesIO(index), _claims_of(sizes))
    except ForeignObjectError:
        if trusted:
            return
        if not looks_like_ours(index):
            raise CheckpointError(
                "not a checkpoint of raysgd: it contains no models and optimizers as TorchTrainer.save() writes them"
            ) from None
        raise


def _claims_of(sizes: dict[str, int]) -> Claim:
    def claim(key: str, count: int) -> None:
        stored = sizes.get(f"data/{key}")
        if stored is None:
            raise damaged(f"storage {key[:20]!r} is not in the file")
        if stored != count:
            raise damaged(f"its index claims {count} bytes for storage {key[:20]!r}, and the file has {stored}")

    return claim


def _entries(data: ByteSource) -> Iterator[ArchiveEntry]:
    """Yield the archive's entries. Raise CheckpointError if they overlap or extend beyond the file."""
    count, begin, end = _directory(data)
    directory = data.read(begin, end - begin)
    place, spans = 0, []
    for _ in range(count):
        entry, place = _entry(directory, place)
        spans.append((entry.header, _begin(data, entry) + entry.size))
        yield entry
    if place != len(directory):
        raise damaged("its directory does not have the length that it claims")
    spans.sort()
    following = [*spans[1:], (begin, begin)]
    if any(stop > after for (_, stop), (after, _) in zip(spans, following, strict=True)):
        raise damaged("entries of the archive overlap, or are larger than the file")


def _directory(data: ByteSource) -> tuple[int, int, int]:
    """Return the number of entries, and where their directory begins and ends."""
    read = data.read
    for comment in (0, SEAL_BYTES):
        found = data.size - END.size - comment
        if found >= 0 and read(found, 4) == b"PK\5\6" and read(found + 20, 2) == comment.to_bytes(2, "little"):
            break
    else:
        raise damaged("it was cut off, or its end is damaged")
    _, disk, first_disk, here, count, length, begin, _ = END.unpack(read(found, END.size))
    end = found
    if found >= END64_LOCATOR.size and read(found - END64_LOCATOR.size, 4) == b"PK\6\7":
        _, _, end, _ = END64_LOCATOR.unpack(read(found - END64_LOCATOR.size, END64_LOCATOR.size))
        if end != found - END64_LOCATOR.size - END64.size or read(end, 4) != b"PK\6\6":
            raise damaged("the end of its directory is damaged")
        _, _, _, _, disk, first_disk, here, count, length, begin = END64.unpack(read(end, END64.size))
    if disk or first_disk or here != count or begin + length != end:
        raise damaged("the end of its directory is damaged")
    if not 0 < count <= MOST_ENTRIES or length > LARGEST_DIRECTORY:
        raise CheckpointError(f"the archive has {count} entries, and 1 to {MOST_ENTRIES} are allowed")
    return count, begin, end


def _entry(directory: bytes, place: int) -> tuple[ArchiveEntry, int]:
    """Return the entry at this place of the directory, and the place of the next one."""
    fields = ENTRY.unpack_from(directory, place)
    mark, _, _, flags, method, _, _, _, stored, size, name_length, extra_length, comment_length, disk = fields[:14]
    header = fields[16]
    name_at = place + ENTRY.size
    extra_at = name_at + name_length
    next_at = extra_at + extra_length + comment_length
    if mark != b"PK\1\2" or disk or next_at > len(directory):
        raise damaged("its directory is damaged")
    name = directory[name_at:extra_at].decode()
    size, stored, header = _large((size, stored, header), directory[extra_at : extra_at + extra_length])
    if method or size != stored or flags & ~(SIZES_BEHIND | NAMES_IN_UTF8):
        kind = "encrypted" if flags & ENCRYPTED else "compressed or of an unknown kind"
        raise damaged(f"{name[:60]!r} is {kind}, but torch.save() stores everything uncompressed")
    if ".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name:
        raise damaged(f"it has an entry with the unsafe name {name[:60]!r}")
    return ArchiveEntry(name, header, size), next_at


def _large(fields: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Return size, stored size and place of the header: those that need more than four bytes are in extra field 1."""
    if UNKNOWN not in fields:
        return fields
    place, numbers = 0, b""
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            numbers = extra[place + 4 : place + 4 + length]
            break
        place += 4 + length
    large = iter(struct.unpack(f"<{len(numbers) // 8}Q", numbers[: len(numbers) // 8 * 8]))
    first, second, third = (next(large, UNKNOWN) if field == UNKNOWN else field for field in fields)
    return first, second, third


def _begin(data: ByteSource, entry: ArchiveEntry) -> int:
    """Return where the entry's content begins."""
    mark, _, _, method, _, _, _, _, _, name_length, extra_length = HEADER.unpack(data.read(entry.header, HEADER.size))
    if mark != b"PK\3\4" or method:
        raise damaged(f"the header of {entry.name[:60]!r} is damaged")
    return entry.header + HEADER.size + int(name_length) + int(extra_length)


def _check_legacy(source: Any, data: ByteSource) -> None:
    """Check a file in the format of torch before 1.6: five pickles, and then the storages."""
    if data.read(0, len(LEGACY_MAGIC)) != LEGACY_MAGIC:
        raise damaged("TorchTrainer.save() did not write it")
    claimed: dict[str, int] = {}
    left = data.size

    def claim(key: str, count: int) -> None:
        nonlocal left
        left -= count - claimed.get(key, 0)
        claimed[key] = count
        if left < 0:
            raise damaged(f"its index claims more data than the file's {data.size} bytes")

    file = source if hasattr(source, "fileno") else io.BytesIO(source)
    file.seek(0)
    for _ in range(5):
        scan(file, claim)
