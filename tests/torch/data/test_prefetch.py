"""Prefetching to the device: one batch in advance, never more than the call needs, and complete when it is returned."""

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOptions
from raysgd.replica.steps.feed import Carrier, Reader
from raysgd.replica.steps.step import Drawn
from raysgd.torch.data import prefetch
from raysgd.torch.data.prefetch import CudaCarrier, DeviceCarrier, make_carrier
from tests.torch.small import Line, inline

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


class Streams:
    """A stand-in for torch.cuda's streams, which records calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def Stream(self, device: torch.device) -> "Streams":
        return self

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.events.append("beside")
        yield
        self.events.append("back")

    def record_event(self, event: str | None = None) -> str:
        self.events.append("copied")
        return "event"

    def current_stream(self, device: torch.device) -> "Streams":
        return self

    def wait_event(self, event: str) -> None:
        self.events.append("wait")


class Own:
    def to(self, device: torch.device) -> str:
        return f"on {device}"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    paper = Streams()
    monkeypatch.setattr(prefetch, "_pinned", lambda tensor: paper.events.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: paper.events.append("claim"))
    return paper


def drawn(count: int, log: list[int]) -> Iterator[Drawn]:
    for number in range(count):
        log.append(number)
        yield Drawn(number, number + 1)


def test_copies_run_on_their_own_stream_and_only_the_stream_waits(streams: Streams) -> None:
    carrier = CudaCarrier(CPU, streams=streams)
    carrier._moves = True
    sent = carrier.send((torch.ones(2), {"y": [torch.zeros(1)]}, Own(), "text"))
    assert streams.events == ["beside", "pin", "pin", "copied", "back"]
    batch = carrier.arrived(sent)
    assert streams.events[5:] == ["wait", "claim", "claim"]
    assert torch.equal(batch[0], torch.ones(2)) and batch[2:] == ("on cpu", "text")


def test_containers_keep_their_kind(streams: Streams) -> None:
    carrier = CudaCarrier(CPU, streams=streams)
    batch = carrier.arrived(carrier.send(Point(torch.ones(1), [torch.zeros(1)])))
    assert isinstance(batch, Point) and isinstance(batch.y, list)


def test_tensors_that_are_not_dense_move_when_the_batch_is_needed(streams: Streams) -> None:
    """Torch registers only dense memory with a stream."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    carrier = CudaCarrier(CPU, streams=streams)
    sent = carrier.send([torch.eye(3).to_sparse(), ragged, torch.ones(1)])
    assert streams.events == ["beside", "pin", "copied", "back"]
    sparse, nested, _ = carrier.arrived(sent)
    assert streams.events[4:] == ["wait", "claim"]
    assert sparse.is_sparse and nested.is_nested


def arrived(carrier: CudaCarrier, rows: int = 2) -> Any:
    return carrier.arrived(carrier.send({"x": torch.ones(rows, 3), "y": torch.zeros(rows)}))


def places(batch: Any) -> list[int]:
    """Return where the memory is of a batch's tensors."""
    return [each.untyped_storage()._cdata for each in batch.values()]


def test_memory_is_used_again_when_nobody_holds_the_batch(streams: Streams) -> None:
    carrier = CudaCarrier(torch.device("meta"), streams=streams)
    seen = [places(arrived(carrier)) for _ in range(9)]
    assert seen[3:6] == seen[:3] == seen[6:] and len({each for some in seen for each in some}) == 6
    assert streams.events.count("claim") == 6
    # The copy waits for the event that the memory's last use was before; then the event is for that of an earlier batch.
    assert streams.events[-8:] == ["beside", "wait", "pin", "pin", "copied", "back", "wait", "copied"]


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "view": lambda x: x[1:].view(3, 1),
    "storage": lambda x: x.untyped_storage(),
    "autograd": lambda x: x * torch.ones(3, device="meta", requires_grad=True),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_is_held_is_left_to_its_users(streams: Streams, holder: str) -> None:
    carrier = CudaCarrier(torch.device("meta"), streams=streams)
    batch = arrived(carrier)
    kept = [HOLDERS[holder](batch["x"])]
    del batch
    for _ in range(2):
        arrived(carrier)
    kept.clear()  # after the look: what uses it may have been launched since then
    for _ in range(6):
        arrived(carrier)
    assert streams.events.count("claim") == 2 * 3 + 1, "only that of the tensor which was held is new"


