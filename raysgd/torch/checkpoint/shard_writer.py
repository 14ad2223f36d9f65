"""Writing the parts of a checkpoint with `torch.distributed.checkpoint`, so that a full disk is told as what it is."""

from __future__ import annotations

import errno
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from raysgd.errors import CheckpointError

__all__ = ["write_parts"]


class _PartWriter(FileSystemWriter):
    """Raises the system's error where torch's writer raises one that follows from it, and forgets it on its way to other
    ranks."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            found = _of_the_system(error)
            if found is None:
                raise
            raise found from None


def _of_the_system(error: BaseException | None) -> OSError | None:
    for _ in range(10):
        if error is None or (isinstance(error, OSError) and error.errno is not None):
            return error
        error = error.__cause__ or error.__context__
    return None


def write_parts(tensors: dict[str, Any], folder: str) -> None:
    """Write this rank's part; every rank must call this. Raise an OSError for what the system of any rank refused, and a
    CheckpointError for anything else."""
    try:
        save(tensors, storage_writer=_PartWriter(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:  # the same on all ranks, and no Exception
        _raise_first(error, folder)


def _raise_first(failed: CheckpointException, folder: str) -> NoReturn:
    rank, error = min((rank, wrapped[0]) for rank, wrapped in failed.failures.items())
    told = f"rank {rank} could not write its part of the checkpoint"
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        raise OSError(error.errno, f"{error.strerror} ({told})", folder) from error
    raise CheckpointError(f"{told}: {type(error).__name__}: {error}") from error
