"""What of a result can be written down: plain values for JSON, flat numbers for who draws curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raysgd.core.metrics import plain
from raysgd.errors import text_of

__all__ = ["flat", "for_json", "numbers"]


def for_json(value: Any) -> Any:
    """The same in values that any JSON reader takes. NaN and infinity are the texts "NaN", "Infinity" and "-Infinity"
    (strict JSON has no numbers for them); arrays are lists; what is none of JSON's is its `str`."""
    value = plain(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, Mapping):
        return {str(key): for_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(inner) for inner in value]
    if hasattr(value, "tolist"):
        return for_json(value.tolist())
    return text_of(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Without dictionaries inside: `{"a": {"b": 1}}` is `{"a/b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = value
    return found


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among them, flat. NaN is one."""
    found = {key: plain(value) for key, value in flat(values).items()}
    return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}
