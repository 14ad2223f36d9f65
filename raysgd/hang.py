"""Who is to blame when nothing moves. Pure: it reads reports, it does not ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "RankReport",
    "blocking_ranks",
    "collective_name",
    "describe_rank",
    "describe_unfinished",
    "is_in_collective",
    "is_user_frame",
]

# Where a rank stands when it waits for its peers: (end of the file's path, function), innermost frame first.
COLLECTIVE_FRAMES = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/distributed/distributed_c10d.py", ""),
    ("torch/nn/parallel/distributed.py", ""),
    ("torch/distributed/_functional_collectives.py", ""),
    ("horovod/torch/mpi_ops.py", ""),
    # A step is one graph function, and its sums over the ranks are in it.
    ("tensorflow/python/eager/execute.py", "quick_execute"),
    ("tensorflow/python/ops/gen_collective_ops.py", ""),
)
# Frames of these packages may lie further inside than the collective (logging and timing wrappers); anybody else's
# code, called from there (a hook in the backward pass), is where the rank really is.
FRAMEWORKS = ("/torch/", "/tensorflow/", "/horovod/")
PACKAGE, RAY = str(Path(__file__).resolve().parent), "-packages/ray/"
# Who fell silent within so long of each other, did so together: a listener speaks every second.
TOGETHER_S = 2.5


@dataclass(frozen=True)
class RankReport:
    """What one rank that does not move said when it was asked. `stack` is None when it did not answer at all, and it
    has not said a word for `silent_s`."""

    rank: int | None
    node: str = ""
    phase: str = ""
    batch: int = 0
    stack: tuple[str, ...] | None = None
    silent_s: float = 0.0


def is_in_collective(stack: Sequence[str]) -> bool:
    """Frames are "path:line function" lines, innermost first."""
    for frame in stack:
        place, _, function = frame.rpartition(" ")
        path = place.rpartition(":")[0].replace("\\", "/")
        if any(path.endswith(end) and name in ("", function) for end, name in COLLECTIVE_FRAMES):
            return True
        if not any(framework in path for framework in FRAMEWORKS):
            return False
    return False


# Between two ranks only: these need not be the same on all.
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier")


def collective_name(stack: Sequence[str]) -> str:
    """Return the name of the collective call in which a stack is ("path:line function" lines, innermost first), "" if it is
    in none that all ranks must make."""
    if not is_in_collective(stack):
        return ""
    found = ""
    for frame in stack:  # the outermost function of the library that a user calls: all_gather_object, not all_gather
        place, _, function = frame.rpartition(" ")
        path = place.rpartition(":")[0].replace("\\", "/")
        if path.endswith("torch/distributed/distributed_c10d.py"):
            found = function
        elif any(path.endswith(end) and name in ("", function) for end, name in COLLECTIVE_FRAMES):
            found = found or "backward" if function == "_engine_run_backward" else found or function
        elif is_user_frame(frame):
            break
    return "" if found in BETWEEN_TWO else found


def is_user_frame(frame: str) -> bool:
    """Return whether a line of a stack is neither of a framework, nor of raysgd, nor of Python's own."""
    path = frame.replace("\\", "/")
    inside = path.startswith((PACKAGE, "<")) or RAY in path
    return not inside and not any(framework in path for framework in FRAMEWORKS)


def blocking_ranks(
    reports: Mapping[str, RankReport], *, still_s: float = 0.0, others_failed: bool = False
) -> list[str]:
    """Ranks that hold the others up: those that do not answer; else those outside any collective. `still_s`: for so long
    nothing has moved.

    Who does not answer, but was heard of in the second half of that time, is nobody's culprit yet: a process can be
    silent for seconds on a machine with too much to do. Nor is one that fell silent well after another one: it may only
    suffer from that, and its turn comes if it stays silent.

    When everybody waits in a collective, or nobody does, there is nobody to blame: an empty list. `others_failed`:
    these are the last ones running, the others gave up waiting for them already.
    """
    frozen = [worker for worker, report in reports.items() if report.stack is None]
    if frozen:
        longest = max(reports[worker].silent_s for worker in frozen)
        return [each for each in frozen if reports[each].silent_s >= max(still_s / 2, longest - TOGETHER_S)]
    busy = [worker for worker, report in reports.items() if not is_in_collective(report.stack or ())]
    return busy if others_failed or len(busy) < len(reports) else []


def describe_rank(report: RankReport) -> str:
    """One line (and the stack's top frames) for a log a person reads at night."""
    where = f"rank {report.rank} on {report.node or 'this machine'}, in {report.phase or '?'}, batch {report.batch}"
    if report.stack is None:
        return f"{where}: does not answer (stopped, or its machine is gone)"
    return "\n    ".join([f"{where}, at", *report.stack[:6]])


# What of the user's a verb calls, for messages.
USERS_PART = {
    "prepare": "the initialization hook",
    "build": "its set-up (importing the class, `__init__`, `setup`)",
    "warm": "its set-up (the initialization hook, importing the class, `__init__`, `setup`)",
}
MOST_FRAMES = 20


def describe_unfinished(report: RankReport, verb: str, limit_s: float) -> str:
    """Say what a rank did not finish within a limit, and where it is: its own frames, innermost first."""
    rank = "a replacement worker" if report.rank is None else f"rank {report.rank}"
    where = f"{rank} on node {report.node or '?'}"
    what = USERS_PART.get(verb, f"'{verb}'")
    if report.stack is None:
        return (
            f"{where} does not answer in {what}, since {max(report.silent_s, limit_s):.0f} s (limit {limit_s:g} s): its process is "
            "stopped, or native code holds Python's global interpreter lock. So its stack cannot be shown"
        )
    frames = [frame for frame in report.stack if not frame.startswith("<frozen ")] or list(report.stack)
    while len(frames) > 1 and (frames[-1].startswith(PACKAGE) or RAY in frames[-1]):
        frames.pop()  # what called the user's code
    return "\n    ".join([f"{where} did not finish {what} within {limit_s:g} s. It is at", *frames[:MOST_FRAMES]])
