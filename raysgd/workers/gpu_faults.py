"""Recognize a broken GPU by torch's errors, and wait for memory of one. Worker.

It only asks a torch that this process has imported already, because no other one can have used the
GPU.
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import time
from typing import Any

from raysgd.core.outcomes import GpuFault
from raysgd.errors import causes_of, text_of

logger = logging.getLogger(__name__)

# The errors of CUDA and of its libraries, as torch words them. Most are mistakes in a call, which leave the GPU as it was.
OF_CUDA = re.compile(
    r"\bcu(da|dnn|blas|fft|sparse|solver) error|\bcu\w+_status_\w+|\bxid\b|\becc\b|fallen off the bus|gpu is lost",
    re.IGNORECASE,
)
# Those that end what a kernel does: 700, 702, 710, and 714 to 719.
OF_A_KERNEL = re.compile(
    r"illegal memory access|launch timed out|device-side assert|hardware stack error|illegal instruction|misaligned address"
    r"|invalid (address space|program counter)|unspecified launch failure"
)
NO_MEMORY = "out of memory"  # CUDA's own error, of an allocation that torch's allocator does not make

# A killed process gives back a full card within three seconds.
FREED_WITHIN_S, LOOK_S = 5.0, 0.25


def find_fault(error: BaseException) -> GpuFault | None:
    """Find the fault of the GPU that an error shows, or None for any other error. The GPU is asked
    once more: only an error that stays is a fault."""
    texts = [text_of(each) for each in causes_of(error) if isinstance(each, RuntimeError)]
    if not any(map(_is_of_cuda, texts)):
        return None
    uuid, again = gpu_uuid(), text_of(probe())
    if not _is_of_cuda(again):
        return None
    return GpuFault(uuid, by_kernel=OF_A_KERNEL.search("\n".join([*texts, again])) is not None)


def _is_of_cuda(text: str) -> bool:
    return OF_CUDA.search(text) is not None and NO_MEMORY not in text


def probe() -> BaseException | None:
    """Ask the GPU for the error that it raises now, or None. This does not wait for its kernels:
    one can be a collective call in which the other ranks are not."""
    try:
        _torch().cuda.current_stream().query()
    except Exception as error:
        return error
    return None


def gpu_uuid() -> str:
    """The UUID of this process's GPU as nvidia-smi shows it, or ""."""
    try:
        cuda = _torch().cuda
        return f"GPU-{cuda.get_device_properties(cuda.current_device()).uuid}"
    except Exception as error:  # it is broken, or there is none
        logger.debug("the GPU's UUID is unknown: %s", error)
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, or CUDA itself, has found too little memory on the GPU."""
    torch = _torch()
    if torch is None or not isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in text_of(error)


def wait_for_memory() -> bool:
    """Wait until another process has given back memory of the GPU, and no longer than a few
    seconds. Return whether it has given back any."""
    gc.collect()
    _torch().cuda.empty_cache()
    first = free = free_memory()
    deadline = time.monotonic() + FREED_WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        before, free = free, free_memory()
        if first < before >= free:
            return True  # it has risen, and does not rise any more
    return free > first


def free_memory() -> int:
    """How many bytes of the GPU no process has, 0 if there are too few to ask it."""
    try:
        return int(_torch().cuda.mem_get_info()[0])
    except Exception as error:
        logger.debug("the GPU's free memory is unknown: %s", error)
        return 0


def _torch() -> Any:
    return sys.modules.get("torch")
