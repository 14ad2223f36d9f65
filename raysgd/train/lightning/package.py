"""Import Lightning, under either of its names, as Ray does. Worker."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from raysgd.errors import ConfigError
from raysgd.torch.packages import check_version


def imported(package: str) -> Any:
    """Import a package of `lightning.pytorch`, or of `pytorch_lightning`."""
    for name, parent in (("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        if find_spec(name) is not None:
            check_version(name, extra="lightning")
            return import_module(f"{parent}{package}")
    raise ConfigError("raysgd.train.lightning needs Lightning: pip install 'raysgd[lightning]'")
