"""Compare what the ranks report of their weights and settings after the same step. Pure. Both.

Synchronous training keeps the weights of all ranks equal: each applies the same averaged gradients
with the same settings. Code that breaks this raises no error, so the ranks report two numbers for
each parameter, and their optimizers' settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Kind = Literal["settings", "alone", "weights"]
# Settings are calculated from the same numbers on all ranks, in double precision. A rate that depends on the rank differs by more.
SETTING_TOLERANCE = 1e-4
CAUSES = (
    "get_model() and checkpoints have the weights of rank 0. Likely causes: train_batch calls the unwrapped model, as in "
    "self.model.module(x), so no gradients are averaged (call self.model(x)); a module or an optimizer that trains is not passed to "
    "register(); a setting, or other code, depends on the rank. If the ranks should differ, pass ElasticConfig(on_divergence=None)"
)


@dataclass(frozen=True)
class Summary:
    """What one rank reports. Ranks are compared in the entries whose names they have in common.

    weights   for each parameter of the registered models: a projection, its size (which is a norm),
              and how far the numbers of two ranks may be apart
    alone     the same for parameters that train and belong to no registered model, so nothing
              averages their gradients
    settings  the optimizers' settings
    """

    weights: Mapping[str, Sequence[float]]
    alone: Mapping[str, Sequence[float]]
    settings: Mapping[str, Any]

    def as_text(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def of_text(cls, text: str) -> Summary:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Difference:
    """What differs most among the entries of one kind.

    groups  the ranks that agree with each other, the largest group first
    values  each group's value, of a setting
    size    by how much two groups differ, as a fraction of the value
    others  how many further entries of this kind differ
    """

    kind: Kind
    name: str
    groups: tuple[tuple[int, ...], ...]
    values: tuple[Any, ...]
    size: float
    others: int = 0


def compare(texts: Mapping[int, str]) -> list[Difference]:
    """Find what differs between the ranks, at most one `Difference` of each kind. `texts` has each
    rank's `Summary`.

    >>> same, other = (Summary({"weight": [size, size, 1e-4]}, {}, {}).as_text() for size in (1.0, 1.5))
    >>> [found.groups for found in compare({0: same, 1: other, 2: same})], compare({0: same, 1: same})
    ([((0, 2), (1,))], [])
    """
    holders: dict[str, list[int]] = {}
    for rank, text in texts.items():
        holders.setdefault(text, []).append(rank)
    if len(holders) == 1:  # as always on processors of one type
        return []
    read = [(Summary.of_text(text), ranks) for text, ranks in holders.items()]
    return [found for kind in get_args(Kind) if (found := _worst(kind, read)) is not None]


def _worst(kind: Kind, read: Sequence[tuple[Summary, list[int]]]) -> Difference | None:
    columns: dict[str, list[tuple[Any, list[int]]]] = {}
    for summary, ranks in read:
        for name, value in getattr(summary, kind).items():
            columns.setdefault(name, []).append((value, ranks))
    of_setting = kind == "settings"
    differing = [
        found
        for name, column in columns.items()
        if len(column) > 1 and (found := _difference(kind, name, column, _setting if of_setting else _parameter))
    ]
    if not differing:
        return None
    return replace(max(differing, key=lambda each: each.size), others=len(differing) - 1)


def _difference(
    kind: Kind, name: str, column: Iterable[tuple[Any, list[int]]], distance: Callable[[Any, Any], float]
) -> Difference | None:
    """The difference in one entry, or None. A `distance` of 0 is within the tolerance."""
    groups: list[tuple[Any, list[int]]] = []
    for value, ranks in column:
        mine = next((members for other, members in groups if distance(other, value) == 0), None)
        if mine is None:
            groups.append((value, list(ranks)))
        else:
            mine += ranks
    if len(groups) == 1:
        return None
    groups.sort(key=lambda group: (-len(group[1]), min(group[1])))
    (usual, _), *rest = groups
    return Difference(
        kind,
        name,
        tuple(tuple(sorted(ranks)) for _, ranks in groups),
        tuple(value for value, _ in groups) if kind == "settings" else (),
        max(distance(usual, value) for value, _ in rest),
    )


def _parameter(one: Sequence[float], other: Sequence[float]) -> float:
    """Measure how far two parameters are apart, as a fraction of their size. The difference of two
    projections is about as large as the norm of the difference."""
    if any(math.isfinite(mine) != math.isfinite(theirs) for mine, theirs in zip(one[:2], other[:2], strict=True)):
        return math.inf
    apart = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    if not apart > max(one[2], other[2]):  # also if both are not finite
        return 0.0
    size = max(one[1], other[1])
    return apart / size if size else math.inf


def _setting(one: Any, other: Any) -> float:
    """Measure how far two settings are apart, as a fraction; 1 for what is not a number."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((_setting(mine, theirs) for mine, theirs in zip(one, other, strict=True)), default=0.0)
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    if not numbers:
        return float(one != other)
    if math.isclose(one, other, rel_tol=SETTING_TOLERANCE) or (one != one and other != other):
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other))
    return apart if math.isfinite(apart) else math.inf


def describe(differences: Iterable[Difference], step: int) -> str:
    """Say what differs, and what the cause may be."""
    told = "; ".join(_told(each) for each in differences)
    return f"after step {step} the ranks do not train the same model: {told}. {CAUSES}"


def _told(found: Difference) -> str:
    where = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in found.groups]
    more = f" (and {found.others} more)" if found.others else ""
    if found.kind == "settings":
        values = ", ".join(f"{value} on {ranks}" for value, ranks in zip(found.values, where, strict=True))
        return f"{found.name} is {values}{more}"
    alone = ", which belongs to no registered model and is therefore not averaged," if found.kind == "alone" else ""
    size = f"by about {found.size:.1e} of its size" if math.isfinite(found.size) else "in which values are finite"
    return f"the parameter {found.name}{alone} differs between {' and '.join(where)} {size}{more}"
