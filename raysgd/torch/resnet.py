"""The name that RaySGD gave to the module of residual networks, which is `raysgd.operators.resnet`. Both."""

from raysgd.operators.resnet import ResNet, ResNet18, ResNet34, ResNet50, ResNet101, ResNet152

__all__ = ["ResNet", "ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152"]
