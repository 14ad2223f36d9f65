"""A copy of models that is sent as bytes: it is what a deep copy is, and its weights are not pickled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from raysgd.torch.state import models
from raysgd.workers.calls import pickle_in_parts, unpickle_parts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.embed.requires_grad_(False)
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("turned", torch.randn(4, 6).t())
        self.scale = torch.tensor(2.0)  # neither a weight nor a buffer
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Own(nn.Module):
    """Copies itself, and looks at its weights for that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0))

    def __deepcopy__(self, memo: Any) -> Own:
        made = Own()
        made.weight.data.copy_(self.weight.data)
        return made


def sent(*given: nn.Module) -> list[Any]:
    packed, large = pickle_in_parts(models.packed_models(given, pickle.dumps), pickle.dumps)
    return models.unpacked_models(unpickle_parts(packed, [bytearray(each) for each in large]))


def described(model: nn.Module) -> dict[str, Any]:
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: (each.requires_grad, each.stride(), each.dtype, type(each)) for name, each in named.items()}


def test_it_is_what_a_deep_copy_is() -> None:
    net = Net()
    (found,) = sent(net)
    expected = copy.deepcopy(net).eval()
    assert described(found) == described(expected)
    for name, value in {**expected.state_dict(), "noise": expected.noise}.items():
        assert torch.equal({**found.state_dict(), "noise": found.noise}[name], value), name
    assert found.head.weight is found.embed.weight and found.scale == 2 and not found.training and net.training
    inputs = torch.randn(5, 2, 4)
    assert torch.equal(found.lstm(inputs)[0], expected.lstm(inputs)[0])
    with torch.no_grad():
        found.conv.weight.add_(1)
        found.noise.add_(1)
    assert not torch.equal(found.conv.weight, net.conv.weight)
    assert torch.equal(net.conv.weight, expected.conv.weight)


def test_weights_are_not_in_the_pickle() -> None:
    large = nn.Linear(512, 512)
    content, *tensors = models.packed_models([large], pickle.dumps).data
    assert len(content) < 10_000 and [each.nbytes for each in tensors] == [4 * 512 * 512, 4 * 512]


def test_weights_are_sent_as_they_are() -> None:
    large = nn.Linear(512, 512)
    _, sends = pickle_in_parts(models.packed_models([large], pickle.dumps), pickle.dumps)
    assert torch.frombuffer(sends[0], dtype=torch.float32).data_ptr() == large.weight.data_ptr()


def test_a_module_that_copies_itself_gets_its_weights() -> None:
    found, shared = sent(Own(), Net())
    assert torch.equal(found.weight, torch.arange(6.0))
    assert isinstance(shared, Net)


def test_weights_that_two_models_share_stay_one() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    one, other = sent(first, second)
    assert one.weight is other.weight and torch.equal(one.weight, first.weight)


class Views(nn.Module):
    """Tensors with the memory of others, or of a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.other.weight.data = self.one.weight.data
        self.register_buffer("row", self.one.weight.detach()[1])
        self.register_buffer("column", self.one.weight.detach()[:, 2])


def test_memory_that_weights_share_is_shared_in_the_copy() -> None:
    net = Views()
    (found,) = sent(net)
    assert all(map(torch.equal, found.state_dict().values(), net.state_dict().values()))
    with torch.no_grad():
        found.one.weight.copy_(torch.arange(16.0).view(4, 4))
    assert torch.equal(found.other.weight, found.one.weight) and not torch.equal(found.one.weight, net.one.weight)
    assert found.row.tolist() == [4, 5, 6, 7] and found.column.tolist() == [2, 6, 10, 14]


def test_a_copy_can_be_saved_and_trained() -> None:
    (found,) = sent(nn.Linear(3, 1))
    assert len(pickle.dumps(found)) < 10_000
    found(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(found.parameters(), lr=0.1).step()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_kinds_of_numbers(kind: torch.dtype) -> None:
    net = nn.Module()
    net.register_buffer("content", torch.arange(5).to(kind))
    (found,) = sent(net)
    assert torch.equal(found.content, net.content)
