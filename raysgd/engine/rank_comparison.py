"""Compare what the ranks report of their weights after calls, and decide what follows. Driver.

Synchronous training keeps the weights of all ranks equal: each applies the same averaged gradients
with the same settings. Code that breaks this raises no error, so the ranks report two sums of each
parameter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence

from raysgd.config import ElasticConfig
from raysgd.core.outcomes import Outcome
from raysgd.core.protocols import Call
from raysgd.engine.generation import Generation
from raysgd.engine.watchdog import ask
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import DivergenceError

logger = logging.getLogger("raysgd")

LARGEST_SHARE = 0.005  # of the time that the ranks train, for comparisons
CAUSES = (
    "get_model() and checkpoints have the weights of rank 0. Likely causes: train_batch calls the unwrapped model, as in "
    "self.model.module(x), so no gradients are averaged (call self.model(x)); a module or an optimizer that trains is not passed to "
    "register(); a setting, or other code, depends on the rank. If the ranks should differ, pass ElasticConfig(on_divergence=None)"
)


class Comparison:
    """Owns how long the ranks have trained since they were compared, and whether a difference was
    logged."""

    def __init__(self, elastic: ElasticConfig) -> None:
        self._raises = elastic.on_divergence == "raise"
        self._trained_s, self._took_s = math.inf, 0.0  # so that the first call is compared
        self._logged = False

    def note_change(self) -> None:
        """Note that user code has changed the state between two calls."""
        self._trained_s = math.inf

    def ask_ranks(self, table: WorkerTable, generation: Generation, call: Call, seconds: float) -> dict[str, Outcome]:
        """Return the outcomes of the call that asks the ranks for their sums. Return none if one
        worker trains, or if training, of which a call has just taken so long, has not taken much
        longer than the last comparison. Once, asking may be slow for another reason."""
        self._trained_s += seconds
        members, began = table.members(), table.clock()
        if len(members) == 1 or self._trained_s < self._took_s / LARGEST_SHARE:
            return {}
        limit_s, number = generation.limits.hang_s, generation.number
        outcomes = ask(table, members, "run", {"call": call}, limit_s=limit_s, generation=number)
        took = table.clock() - began
        self._took_s, self._trained_s = min(took, 2 * self._took_s or took), 0.0
        return outcomes

    def judge(self, step: int, texts: Sequence[str]) -> None:
        """Compare what the ranks, in this order, have reported after a step. Log a difference, or
        raise DivergenceError, if the user wants that."""
        verdict = difference(texts)
        text = f"after step {step} the ranks do not train the same model: the parameter {verdict}. {CAUSES}"
        if verdict and self._raises:
            raise DivergenceError(text)
        if verdict and not self._logged:
            self._logged = True
            logger.warning("%s", text)


def difference(texts: Sequence[str]) -> str:
    """Say which parameter differs most, and between which ranks; "" if none does. `texts` has what
    each rank reports, as JSON: each parameter's sum, its norm, and how far these may be apart.
    Ranks are compared in the names that they have in common.

    >>> same, other = ('{"the weight": [1.0, 1.0, 0.1]}', '{"the weight": [1.5, 1.0, 0.1]}')
    >>> difference([same, other, same]), difference([same, same])
    ('the weight differs between ranks 0, 2 and rank 1 by about 5.0e-01 of its size', '')
    """
    if len(set(texts)) == 1:  # as always on processors of one type
        return ""
    columns: dict[str, dict[int, Sequence[float]]] = {}
    for rank, text in enumerate(texts):
        for name, sums in json.loads(text).items():
            columns.setdefault(name, {})[rank] = sums
    groups = {name: _groups(column) for name, column in columns.items()}
    sizes = {
        name: _distance(*(columns[name][each[0]] for each in sides[:2])) for name, sides in groups.items() if sides[1:]
    }
    if not sizes:
        return ""
    name = max(sizes, key=sizes.__getitem__)
    where = " and ".join(f"rank{'s' * (len(each) > 1)} {', '.join(map(str, each))}" for each in groups[name])
    how = f"by about {sizes[name]:.1e} of its size" if math.isfinite(sizes[name]) else "in which values are finite"
    more = f" (and {len(sizes) - 1} more)" if len(sizes) > 1 else ""
    return f"{name} differs between {where} {how}{more}"


def _groups(column: Mapping[int, Sequence[float]]) -> list[list[int]]:
    """The ranks that agree with each other in a parameter, the largest group first."""
    groups: list[list[int]] = []
    for rank, sums in column.items():
        mine = next((each for each in groups if _distance(column[each[0]], sums) == 0), None)
        if mine is None:
            groups.append([rank])
        else:
            mine.append(rank)
    return sorted(groups, key=lambda each: (-len(each), each[0]))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two ranks are apart in a parameter, as a fraction of its size; 0 within the
    tolerance."""
    if any(math.isfinite(mine) != math.isfinite(theirs) for mine, theirs in zip(one[:2], other[:2], strict=True)):
        return math.inf
    apart = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    if not apart > max(one[2], other[2]):  # also if both are not finite
        return 0.0
    size = max(one[1], other[1])
    return apart / size if size else math.inf
