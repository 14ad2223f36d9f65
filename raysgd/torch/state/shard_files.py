"""Save and load sharded checkpoints, of which each rank writes its own part, with
`torch.distributed.checkpoint`. Both.

A rank writes its part to a folder that all ranks see, or uploads it to a URI itself. The folder
contains the tensors of models and optimizers in the files of each rank, torch's index of them
(`.metadata`), all other content in the outline (`outline.pt`), and the list of its files with their
sizes and digests, as every folder of raysgd has it, written last. Any number of workers can load
it.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.tree import mapped
from raysgd.errors import CheckpointError, causes_of
from raysgd.storage import locations, remote
from raysgd.storage.folders import MARKER, FileEntry, entry_of, entry_of_bytes, read_list
from raysgd.storage.remote import Uri
from raysgd.torch.foreign import with_module_versions
from raysgd.torch.group.fsdp import DIVIDED
from raysgd.torch.registered import Registered
from raysgd.torch.state import states

OUTLINE, INDEX = "outline.pt", ".metadata"
TENSOR = "__tensor__"
INCOMPLETE = "not a complete sharded checkpoint"
Files = dict[str, FileEntry]


class UnreadableTensorsError(CheckpointError):
    """All ranks raise it at the same place."""


# -- the manifest: on the driver, except for `verify` --------------------------------------------------


def read_manifest(where: locations.Place) -> tuple[str, Files]:
    """Read the name of the folder in a checkpoint that has its files, and their entries. Raise
    CheckpointError if it is no sharded checkpoint, or not a complete one."""
    listed = remote.listed(where) if isinstance(where, Uri) else read_list(where)
    if listed is None:
        raise CheckpointError(f"{INCOMPLETE}: {MARKER}, which lists its files, is missing")
    inner = sorted({name.rpartition("/")[0] for name in listed})
    files = {name.rpartition("/")[2]: entry for name, entry in listed.items()}
    if len(inner) != 1 or not inner[0] or not files.keys() >= {OUTLINE, INDEX}:
        raise CheckpointError(f"{INCOMPLETE}: it is a folder with {sorted(listed)[:4] or 'no files'}")
    return inner[0], files


def verify(folder: str, files: Files) -> None:
    """Raise CheckpointError unless these files have the sizes and digests in the manifest."""
    for name, entry in files.items():
        try:
            actual_entry = entry_of(Path(folder) / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error})") from error
        if actual_entry != entry:
            raise CheckpointError(
                f"{name} is damaged: its content does not have the digest that was saved with it. Use another copy of it, "
                "or an older checkpoint"
            )


# -- the content: workers, on all ranks together -------------------------------------------------------


def write(folder: locations.Place, state: dict[str, Any], *, later: bool) -> Callable[[], Files]:
    """Write this rank's part of the tensors, and on rank 0 the outline. Return a function that
    returns the entries of the files written here. With `later`, and to a URI, they are in memory
    until it is called, which may happen in any thread."""
    if isinstance(folder, Path) and not folder.is_dir():
        raise CheckpointError(
            f"the worker on {socket.gethostname()} does not see {folder}, which the driver has made: save(sharded=True) needs a "
            "folder that all workers and the driver share, or a URI"
        )
    tensors: dict[str, torch.Tensor] = {}

    def take_out(value: Any, *path: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = "/".join(map(str, path))
        tensors[key] = value
        return {TENSOR: key}

    outline = {**state, **{part: mapped(take_out, state[part], part) for part in DIVIDED if part in state}}
    rank = dist.get_rank() if dist.is_initialized() else 0
    if later or isinstance(folder, Uri):
        contents = _write_tensors(tensors, "", in_memory=True)
        if rank == 0:
            contents[OUTLINE] = states.dump(outline)
        return partial(_store, folder, contents)
    _write_tensors(tensors, str(folder), in_memory=False)
    written = {name for name in os.listdir(folder) if name.startswith(f"__{rank}_")}
    if rank == 0:
        locations.write(folder / OUTLINE, states.dump(outline))
        written |= {OUTLINE, INDEX}
    return lambda: {name: entry_of(folder / name) for name in sorted(written)}


def _store(folder: locations.Place, contents: dict[str, Any]) -> Files:
    """Write files from memory. A folder that is gone, after a failure, stays so."""
    with tempfile.TemporaryDirectory(prefix="raysgd-shards-") as local:
        for name, data in contents.items():
            path = (folder if isinstance(folder, Path) else Path(local)) / name
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if isinstance(folder, Uri):
                remote.upload(folder / name, path)
                path.unlink()
    return {name: entry_of_bytes(data) for name, data in contents.items()}


class _MemoryFile(io.BytesIO):
    def close(self) -> None:
        """Keep the content."""


def _memory_files(files: dict[str, _MemoryFile]) -> Any:
    """Make what torch's writer uses as a file system, which has only these files, by name."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class _Memory(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            files[Path(path).name] = file = _MemoryFile()
            yield file

        def rename(self, path: Any, new_path: Any) -> None:
            files[Path(new_path).name] = files.pop(Path(path).name)

        def exists(self, path: Any) -> bool:
            return Path(path).name in files

        def mkdir(self, path: Any) -> None:
            """Do nothing: there are no folders."""

    return _Memory()