def test_a_batch_of_another_size_has_memory_of_its_own(streams: Streams) -> None:
    carrier = CudaCarrier(torch.device("meta"), streams=streams)
    sizes = [2, 2, 2, 1, 2, 2, 2]
    assert [len(arrived(carrier, rows)["x"]) for rows in sizes] == sizes
    assert streams.events.count("claim") == 2 * (3 + 1 + 1)


def test_memory_is_not_used_again_if_another_stream_works_with_the_next_batches(streams: Streams) -> None:
    carrier = CudaCarrier(torch.device("meta"), streams=streams)
    for _ in range(2):
        arrived(carrier)
    carrier._streams = Streams()
    for _ in range(9):
        arrived(carrier)
    on_the_first = 2
    assert streams.events.count("wait") == on_the_first + 9 - 3, "three have new memory"


def test_one_batch_is_drawn_ahead_and_the_last_is_known() -> None:
    log: list[int] = []
    ahead = Reader(drawn(3, log), Carrier(), ahead=True)
    seen = [(each.batch, ahead.last, len(log)) for each in iter(ahead.read, None)]
    assert seen == [(0, False, 2), (1, False, 3), (2, True, 3)]


def test_no_more_batches_are_drawn_than_the_call_needs() -> None:
    for most in (0, 1, 2):
        log: list[int] = []
        ahead = Reader(drawn(3, log), Carrier(), most, ahead=True)
        seen = [(each.batch, ahead.last) for each in iter(ahead.read, None)]
        assert [number for number, _ in seen] == log == list(range(most))
        assert [last for _, last in seen] == [False] * (most - 1) + [True] * (most > 0)


def test_an_error_in_the_data_is_raised_once_and_no_batch_is_repeated() -> None:
    def broken() -> Iterator[Drawn]:
        yield Drawn("first", 1)
        raise OSError("disk")

    ahead = Reader(broken(), Carrier(), ahead=True)
    first = ahead.read()
    assert first is not None and first.batch == "first" and not ahead.last
    with pytest.raises(OSError, match="disk"):
        ahead.read()
    assert ahead.read() is None


class Pictures(Line):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": DataLoader(TensorDataset(torch.randn(512, 64), torch.randn(512, 1)), batch_size=8)}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        assert all(part.is_cuda for part in batch)
        return super().train_batch(batch, batch_info)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_waits_for_the_device_in_an_epoch(precision: str) -> None:
    with inline(Pictures, use_gpu=True, options=TrainingOptions(precision=precision, clip_norm=1.0)) as trainer:
        trainer.train()  # the first batches may allocate, which waits

        def strict(operator: Any) -> None:
            inner = operator.train_batch

            def watched(batch: Any, batch_info: dict[str, Any]) -> Any:
                torch.cuda.set_sync_debug_mode("error" if batch_info["batch_idx"] < 60 else "default")
                return inner(batch, batch_info)

            operator.train_batch = watched

        trainer.apply_all_operators(strict)
        try:
            assert trainer.train()["batch_count"] == 64
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_uses_a_stream_and_gets_the_right_numbers() -> None:
    device = torch.device("cuda:0")
    carrier = make_carrier(device, channels_last=True)
    assert isinstance(carrier, CudaCarrier)
    batches = [torch.full((4, 3, 8, 8), float(number)) for number in range(8)]
    reader = Reader((Drawn(batch, 0) for batch in batches), carrier, ahead=True)
    sums = []
    for each in iter(reader.read, None):
        assert each.batch.device == device and each.batch.is_contiguous(memory_format=torch.channels_last)
        torch.cuda._sleep(1 << 22)  # so that the device is behind
        sums.append(each.batch.sum())
    assert torch.stack(sums).tolist() == [number * batches[0].numel() for number in range(8)]


def test_without_reading_ahead_batches_are_sent_when_they_are_needed() -> None:
    carrier = make_carrier(torch.device("cuda"), channels_last=False, ahead=False)
    assert type(carrier) is DeviceCarrier and not carrier.ahead


@pytest.mark.parametrize("given", [{"reuse": False}, {"channels_last": True}])
def test_memory_is_not_used_again_where_user_code_has_the_batches_or_the_step_has_copies(
    streams: Streams, given: dict[str, bool]
) -> None:
    carrier = CudaCarrier(torch.device("meta"), streams=streams, **given)
    for _ in range(9):
        arrived(carrier)
    assert streams.events.count("claim") == 2 * 9
