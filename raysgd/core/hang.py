"""Find the ranks that block the others when a call makes no progress. Pure. Both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from raysgd.errors import counted

# Frames of a rank that is waiting for its peers: (end of the file's path, function; "" for any function).
COLLECTIVE_FRAMES = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/distributed/distributed_c10d.py", ""),
    ("torch/nn/parallel/distributed.py", ""),
    ("torch/distributed/_functional_collectives.py", ""),
    ("horovod/torch/mpi_ops.py", ""),
    # A report of a training function returns when the other ranks have reported, too.
    ("raysgd/workers/control_client.py", "_is_answered"),
    # The device, which makes NCCL's calls, is behind the host: before each step, a rank waits for its peers here.
    ("raysgd/torch/group/nccl.py", "wait_for_device"),
    # TensorFlow runs a step as one graph function, which contains the all-reduce.
    ("tensorflow/python/eager/execute.py", "quick_execute"),
    ("tensorflow/python/ops/gen_collective_ops.py", ""),
)
BETWEEN_TWO = ("send", "recv")  # functions of these in which a rank waits for one other, and which gloo counts, too
# A collective's frame can call other functions of these packages (logging and timing wrappers). If it calls any other
# code (a hook in the backward pass), the rank is busy in that code.
FRAMEWORKS = ("/torch/", "/tensorflow/", "/horovod/")
PACKAGE, RAY = str(Path(__file__).resolve().parent.parent), "-packages/ray/"
# Each worker sends "alive" every second. Workers whose last messages are this close together stopped sending together.
TOGETHER_S = 2.5
MOST_FRAMES, SHOWN_FRAMES = 20, 6

# The part of the user's code that a verb calls, for messages.
USERS_PART = {
    "prepare": "the initialization hook",
    "build": "its set-up (importing the class, `__init__`, `setup`)",
    "warm": "its set-up (the initialization hook, importing the class, `__init__`, `setup`)",
}


@dataclass(frozen=True)
class RankReport:
    """What one rank reported when the driver asked where it is. `stack` is None if it did not
    answer. `silent_s` is how long it has sent nothing."""

    rank: int | None
    node: str = ""
    phase: str = ""
    batch: int = 0
    stack: tuple[str, ...] | None = None
    silent_s: float = 0.0


def is_in_collective(stack: Sequence[str], *, of_all: bool = False) -> bool:
    """Whether a stack ("path:line function", innermost first) is in a collective call; `of_all`, in
    one that all ranks must make."""
    for frame in stack:
        place, _, function = frame.rpartition(" ")
        path = place.rpartition(":")[0]
        if any(path.endswith(end) and name in ("", function) for end, name in COLLECTIVE_FRAMES):
            return not (of_all and function in BETWEEN_TWO)
        if not any(framework in path for framework in FRAMEWORKS):
            return False
    return False


def is_user_frame(frame: str) -> bool:
    """Whether a frame belongs neither to a framework nor to raysgd, Ray or Python."""
    inside = frame.startswith((PACKAGE, "<")) or RAY in frame
    return not inside and not any(framework in frame for framework in FRAMEWORKS)


def blocking_ranks(
    reports: Mapping[str, RankReport], *, still_s: float = 0.0, others_failed: bool = False
) -> list[str]:
    """Find the ranks that block the others: those that do not answer, or, if all answer, those
    outside any collective. There has been no progress for `still_s`.

    A rank that does not answer, but sent something in the second half of that time, does not count
    yet, because on an overloaded machine a process can be silent for seconds. Neither does a rank
    that stopped sending well after another one, which may be the cause. Both count later if they
    stay silent.

    Return an empty list if all ranks are in a collective, or none is: then nothing shows which one
    blocks the others. With `others_failed`, the ranks that waited for these have failed already, so
    every rank outside a collective counts."""
    frozen = [worker for worker, report in reports.items() if report.stack is None]
    if frozen:
        longest = max(reports[worker].silent_s for worker in frozen)
        return [each for each in frozen if reports[each].silent_s >= max(still_s / 2, longest - TOGETHER_S)]
    busy = [worker for worker, report in reports.items() if not is_in_collective(report.stack or ())]
    return busy if others_failed or len(busy) < len(reports) else []


def describe_rank(report: RankReport) -> str:
    """Say where a rank is: a line for the log, and the innermost frames of its stack."""
    where = f"rank {report.rank} on {report.node or 'this machine'}, in {report.phase or '?'}, batch {report.batch}"
    if report.stack is None:
        return f"{where}: does not answer (its process is stopped, or its machine has failed)"
    return "\n    ".join([f"{where}, at", *_folded(report.stack)])


def _folded(stack: Sequence[str]) -> list[str]:
    """Find the innermost frame and the user's ones, and how many of libraries are between them;
    without frames of the user, the innermost ones."""
    frames = _within(stack)
    indices = [index for index, frame in enumerate(frames) if is_user_frame(frame)][:SHOWN_FRAMES]
    if not indices:
        return frames[:SHOWN_FRAMES]
    indices = indices[1:] if indices[0] == 0 else indices
    shown = frames[:1]
    for before, index in pairwise((0, *indices)):
        shown += [f"[{counted(index - before - 1, 'frame')} of libraries]"] if index - before > 1 else []
        shown.append(frames[index])
    return shown


def _within(stack: Sequence[str]) -> list[str]:
    """The frames of a stack without what called raysgd."""
    frames = [frame for frame in stack if not frame.startswith("<frozen ")] or list(stack)
    outermost = max((index for index, frame in enumerate(frames) if frame.startswith(PACKAGE)), default=len(frames) - 1)
    return frames[: outermost + 1]


def describe_slow(report: RankReport, verb: str, seconds: float, limit_s: float) -> str:
    """Say that a rank is still in its set-up, and where it is."""
    rank = "a replacement worker" if report.rank is None else f"rank {report.rank}"
    where = (
        f"{rank} on node {report.node or '?'} has been in {USERS_PART[verb]} for {seconds:.0f} s (limit {limit_s:g} s)"
    )
    if report.stack is None:
        return f"{where}, and does not answer"
    return "\n    ".join([f"{where}. It is at", *_folded(report.stack)])


def describe_unfinished(report: RankReport, verb: str, limit_s: float) -> str:
    """Say what a rank did not finish in time, and where it is: the user's frames."""
    rank = "a replacement worker" if report.rank is None else f"rank {report.rank}"
    where = f"{rank} on node {report.node or '?'}"
    what = USERS_PART.get(verb, f"'{verb}'")
    if report.stack is None:
        return (
            f"{where} has not answered for {max(report.silent_s, limit_s):.0f} s (limit {limit_s:g} s) in {what}: its process "
            "is stopped, or native code holds Python's global interpreter lock. Its stack cannot be shown"
        )
    frames = _within(report.stack)
    while len(frames) > 1 and (frames[-1].startswith(PACKAGE) or RAY in frames[-1]):
        frames.pop()  # raysgd's and Ray's frames that called the user's code
    return "\n    ".join([f"{where} did not finish {what} within {limit_s:g} s. It is at", *frames[:MOST_FRAMES]])
