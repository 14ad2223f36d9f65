"""Copies of the state have the bits of their step; their memory is used again; on a GPU, no step waits for them."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd.torch.state import host_memory, packing, states
from raysgd.torch.state.host_memory import HostMemory

CPU = torch.device("cpu")


class Device:
    """A stand-in for torch.cuda, whose stream has done what was launched when the test says so."""

    def __init__(self) -> None:
        self.computed = threading.Event()

    def current_stream(self, device: torch.device) -> "Device":
        return self

    stream: Any = contextlib.nullcontext

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 0, 1

    def record_event(self) -> "Device":
        return self

    def synchronize(self) -> None:
        assert self.computed.wait(60)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(host_memory, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    found = Device()
    yield found
    found.computed.set()


def model() -> dict[str, Any]:
    return {"weight": torch.arange(1000.0), "steps": torch.tensor(7), "empty": torch.zeros(0), "kept": [1, "a"]}


def test_a_device_without_memory_for_copies_copies_to_the_host(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch can have a limit of its own, which is not that of the device."""

    def on_device(layout: packing.Layout, device: torch.device) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(packing.Layout, "on_device", on_device)
    monkeypatch.setattr(Device, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    device.computed.set()
    with HostMemory(CPU, device).copy(packing.pack(model())) as (content,):
        assert torch.equal(packing.unpack(content)["weight"], torch.arange(1000.0))


def test_later_steps_do_not_change_a_copy_and_its_memory_is_used_again() -> None:
    memory, state = HostMemory(CPU), model()
    copies = [memory.copy(packing.pack(state)) for _ in range(2)]
    state["weight"].zero_()
    state["kept"].clear()
    assert copies[0].room.data_ptr() != copies[1].room.data_ptr(), "both are needed at once"
    for copy in copies:
        with copy as (content,):
            back = packing.unpack(content)
        assert torch.equal(back["weight"], torch.arange(1000.0)) and back["steps"] == 7 and back["kept"] == [1, "a"]
    again = memory.copy(packing.pack(state))
    assert again.room.data_ptr() == copies[1].room.data_ptr()
    with again as (content,):
        assert packing.unpack(content)["weight"].sum() == 0
    assert memory.copy(packing.pack({"weight": torch.ones(10000)})).size > 40000


def test_a_copy_that_is_written_as_a_file_has_tensors_with_memory_of_their_own() -> None:
    tied, rows = torch.ones(3), torch.arange(6.0).reshape(2, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    own = {"p": parameter, "empty": torch.zeros(0), "n": torch.nested.nested_tensor([tied, rows[0, :2]])}
    state = {"models": [{"a": tied, "b": tied, "t": rows.T}], "operator": own}
    unchanged, copy = states.unchanging(state, HostMemory(CPU), in_shards=False)
    expected = rows.T.clone()
    for each in (tied, rows, parameter.data):
        each.zero_()
    found = unchanged["models"][0]
    assert found["a"] is found["b"] and torch.equal(found["a"], torch.ones(3)) and torch.equal(found["t"], expected)
    assert found["a"].untyped_storage().data_ptr() != found["t"].untyped_storage().data_ptr()
    assert isinstance(unchanged["operator"]["p"], torch.nn.Parameter) and unchanged["operator"]["p"].sum() == 2
    assert copy.size <= 2 * packing.ALIGNED, "only ordinary tensors are in the one buffer"


def test_only_another_thread_waits_for_a_gpu(device: Device) -> None:
    copy = HostMemory(CPU, device).copy(packing.pack(model()))  # returns although the device has not copied
    seen: list[Any] = []

    def pack() -> None:
        with copy as (content,):
            seen.append(packing.unpack(content))

    thread = threading.Thread(target=pack)
    thread.start()
    thread.join(0.1)
    assert not seen
    device.computed.set()
    thread.join(60)
    assert torch.equal(seen[0]["weight"], torch.arange(1000.0))


@pytest.mark.parametrize("device", [torch.device("cuda:0"), CPU])
def test_only_what_is_on_the_device_is_copied_later(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """An event of one GPU tells nothing about another one."""
    later: list[bool] = []
    copy = torch.Tensor.copy_

    def seen(into: Any, source: Any, non_blocking: bool = False) -> Any:
        later.append(non_blocking)
        return copy(into, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    layout = packing.pack(model())
    layout.copy_to(torch.empty(layout.size, dtype=torch.uint8), later=device)
    assert later == [device == CPU] * 2
    assert len(layout.on_device(device)) == (3 if device == CPU else 0)


@pytest.mark.gpu
def test_a_gpu_copies_between_two_steps_and_the_host_launches_on() -> None:
    memory = HostMemory(torch.device("cuda:0"))
    weight = torch.zeros(1 << 26, device="cuda")
    with memory.copy(packing.pack({"weight": weight})):
        pass  # now its memory is there
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 28)
        weight.add_(1)
        copy = memory.copy(packing.pack({"weight": weight, "turned": weight[:9].view(3, 3).T}))
        busy = not copy._copied.query()
        weight.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with copy as (content,):
        back = packing.unpack(content)
    assert busy and torch.equal(back["weight"], torch.ones(1 << 26)) and back["turned"].shape == (3, 3)
    assert float(weight[0]) == 2


def test_a_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        state = {"weight": torch.ones(3, device=CPU)}
        with HostMemory(CPU).copy(packing.pack(state)) as (content,):
            for whole in (content, packing.packed(state)):
                assert torch.equal(packing.unpack(whole)["weight"], state["weight"])
