"""Which ranks block the others when a call makes no progress."""

from pathlib import Path

import pytest

import raysgd
from raysgd.core.hang import PACKAGE, RankReport, blocking_ranks, describe_rank, is_in_collective
from raysgd.workers.control_client import ControlClient

WAITS = (
    "/x/torch/autograd/graph.py:824 _engine_run_backward",
    "/x/torch/_tensor.py:1 backward",
    "/u/op.py:3 train_batch",
)
GATHERS = ("/x/torch/distributed/distributed_c10d.py:4 all_gather", "/u/op.py:3 train_batch")
ON_DEVICE = (
    "/x/torch/cuda/streams.py:105 synchronize",
    "/x/raysgd/torch/group/nccl.py:60 wait_for_device",
    "/x/raysgd/torch/step/whole_gradients.py:50 check",
    "/u/op.py:3 train_batch",
)
waiting = ControlClient._is_answered.__code__
REPORTS = (f"{waiting.co_filename}:160 {waiting.co_name}", "/u/function.py:3 loop")
BUSY = ("/u/op.py:9 sleep_forever", "/u/op.py:3 train_batch", "/x/torch/autograd/graph.py:824 _engine_run_backward")

CASES = {
    "one does not answer": ([WAITS, None, WAITS], [1]),
    "two do not answer": ([None, WAITS, None], [0, 2]),
    "one is outside": ([GATHERS, WAITS, BUSY], [2]),
    "one is outside, and the others wait for their devices": ([ON_DEVICE, BUSY, ON_DEVICE], [1]),
    "one is outside, and the others wait in a report": ([REPORTS, BUSY, GATHERS], [1]),
    "all wait": ([WAITS, GATHERS], []),
    "no rank waits": ([BUSY, BUSY], []),
    "silence counts before being busy": ([BUSY, None, WAITS], [1]),
}


def reports(stacks: list) -> dict[str, RankReport]:
    return {str(rank): RankReport(rank=rank, stack=stack) for rank, stack in enumerate(stacks)}


@pytest.mark.parametrize(("stacks", "blocking"), CASES.values(), ids=CASES)
def test_ranks_that_block_the_others(stacks: list, blocking: list[int]) -> None:
    assert blocking_ranks(reports(stacks)) == [str(rank) for rank in blocking]


@pytest.mark.parametrize(
    ("silent", "blocking"),
    [((11.0, 11.4, 0.2), ["0", "1"]), ((2.6, 0.1, 0.2), []), ((5.1, 0.1, 0.2), ["0"]), ((9.6, 5.1, 0.2), ["0"])],
    ids=["two are stopped", "a short silence", "half of the time", "one after the other"],
)
def test_a_short_silence_does_not_count(silent: tuple[float, ...], blocking: list[str]) -> None:
    reported = {
        str(rank): RankReport(rank, stack=WAITS if s < 2.5 else None, silent_s=s) for rank, s in enumerate(silent)
    }
    assert blocking_ranks(reported, still_s=10.0) == blocking


def test_the_last_running_rank_blocks_when_the_others_have_failed() -> None:
    assert blocking_ranks(reports([BUSY])) == []
    assert blocking_ranks(reports([BUSY]), others_failed=True) == ["0"]
    assert blocking_ranks(reports([WAITS]), others_failed=True) == []


def test_only_the_innermost_frames_count() -> None:
    assert is_in_collective(WAITS) and is_in_collective(GATHERS)
    assert is_in_collective(("/x/torch/distributed/c10d_logger.py:83 wrapper", *GATHERS))
    assert not is_in_collective(("/u/hook.py:1 a_hook_in_the_backward_pass", *WAITS))
    assert not is_in_collective(("/x/torch/autograd/graph.py:10 something_else",))
    assert not is_in_collective(())


def test_a_call_between_two_ranks_is_none_of_all() -> None:
    assert is_in_collective(GATHERS, of_all=True) and is_in_collective(ON_DEVICE, of_all=True)
    receives = ("/x/torch/distributed/distributed_c10d.py:4 recv", "/u/op.py:3 train_batch")
    assert is_in_collective(receives) and not is_in_collective(receives, of_all=True)


def test_a_description_has_rank_node_phase_and_stack() -> None:
    line = describe_rank(RankReport(rank=3, node="abc", phase="a batch", batch=17, stack=BUSY))
    assert line.startswith("rank 3 on abc, in a batch, batch 17, at\n") and "sleep_forever" in line
    assert "does not answer" in describe_rank(RankReport(rank=1))


def test_a_description_shows_the_users_lines_behind_those_of_libraries() -> None:
    """DistributedDataParallel sends the buffers of BatchNorm in its forward pass, below which there are eight frames."""
    torch = [f"/x/torch/nn/parallel/distributed.py:{line} f" for line in range(8)]
    users, caller = "/u/train.py:31 train_batch", "/u/train.py:9 helper"
    stack = (
        *torch,
        users,
        f"{PACKAGE}/replica/step.py:3 g",
        caller,
        f"{PACKAGE}/workers/actor.py:5 run",
        "/p/threading.py:1 run",
    )
    lines = describe_rank(RankReport(rank=0, stack=stack)).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        torch[0],
        "[7 frames of libraries]",
        users,
        "[1 frame of libraries]",
        caller,
    ]
    users_alone = describe_rank(RankReport(rank=0, stack=(users, f"{PACKAGE}/replica/step.py:3 g"))).splitlines()
    assert [line.strip() for line in users_alone[1:]] == [users]
    assert describe_rank(RankReport(rank=0, stack=tuple(torch))).count("\n") == 6


def test_the_librarys_own_frames_are_recognized() -> None:
    assert str(Path(raysgd.__file__).resolve().parent) == PACKAGE
