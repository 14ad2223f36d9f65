"""What calls read: the data of a training, a validation or a test. Worker.

With several loaders that have names, each has a phase of its own, such as "validation.NAME"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

Phase = Literal["train", "validation", "test"]
# The phases of calls that read data; all other calls are made between those of training.
PHASES: dict[str, Phase] = {"validate": "validation", "test": "test"}
CALLS: dict[Phase, str] = {"train": "train", "validation": "validate", "test": "test"}


def split(phase: str) -> tuple[Phase, str]:
    """Find what a phase evaluates, and the name of its loader, if that has one."""
    kind, _, name = phase.partition(".")
    return cast(Phase, kind), name


def phases_of(kind: Phase, data: Any) -> list[str]:
    """The phases of a call that reads this data: one, or one for each loader that has a name."""
    return [f"{kind}.{name}" for name in data] if isinstance(data, Mapping) else [kind]
