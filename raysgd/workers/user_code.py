"""Send the user's own modules to workers on other machines. Both."""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

from raysgd.storage.durable import private_folder
from raysgd.workers.serialization import is_installed

logger = logging.getLogger("raysgd")

MOST_BYTES, MOST_ENTRIES = 16 << 20, 20_000
ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # what the folder of a virtual environment holds
PACKAGE = Path(__file__).resolve().parent.parent  # the worker runs this code already
HIDDEN = (".", "__pycache__")


@dataclass
class UserCode:
    """The modules of some folders as a zip archive, in which each folder has its number as its
    name.

    first       how many of the folders come before installed packages in `sys.path`
    left_out    what was not packed because of a limit, with the reason
    """

    data: bytes
    folders: int
    first: int
    modules: int = 0
    left_out: list[str] = field(default_factory=list)


def find_user_folders(runtime_env: Mapping[str, Any]) -> tuple[list[Path], int]:
    """Find the folders of `sys.path` with the user's modules, and how many are before installed
    packages: the script's, the notebook's and PYTHONPATH's. None if the job has a `working_dir` or
    `py_modules`, which Ray sends to all workers."""
    if runtime_env.get("working_dir") or runtime_env.get("py_modules"):
        return [], 0
    found = list(dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path))
    installed = [is_installed(str(folder)) for folder in found]
    first = installed.index(True) if True in installed else len(found)
    own = [folder for folder, other in zip(found, installed, strict=True) if folder.is_dir() and not other]
    return own, sum(folder in own for folder in found[:first])


def pack_modules(folders: Sequence[Path], first: int) -> UserCode:
    """Pack the modules of these folders, the top first. Log what the limits leave out."""
    buffer, size, code = io.BytesIO(), 0, UserCode(b"", len(folders), first)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, folder in enumerate(folders):
            for file in _walk_modules(folder, code.left_out):
                try:
                    name = f"{number}/{file.relative_to(folder)}"
                    name.encode()
                    length = file.stat().st_size
                    content = file.read_bytes() if size + length <= MOST_BYTES else b""
                except (OSError, UnicodeEncodeError) as error:
                    code.left_out.append(f"{str(file)!a} ({error})")
                    continue
                if size + max(length, len(content)) > MOST_BYTES:
                    code.left_out.append(f"{file} ({length / 1e6:.1f} MB)")
                    continue
                size += len(content)
                code.modules += 1
                # With a constant time, the same modules always give the same bytes.
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    code.data = buffer.getvalue()
    names = ", ".join(map(str, folders))
    if code.left_out:
        more = f" and {len(code.left_out) - 5} more" if len(code.left_out) > 5 else ""
        logger.warning(
            "workers on other machines do not get all Python modules of %s: %s%s were left out. At most %d MB of modules and "
            "%d directory entries are sent. If workers import what was left out, call "
            "ray.init(runtime_env={'working_dir': ..., 'excludes': [...]}) first, or install it on all machines",
            *(names, ", ".join(code.left_out[:5]), more, MOST_BYTES >> 20, MOST_ENTRIES),
        )
    logger.info("sending the %d Python modules of %s (%.1f MB) to other machines", code.modules, names, size / 1e6)
    return code


def _walk_modules(root: Path, left_out: list[str]) -> Iterator[Path]:
    """Yield the modules below a folder, level by level. Data folders, environments and
    repositories' own folders cannot be imported, because of their names or their content."""
    waiting, seen, entries = deque([root]), {os.path.realpath(root)}, 0
    device = root.stat().st_dev
    while waiting:
        folder = waiting.popleft()
        if entries > MOST_ENTRIES:
            left_out.append(f"{folder}/")
            continue
        try:
            content = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            left_out.append(f"{folder}/ ({error.strerror})")
            continue
        entries += len(content)
        if folder != root and any(entry.name in ENVIRONMENTS for entry in content):
            continue
        for entry in content:
            path = Path(entry.path)
            try:
                if entry.is_file() and entry.name.endswith((*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)):
                    yield path
                elif _is_importable(entry) and (real := os.path.realpath(path)) not in seen and not is_installed(real):
                    seen.add(real)
                    if entry.stat().st_dev == device:
                        waiting.append(path)
                    else:
                        left_out.append(f"{path}/ (another file system)")
            except (OSError, RuntimeError) as error:  # before Python 3.13, a link to itself is a RuntimeError
                left_out.append(f"{path} ({error})")


def _is_importable(entry: os.DirEntry[str]) -> bool:
    return (
        not entry.name.startswith(HIDDEN)
        and entry.name.isidentifier()
        and entry.is_dir()
        and Path(entry.path).resolve() != PACKAGE
    )


def install(code: UserCode, parent: Path) -> None:
    """Let this process import the modules. All workers of a machine share one copy below `parent`,
    which is private: a user who can write to it decides what a worker runs."""
    folder = private_folder(parent) / hashlib.sha256(code.data).hexdigest()[:32]
    if not folder.is_dir():
        draft = Path(tempfile.mkdtemp(dir=parent))
        try:
            with zipfile.ZipFile(io.BytesIO(code.data)) as archive:
                archive.extractall(draft)
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # another worker was not faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    add_to_path([str(folder / str(number)) for number in range(code.folders)], code.first)


def add_to_path(folders: Sequence[str], first: int) -> None:
    """Add these folders to `sys.path`: the first ones before all others, the rest after them."""
    sys.path[:0] = [folder for folder in folders[:first] if folder not in sys.path]
    sys.path += [folder for folder in folders[first:] if folder not in sys.path]
    importlib.invalidate_caches()
