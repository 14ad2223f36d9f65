"""D: GPUs that break, and memory that runs out, in one of raysgd's workers."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tools.gpu import common
from tools.gpu.notes import Notes, first_line
from tools.gpu.phase_recovery import BEFORE, Net, difference, group, note_recovery, undisturbed

ASSERT, STEP_MEMORY, SETUP_MEMORY = "a device-side assert", "no memory in a step", "no memory in a set-up"
STEP = 7
SETUP_BYTES, LEFT_BYTES = 8 << 30, 4 << 30  # what a replacement needs, and what there is at first


class Breaking(Net):
    """Has the fault of config["fault"] once, on rank 1."""

    def setup(self, config: dict[str, Any]) -> None:
        if config["fault"] == SETUP_MEMORY and Path(config["marks"], BEFORE).exists():  # in a replacement
            Path(config["marks"], "set-up").touch()
            use_memory(Path(config["marks"]))
        super().setup(config)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        fault = self.config["fault"]
        if fault in (ASSERT, STEP_MEMORY) and self.world_rank == 1 and batch_info["global_step"] == STEP:
            mark = Path(self.config["marks"], fault)
            if not mark.exists():
                mark.touch()
                break_gpu() if fault == ASSERT else take_memory(1 << 50)
        return super().train_batch(batch, batch_info)


def break_gpu() -> None:
    """Let an assert of a kernel fail: each later call of CUDA's in this process raises its error."""
    if common.gpus():
        numbers = torch.zeros(2, device="cuda")
        print(numbers[torch.tensor([STEP], device="cuda")].sum().item())
    error = RuntimeError("CUDA error: device-side assert triggered")

    def broken(*_: Any) -> None:
        raise error

    torch.cuda.current_stream = broken  # type: ignore[assignment]
    raise error


def take_memory(count: int) -> torch.Tensor:
    if not common.gpus():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB (emulated)")
    return torch.empty(count, dtype=torch.uint8, device="cuda")


def use_memory(marks: Path) -> None:
    """Need memory that another process has, and gives back a second later."""
    if common.gpus():
        take_memory(SETUP_BYTES)
    elif not (marks / "emulated").exists():
        (marks / "emulated").touch()
        freed_at = time.monotonic() + 1
        torch.cuda.mem_get_info = lambda *_: (int(time.monotonic() > freed_at), 1)
        take_memory(SETUP_BYTES)


def hold_memory(marks: Path) -> threading.Thread:
    """Take the GPU's memory until a replacement has needed it for a second."""
    taken = []
    if common.gpus():
        free = torch.cuda.mem_get_info()[0]
        taken.append(torch.empty(max(0, free - LEFT_BYTES), dtype=torch.uint8, device="cuda"))

    def give_back() -> None:
        while not (marks / "set-up").exists() and marks.exists():
            time.sleep(0.05)
        time.sleep(1)
        taken.clear()
        torch.cuda.empty_cache()

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    return thread


def faults(notes: Notes) -> None:
    for fault in (SETUP_MEMORY, ASSERT, STEP_MEMORY):
        if notes.left() < 5:
            notes.add(fault, "not run", note="no time left")
            continue
        with tempfile.TemporaryDirectory() as marks:
            kills = {BEFORE: STEP} if fault == SETUP_MEMORY else {}
            config = {"fault": fault, "marks": marks, "kills": kills}
            with group(common.group_arguments(), Breaking, config=config) as trainer:
                trainer.apply_all_workers(os.getpid)
                if fault == SETUP_MEMORY:
                    hold_memory(Path(marks))
                see(notes, fault, trainer)


def see(notes: Notes, fault: str, trainer: Any) -> None:
    """Note how a trainer takes a fault: with an error for the user, or a recovery."""
    try:
        trainer.train()
    except Exception as error:
        return notes.add(fault, "the user's error" if fault == STEP_MEMORY else "an error", note=first_line(error))
    differs, _ = difference(trainer, undisturbed(1)[0])
    note_recovery(notes, fault, trainer.recoveries, differs)
    workers = len(trainer.apply_all_workers(os.getpid))
    notes.add(f"{fault}: workers afterwards", workers, note=", ".join(each.reason for each in trainer.recoveries))