def _write_tensors(tensors: dict[str, Any], folder: str, *, in_memory: bool) -> dict[str, Any]:
    """Write this rank's tensors. Return its files if they are `in_memory`. Raise an OSError, on all
    ranks, if the system of any rank refused to write, and a CheckpointError for any other
    failure."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    files: dict[str, _MemoryFile] = {}

    class _ShardWriter(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                for cause in causes_of(error):
                    if isinstance(cause, OSError) and cause.errno is not None:
                        raise cause from None  # torch's writer raises another error because of it
                raise

    try:
        writer = _ShardWriter(folder, sync_files=not in_memory)
        if in_memory:
            writer.fs = _memory_files(files)
        with _also_alone() as alone:
            save(tensors, storage_writer=writer, no_dist=alone)
    except CheckpointException as failed:  # not an Exception; all ranks raise the same one
        rank, error = min((rank, wrapped[0]) for rank, wrapped in failed.failures.items())
        where = f"rank {rank} could not write its part of the checkpoint"
        if isinstance(error, OSError) and error.errno in errno.errorcode:
            raise OSError(error.errno, f"{error.strerror} ({where})", folder) from error
        raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error
    return {name: file.getbuffer() for name, file in files.items()}


@contextmanager
def _also_alone() -> Iterator[bool]:
    """Yield whether this worker has no process group: it is alone, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield not dist.is_initialized()


class ShardFolder:
    """Owns the folder from which a rank reads a sharded checkpoint: that of the checkpoint, or a
    temporary one, to which it downloads the files that it needs from a URI."""

    def __init__(self, place: locations.Place, files: Files) -> None:
        self._place, self._files = place, files
        self._temporary = None if isinstance(place, Path) else tempfile.TemporaryDirectory(prefix="raysgd-shards-")
        self.folder = str(place) if self._temporary is None else self._temporary.name

    def verify(self, rank: int, ranks: int) -> None:
        """Verify this rank's share of the files, or what each rank needs before anything else."""
        if self._temporary is None:
            verify(self.folder, {name: self._files[name] for name in sorted(self._files)[rank::ranks]})
        else:
            self.need([OUTLINE, INDEX])

    def need(self, names: Iterable[str]) -> None:
        """Download these files and verify them, if they are not there yet."""
        if isinstance(place := self._place, Path):
            return
        for name in names:
            if not os.path.exists(os.path.join(self.folder, name)):
                remote.fetch(place, name, self._files, Path(self.folder))

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def read_outline(folder: str) -> dict[str, Any]:
    """Read the state with tensors on the "meta" device, to check whether it fits."""
    outline, index = _outline(folder), _index(folder)

    def empty(key: str) -> torch.Tensor:
        return torch.empty(index[key].size, dtype=index[key].properties.dtype, device="meta")

    return {**outline, **{part: _filled(outline[part], empty) for part in DIVIDED if part in outline}}


def read(source: ShardFolder, registered: Registered) -> dict[str, Any]:
    """Read the state, with tensors sharded like those of the operator, which it must fit."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class _ShardReader(FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            source.need(sorted({self.storage_data[each.storage_index].relative_path for each in plan.items}))
            return super().read_data(plan, planner)

    folder = source.folder
    outline = _outline(folder)
    owners = _owners(outline, registered)
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in _index(folder).items():
        size, dtype, owner = entry.size, entry.properties.dtype, owners.get(key)
        if owner is not None and hasattr(owner, "full_tensor") and owner.shape == size:
            tensors[key] = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.zeros(size, dtype=dtype)
    try:
        with _also_alone() as alone:
            load(tensors, storage_reader=_ShardReader(folder), no_dist=alone)
    except CheckpointException as error:  # not an Exception; all ranks raise the same one
        # Its own text has the errors of all ranks, with their tracebacks.
        reasons = [
            f"{type(cause).__name__} on rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items())
        ]
        raise UnreadableTensorsError(f"the tensors cannot be read: {[*reasons, str(error)][0]}") from error
    return {**outline, **{part: _filled(outline[part], tensors.__getitem__) for part in DIVIDED if part in outline}}


def _outline(folder: str) -> dict[str, Any]:
    return states.parse(locations.read(Path(folder) / OUTLINE), trusted=True)


def _index(folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception as error:
        raise CheckpointError(f"{INCOMPLETE}: its index cannot be read ({error})") from error


def _owners(outline: dict[str, Any], registered: Registered) -> dict[str, Any]:
    """Find the tensor or parameter to which each key belongs."""
    owners: dict[str, Any] = {}
    for number, model in enumerate(registered.models):
        owners |= {f"models/{number}/{name}": value for name, value in model.state_dict().items()}
    for number, (optimizer, saved) in enumerate(zip(registered.optimizers, outline["optimizers"], strict=True)):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        keys = [each for group in saved["param_groups"] for each in group["params"]]
        for parameter, key in zip(parameters, keys, strict=True):
            owners |= {f"optimizers/{number}/state/{key}/{name}": parameter for name in saved["state"].get(key, {})}
    return owners


def _filled(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensor(value[TENSOR])
        return with_module_versions({name: _filled(each, tensor) for name, each in value.items()}, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(each, tensor) for each in value)
    return value
