"""Residual networks for small images such as CIFAR's 32 x 32 (He et al., "Deep Residual Learning", 2015). Worker.

Unlike the networks for ImageNet, they begin with a 3 x 3 convolution and no pooling, which would reduce a small image too
much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["ResNet", "ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152"]

_STAGE_WIDTHS = (64, 128, 256, 512)


class ResidualBlock(nn.Module):
    """relu(body(x) + shortcut(x)). The shortcut is the identity if the shapes are equal."""

    expansion: int

    def __init__(self, body: nn.Module, *, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        if stride == 1 and channels_in == channels_out:
            self.shortcut: nn.Module = nn.Identity()
        else:
            self.shortcut = _conv(channels_in, channels_out, size=1, stride=stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class BasicBlock(ResidualBlock):
    """Two 3 x 3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, *, stride: int) -> None:
        body = nn.Sequential(
            _conv(channels_in, width, size=3, stride=stride),
            nn.ReLU(inplace=True),
            _conv(width, width, size=3),
        )
        super().__init__(body, channels_in=channels_in, channels_out=width, stride=stride)


class Bottleneck(ResidualBlock):
    """A 3 x 3 convolution on few channels, between two 1 x 1 convolutions that reduce and restore their number."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, *, stride: int) -> None:
        channels_out = width * self.expansion
        body = nn.Sequential(
            _conv(channels_in, width, size=1),
            nn.ReLU(inplace=True),
            _conv(width, width, size=3, stride=stride),
            nn.ReLU(inplace=True),
            _conv(width, channels_out, size=1),
        )
        super().__init__(body, channels_in=channels_in, channels_out=channels_out, stride=stride)


class ResNet(nn.Module):
    """A stem, four stages of blocks (all but the first halve the image), the mean over the image, and a linear head."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], *, num_classes: int = 10
    ) -> None:
        super().__init__()
        channels = _STAGE_WIDTHS[0]
        self.stem = nn.Sequential(_conv(3, channels, size=3), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(_STAGE_WIDTHS, depths, strict=True)):
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(channels, width, stride=stride))
                channels = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.pool(self.blocks(self.stem(images)))
        logits: Tensor = self.head(features.flatten(1))
        return logits


# These functions ignore their config. They accept it so that they can be passed as a `model_creator`.


def ResNet18(config: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes=num_classes)


def ResNet34(config: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes=num_classes)


def ResNet50(config: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes=num_classes)


def ResNet101(config: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes=num_classes)


def ResNet152(config: Mapping[str, Any] | None = None, *, num_classes: int = 10) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes=num_classes)


def _conv(channels_in: int, channels_out: int, *, size: int, stride: int = 1) -> nn.Sequential:
    """Make a convolution that keeps the image's size (apart from the stride), with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )
