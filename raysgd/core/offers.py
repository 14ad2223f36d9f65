"""Names that a part of raysgd uses of parts above it, which it does not import. Both.

    offers.operator_from_lightning(module_class, train_loader, validation_loader)

The home of a name is loaded when it is used. tools/check_code.py has a reason for each.
"""

from __future__ import annotations

from typing import Any

from raysgd.core.lazy import load

HOMES = {
    "horovod_strategy": "raysgd.horovod.strategy",
    "operator_from_creators": "raysgd.torch.creators",
    "operator_from_lightning": "raysgd.torch.lightning.operator",
    "torch_trainable": "raysgd.tune.trials",
}


def __getattr__(name: str) -> Any:
    return load("raysgd.core.offers", name, HOMES)
