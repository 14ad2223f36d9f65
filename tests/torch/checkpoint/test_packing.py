"""A packed state is the state: every kind of tensor and value, shared memory, and no reference to what training changes."""

from itertools import product
from typing import Any

import numpy
import torch
from torch import nn

from raysgd.torch.state import packing

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def round_trip(state: Any) -> Any:
    return packing.unpack(packing.packed(state))


def test_every_type_and_shape() -> None:
    for dtype, shape in product(DTYPES, [(), (0,), (3,), (2, 0, 4), (5, 7)]):
        tensor = (torch.randn(shape) * 10).to(dtype)
        back = round_trip({"tensor": tensor})["tensor"]
        assert back.dtype == dtype and back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_tensors_that_are_not_contiguous_and_tensors_that_are_not_ordinary() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    parameter = nn.Parameter(torch.ones(2))
    sparse = torch.eye(3).to_sparse()
    marked = torch.ones(1)
    marked.note = "a user's attribute"  # type: ignore[attr-defined]
    back = round_trip(
        [whole.T, whole[::2, 1:3], whole.expand(2, 4, 6), parameter, sparse, marked, torch.ones(1).requires_grad_()]
    )
    assert torch.equal(back[0], whole.T) and torch.equal(back[1], whole[::2, 1:3]) and back[2].shape == (2, 4, 6)
    assert isinstance(back[3], nn.Parameter) and torch.equal(back[3], parameter)
    assert torch.equal(back[4].to_dense(), torch.eye(3))
    assert back[5].note == "a user's attribute" and back[6].requires_grad


def test_tied_weights_are_packed_once_and_stay_tied() -> None:
    tied = torch.randn(1000)
    data = packing.packed({"a": tied.detach(), "b": tied.detach(), "other": tied[:10]})
    assert len(data) < 4000 + 1000
    back = packing.unpack(data)
    assert torch.equal(back["a"], tied) and torch.equal(back["other"], tied[:10])
    back["a"][0] = 7
    assert back["b"][0] == 7
    back["other"][1] = 9
    assert back["a"][1] != 9


def test_training_does_not_change_a_copy_and_the_copy_owns_its_memory() -> None:
    live = torch.zeros(1000)
    counters = {"seen": [1]}
    packed = packing.packed({"live": live, "counters": counters})
    live += 1
    counters["seen"].append(2)
    data = bytes(packed)  # read-only
    back = packing.unpack(data)
    assert back["live"].sum() == 0 and back["counters"] == {"seen": [1]}
    back["live"] += 1
    assert packing.unpack(data)["live"].sum() == 0


def test_arrays_of_numpy_are_copied_and_can_be_changed_afterwards() -> None:
    counts = numpy.zeros(1000)
    packed = packing.packed({"counts": counts, "tensor": torch.ones(3), "frame": [numpy.arange(3)]})
    counts += 1
    back = packing.unpack(packed)
    assert (
        back["counts"].sum() == 0
        and torch.equal(back["tensor"], torch.ones(3))
        and back["frame"][0].tolist() == [0, 1, 2]
    )
    back["counts"] += 1


def test_what_is_on_another_device_is_moved_to_the_cpu() -> None:
    """A device that has no tensors here: `_on_cpu` is given tensors of the CPU."""
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    marked = torch.ones(2).requires_grad_()
    marked.note = 1  # type: ignore[attr-defined]
    moved = packing._on_cpu(marked)
    assert moved.requires_grad and moved.is_leaf and moved.note == 1  # type: ignore[attr-defined]
    assert isinstance(packing._on_cpu(parameter), nn.Parameter) and not packing._on_cpu(parameter).requires_grad
