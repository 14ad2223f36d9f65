"""A device that computes later has no wait in an epoch, few launches more than by hand, and the numbers of the CPU."""

import json
from typing import Any

import pytest

from raysgd.core.hang import is_in_collective
from tests.background import Background

COUNTING = 5  # launches that count what a criterion with weights of classes is a mean over
READS = "copy to the host in torch/meters.py _read"
# More launches per step than by hand (one is the copy of the loss, which a meter keeps), and waits per step.
TABLE: dict[str, tuple[float, dict[str, float]]] = {
    "SGD": (1, {}),
    "Adam": (1, {}),
    "Adam, fused": (1, {}),
    "bf16": (1, {}),
    "fp16": (5, {"item in torch/step/precision.py step": 1}),  # torch's scaler waits, too
    "clip_norm": (1, {}),
    "on_nonfinite": (8, {"item in torch/step/skipped_steps.py _are_finite": 1}),
    "accumulate": (7.5, {}),  # the others are for what its batch counts in the window, and a copy of its metrics
    "accumulate, bf16": (9.5, {}),  # counts weigh each gradient, and not the loss
    "prefetch": (1, {}),
}


@pytest.fixture(scope="module")
def found(background: Background) -> dict[str, Any]:
    """Return what `late_runs.py` has printed."""
    done = background.run("-m", "tests.emulated.late_runs")
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def test_launches_and_waits_per_step(found: dict[str, Any]) -> None:
    cases = found["cases"]
    assert {
        name: (each["launches"] - each["by_hand"] - COUNTING, each["waits"]) for name, each in cases.items()
    } == TABLE
    assert {name: each["validation"][1] for name, each in cases.items()} == {name: {} for name in TABLE}
    # A call's numbers are read together when it ends.
    own = {"fp16": {"item in torch/step/precision.py skipped": 1}}
    assert {name: each["end"] for name, each in cases.items()} == {
        name: {READS: 1} | TABLE[name][1] | own.get(name, {}) for name in TABLE
    }


def test_the_weights_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    assert {name: each["difference"] for name, each in found["cases"].items()} == pytest.approx(
        dict.fromkeys(TABLE, 0.0), abs=1e-6
    )


def test_only_an_event_orders_two_streams(found: dict[str, Any]) -> None:
    assert found["streams"] == {"nothing": [1, 1, 0, 0], "event": [1, 1, 1, 1], "stream": [1, 1, 1, 1]}


def test_no_batch_is_overwritten_although_memory_is_used_again(found: dict[str, Any]) -> None:
    """In each epoch only the smaller last batch, and the next, have new memory; and those that user code still holds."""
    allocated = {name: each["allocated"][1:] for name, each in found["batches"].items()}
    assert allocated == {"usual": [4, 4], "accumulate": [4, 4], "two back": [50, 50]}
    assert {each["difference"] for each in found["batches"].values()} == {0.0}


def test_raysgd_moves_all_that_it_should(found: dict[str, Any]) -> None:
    """A state that one device has saved continues on the other, with models, buffers and moments there."""
    assert found["moved"]["differences"] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert "on the same device, got late:0 and cpu" in found["moved"]["refused"]


def test_buffers_are_kept_with_a_launch_for_each_type(found: dict[str, Any]) -> None:
    assert found["kept_buffers"] == {"launches": 2, "sums": [0.0, 4.0, 0.0]}


def test_the_next_batch_is_read_when_a_backward_pass_is_launched(found: dict[str, Any]) -> None:
    """Not where code of the user runs after that; and the last batch of a call reads none."""
    usual = "read forward backward read step forward backward read step forward backward"
    in_turn = " ".join(["read forward backward step"] * 7)
    own = "read read forward backward step read forward backward step"
    end = "forward backward step"
    assert found["reading"] == {
        "usual": f"{usual} read step {end} {usual} step",
        "own train_batch": f"{own} read {end} {end} {own} {end}",
        "read_ahead=False": in_turn,
        "difference": 0.0,
    }


def test_a_copy_of_the_state_waits_on_the_device_and_has_the_bits_of_its_step(found: dict[str, Any]) -> None:
    copied = found["copied_beside"]
    assert (
        copied["between"] and not copied["done"] and (copied["waits"], copied["copied"], copied["saved"]) == ({}, 0, 0)
    )


def test_steps_do_not_wait_until_the_state_is_on_the_host(found: dict[str, Any]) -> None:
    copied = found["copied_beside"]
    assert [copied[name] for name in ("late", "trained", "stayed")] == [True, True, 0.0]


def test_a_snapshot_has_what_its_step_has_made_although_others_were_launched(found: dict[str, Any]) -> None:
    """While the device works on the first one, only the newest waits."""
    own = found["snapshots"]
    assert own["early"] == 0 and own["steps"][0] == 1 and own["steps"][-1] == 4
    assert own["difference"] == pytest.approx(0.0, abs=1e-6)


def test_one_worker_may_be_far_ahead_of_its_device(found: dict[str, Any]) -> None:
    """Without peers, no step can be cut off."""
    assert found["hung"]["committed"] > 20 and found["hung"]["done"] == 0
    assert found["hung"]["difference"] == pytest.approx(0.0, abs=1e-6)


def test_a_rank_that_waits_for_its_device_is_in_a_collective_call(found: dict[str, Any]) -> None:
    assert is_in_collective(found["waiting"]), found["waiting"]


def test_an_error_of_the_device_comes_again(found: dict[str, Any]) -> None:
    error = ["AcceleratorError", "CUDA error: an illegal memory access was encountered"]
    assert found["broken"] == {"step": error, "later": error}
