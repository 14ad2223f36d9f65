"""The residual networks have the published shapes and sizes, and learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raysgd.operators import resnet

# The numbers of weights with ten classes and a 3 x 3 stem, computed from the paper's table of layers.
PARAMETERS = {18: 11_173_962, 34: 21_282_122, 50: 23_520_842, 101: 42_512_970, 152: 58_156_618}


@pytest.mark.parametrize("layers", PARAMETERS)
def test_numbers_of_weights_and_layers(layers):
    with torch.device("meta"):  # only shapes: this needs no memory and no time
        model = getattr(resnet, f"ResNet{layers}")()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[layers]
    shortcuts = [b.shortcut for b in model.blocks if not isinstance(b.shortcut, nn.Identity)]
    weighted = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(weighted) - len(shortcuts) == layers


def test_an_image_of_any_size_is_halved_three_times():
    with torch.device("meta"):
        model = resnet.ResNet50({"lr": 0.1}, num_classes=7)
        for size, reduced in ((32, 4), (17, 3), (8, 1)):
            images = torch.empty(2, 3, size, size)
            assert model.blocks(model.stem(images)).shape[2:] == (reduced, reduced)
            assert model(images).shape == (2, 7)


def test_a_block_has_a_residual_connection():
    block = resnet.BasicBlock(4, 4, stride=1).eval()
    nn.init.zeros_(block.body[2][0].weight)
    images = torch.rand(2, 4, 5, 5)
    assert torch.equal(block(images), images)


@pytest.mark.parametrize("block", [resnet.BasicBlock, resnet.Bottleneck])
def test_every_weight_gets_a_gradient_and_the_loss_decreases(block):
    torch.manual_seed(0)
    model = resnet.ResNet(block, (1, 1, 1, 1))
    images, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_there_must_be_four_depths():
    with pytest.raises(ValueError):
        resnet.ResNet(resnet.BasicBlock, (1, 1))
