"""ResNet-50 for images of 224 x 224, with BatchNorm (He et al., "Deep Residual Learning", 2015): what GPUs are
usually measured with. The strides are in the 3 x 3 convolutions, as everybody has them today.
"""

import torch
from torch import nn

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first


def convolution(channels_in: int, channels_out: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1, added to what came in."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            *convolution(channels_in, width),
            nn.ReLU(inplace=True),
            *convolution(width, width, size=3, stride=stride),
            nn.ReLU(inplace=True),
            *convolution(width, channels_out),
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels_out, stride=stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.relu(self.body(images) + self.shortcut(images))
        return result


class ResNet50(nn.Sequential):
    """25.6 million parameters for 1000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, stride in STAGES:
            for number in range(count):
                blocks.append(Bottleneck(channels, width, stride if number == 0 else 1))
                channels = 4 * width
        super().__init__(
            *convolution(3, 64, size=7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )
