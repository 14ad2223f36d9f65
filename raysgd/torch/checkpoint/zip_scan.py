"""Looks through a checkpoint's file before `torch.load` does, and refuses what would cost more than reading the file.

`torch.load` believes a zip archive: it unpacks what is compressed, and sets aside as much memory as an entry claims. A
checkpoint's entries are stored as they are, one behind the other, so their sizes add up to less than the file.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from raysgd.errors import CheckpointError
from raysgd.storage.digest import SEAL_BYTES
from raysgd.torch.checkpoint.pickle_scan import Claim, ForeignObjectError, damaged, looks_like_ours, scan

__all__ = ["check_content", "needs_trust", "not_ours"]

END = struct.Struct("<4s4H2LH")
END64_PLACE = struct.Struct("<4sLQL")
END64 = struct.Struct("<4sQ2H2L4Q")
ENTRY = struct.Struct("<4s6H3L5H2L")
HEADER = struct.Struct("<4s5H3L2H")
MOST_ENTRIES = 1_000_000
LARGEST_DIRECTORY = 256 << 20
LARGEST_INDEX = 256 << 20
UNKNOWN = 0xFFFFFFFF
ENCRYPTED, SIZES_BEHIND, NAMES_IN_UTF8 = 1, 8, 1 << 11
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"

Read = Callable[[int, int], bytes]


class Entry(NamedTuple):
    name: str
    header: int
    size: int


def check_content(source: Any, *, trusted: bool) -> None:
    """Raise CheckpointError unless these bytes, or this open file, can be given to `torch.load`: it makes no more of them
    than they hold. Of a `trusted` file, objects of any type are accepted."""
    read, size = _reader(source)
    try:
        if read(0, 2) == b"PK":
            _check_archive(read, size, trusted=trusted)
        elif not trusted:
            _check_legacy(source, read, size)
    except (struct.error, UnicodeDecodeError) as error:
        raise damaged(f"its directory cannot be read ({error})") from error
    except ForeignObjectError as error:
        raise needs_trust(str(error)) from error


def needs_trust(found: str) -> CheckpointError:
    """Return the error for a file that plain loading does not read."""
    return CheckpointError(
        "the checkpoint holds Python objects beyond plain values and tensors (usually the operator's own state), and "
        "reading them can run code from the file. If you made the file yourself, pass trusted=True. What was found: "
        f"{found}"
    )


def _reader(source: Any) -> tuple[Read, int]:
    if hasattr(source, "fileno"):
        descriptor = source.fileno()
        return (lambda start, length: os.pread(descriptor, length, start)), os.fstat(descriptor).st_size
    view = memoryview(source).cast("B")
    return (lambda start, length: bytes(view[start : start + length])), len(view)


def _check_archive(read: Read, size: int, *, trusted: bool) -> None:
    entries = list(_entries(read, size))
    roots = {entry.name.partition("/")[0] for entry in entries}
    sizes = {entry.name.partition("/")[2]: entry.size for entry in entries}
    if len(roots) != 1 or len({name.lower() for name in sizes}) != len(entries) or "data.pkl" not in sizes:
        raise damaged("it is a zip archive, but not one that torch.save() wrote")
    if "constants.pkl" in sizes:
        raise CheckpointError("this is not a checkpoint of raysgd: it is a TorchScript archive")
    if sizes["data.pkl"] > LARGEST_INDEX:
        raise CheckpointError(
            f"its index has {sizes['data.pkl']} bytes, and {LARGEST_INDEX} are allowed: keep large data of your "
            "own in tensors instead of Python objects"
        )
    entry = next(entry for entry in entries if entry.name == f"{min(roots)}/data.pkl")
    index = read(_begin(read, entry), entry.size)
    try:
        scan(io.BytesIO(index), _claims_of(sizes))
    except ForeignObjectError:
        if trusted:
            return
        if not looks_like_ours(index):
            raise not_ours() from None
        raise


def not_ours() -> CheckpointError:
    return CheckpointError(
        "this is not a checkpoint of raysgd: it holds no models and optimizers as save() writes them"
    )


def _claims_of(sizes: dict[str, int]) -> Claim:
    def claim(key: str, count: int) -> None:
        there = sizes.get(f"data/{key}")
        if there is None:
            raise damaged(f"storage {key[:20]!r} is not in the file")
        if there != count:
            raise damaged(f"its index claims {count} bytes for storage {key[:20]!r}, and the file has {there}")

    return claim


def _entries(read: Read, size: int) -> Iterator[Entry]:
    """The archive's entries, none of which overlaps another one or lies outside of the file."""
    count, begin, end = _directory(read, size)
    directory = read(begin, end - begin)
    place, spans = 0, []
    for _ in range(count):
        entry, place = _entry(directory, place)
        spans.append((entry.header, _begin(read, entry) + entry.size))
        yield entry
    if place != len(directory):
        raise damaged("its directory has another length than it says")
    spans.sort()
    borders = [*spans[1:], (begin, begin)]
    if any(stop > after for (_, stop), (after, _) in zip(spans, borders, strict=True)):
        raise damaged("entries of the archive overlap, or are larger than the file")


def _directory(read: Read, size: int) -> tuple[int, int, int]:
    """How many entries there are, and where their directory begins and ends."""
    found = None
    for comment in (0, SEAL_BYTES):
        place = size - END.size - comment
        if place >= 0 and read(place, 4) == b"PK\5\6" and read(size - comment - 2, 2) == comment.to_bytes(2, "little"):
            found = place
            break
    if found is None:
        raise damaged("it is cut off, or its end is damaged")
    _, disk, first_disk, here, count, length, begin, _ = END.unpack(read(found, END.size))
    end = found
    if found >= END64_PLACE.size and read(found - END64_PLACE.size, 4) == b"PK\6\7":
        _, _, end, _ = END64_PLACE.unpack(read(found - END64_PLACE.size, END64_PLACE.size))
        if end != found - END64_PLACE.size - END64.size or read(end, 4) != b"PK\6\6":
            raise damaged("the end of its directory is damaged")
        _, _, _, _, disk, first_disk, here, count, length, begin = END64.unpack(read(end, END64.size))
    if disk or first_disk or here != count or begin + length != end:
        raise damaged("the end of its directory is damaged")
    if not 0 < count <= MOST_ENTRIES or length > LARGEST_DIRECTORY:
        raise CheckpointError(f"the archive has {count} entries, and 1 to {MOST_ENTRIES} are allowed")
    return count, begin, end


def _entry(directory: bytes, place: int) -> tuple[Entry, int]:
    """The entry at this place of the directory, and the place of the next one."""
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
        raise damaged(f"{name[:60]!r} is {kind}, and torch.save() stores everything as it is")
    if ".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name:
        raise damaged(f"it has an entry of the name {name[:60]!r}")
    return Entry(name, header, size), next_at


def _large(fields: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Size, stored size and place of the header: what does not fit into four bytes is in the extra field number 1."""
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


def _begin(read: Read, entry: Entry) -> int:
    """Where the entry's content begins."""
    mark, _, _, method, _, _, _, _, _, name_length, extra_length = HEADER.unpack(read(entry.header, HEADER.size))
    if mark != b"PK\3\4" or method:
        raise damaged(f"the header of {entry.name[:60]!r} is damaged")
    return entry.header + HEADER.size + int(name_length) + int(extra_length)


def _check_legacy(source: Any, read: Read, size: int) -> None:
    """Torch's format before 1.6: five pickles, then the storages."""
    if read(0, len(LEGACY_MAGIC)) != LEGACY_MAGIC:
        raise damaged("it is not a file as save() writes it")
    claimed: dict[str, int] = {}
    left = size

    def claim(key: str, count: int) -> None:
        nonlocal left
        left -= count - claimed.get(key, 0)
        claimed[key] = count
        if left < 0:
            raise damaged(f"its index claims more data than the file's {size} bytes")

    file = source if hasattr(source, "fileno") else io.BytesIO(source)
    file.seek(0)
    for _ in range(5):
        scan(file, claim)
