"""Recognize that memory has run out, and make room for another attempt. Worker."""

from __future__ import annotations

import gc
import traceback

import torch

from raysgd.errors import TrainingFailedError, causes_of, described

__all__ = ["exhausted", "is_out_of_memory", "make_room"]

# The texts of torch's allocator for CPUs on Linux and Windows, and of cuBLAS.
TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "STATUS_ALLOC_FAILED")
ADVICE = (
    "Use a smaller model, precision='bf16', an optimizer with less state or parallel='fsdp', or a machine with more memory. Other "
    "processes may also use this one's."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory could not be allocated, on a GPU or for the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)


def make_room(error: BaseException) -> None:
    """Free what the frames of this error hold, and what torch keeps for later tensors."""
    for each in causes_of(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def exhausted(what: str, error: BaseException) -> TrainingFailedError:
    """Return the error about memory that is too small, whatever the size of the pieces."""
    return TrainingFailedError(f"out of memory {what}: {described(error).splitlines()[0]}. {ADVICE}")
