"""Validate and test: one pass over the data, or over each loader that has a name. Worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysgd.core.measures.metrics import Measured
from raysgd.core.outcomes import Interrupted
from raysgd.replica.calls import Phase, choose_arguments, phases_of, split
from raysgd.replica.steps.position import Position


class Evaluations:
    """Owns the passes of validations, or of tests, over their data. Each call begins a new one,
    unless it continues that of the call before.

    kind       "validation" or "test"
    passes     where the newest call has ended, the number of that, and, as `parked`, where it
               began: the only part of the position that belongs to the state
    positions  of the newest pass over each loader
    """

    def __init__(self, kind: Phase) -> None:
        self.kind, self.passes = kind, Position()
        self.positions: dict[str, Position] = {}

    def run(
        self,
        replica: Any,
        num_steps: int | None,
        profile: bool,
        info: dict[str, Any] | None,
        call: int,
        reduced: bool = True,
        continues: bool = False,
        places: Sequence[Any] | None = None,
    ) -> Any:
        """Make one pass, over at most `num_steps` batches of each loader. No rank waits for another
        one. `places` are where the call before has ended on each rank, if the driver knows that.
        With one loader, a call that `continues` begins there."""
        kind, internals, passes = self.kind, replica.internals, self.passes
        phases = phases_of(kind, getattr(internals.registered, replica.data_names[kind]))
        here = internals.rank_info
        start = passes.parked if call == passes.call else None  # all repeat a call in which a rank has failed
        if places:
            start = places[here.world_rank if len(places) == here.world_size else 0]
        passes.call, passes.parked = call, list(start or (passes.epoch, passes.offset, passes.ended))
        passes.epoch, passes.offset, passes.ended = passes.parked
        continues = continues and phases == [kind]
        begins_at = passes.offset if continues and not passes.ended else 0
        began = Position(epoch=passes.epoch - (begins_at > 0), offset=begins_at)
        began.open_call(call)
        results: list[Measured] = []
        for phase in phases:
            self.position_in(phase).adopt(began.as_dict())
            named = dict(info or {}) | ({"loader": split(phase)[1]} if phase != kind else {})
            measured = evaluate(replica, phase, num_steps, profile, named, reduced)
            if isinstance(measured, Interrupted):
                return measured
            results.append(measured)
        position = max((self.position_in(phase) for phase in phases), key=lambda each: each.epoch)
        if position.epoch > began.epoch:
            passes.epoch, passes.offset, passes.ended = position.epoch, position.offset, position.ended
        passes.ended = passes.ended or not continues
        results[0] = replace(results[0], place=(passes.epoch, passes.offset, passes.ended))
        if phases == [kind]:
            return results[0]
        prefix = "test_" if kind == "test" else internals.prefix
        loaders = {
            f"{prefix}{split(phase)[1]}_": strip_prefix(each.metrics, prefix)
            for phase, each in zip(phases, results, strict=True)
        }
        returned = tuple(each for measured in results for each in measured.returned)
        return replace(results[0], metrics={}, loaders=loaders, returned=returned)

    def position_in(self, phase: str) -> Position:
        return self.positions.setdefault(phase, Position())


def has_data(replica: Any, phase: Phase) -> bool:
    """Return whether the operator has registered data for this."""
    return getattr(replica.internals.registered, replica.data_names[phase]) is not None


def validate(replica: Any, **arguments: Any) -> Any:
    return replica.evaluations["validation"].run(replica, **arguments)


def test(replica: Any, **arguments: Any) -> Any:
    return replica.evaluations["test"].run(replica, **arguments)


def evaluate(
    replica: Any,
    phase: str,
    num_steps: int | None,
    profile: bool,
    info: dict[str, Any],
    reduced: bool,
) -> Any:
    """Run the operator's loop over the data of this phase."""
    operator, internals, kind = replica.operator, replica.internals, split(phase)[0]
    source = replica.registered_source(phase)
    replica.results.begin(kind, profile=profile, new_call=True)
    loop = replica.open_loop(source, phase, num_steps)
    arguments, named = choose_arguments(operator.validate, loop.batches, info=dict(info))
    try:
        with internals.validating(), operator.timers.record("validation"):
            result = operator.validate(*arguments, **named)
        loop.batches.close()
        loop.end()
    except BaseException:
        internals.end_loop()
        raise
    if loop.feed.stopped:
        return Interrupted(None, "a peer failed", replica.progress)
    return replica.results.of_call(result, profile, kind, reduced)


def strip_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Remove this prefix from the names of metrics, as far as no other has the shorter name."""
    result = {}
    for name, value in metrics.items():
        last, rest = ("last_", name[5:]) if name.startswith("last_") else ("", name)
        short = last + rest.removeprefix(prefix)
        result[name if short in metrics else short] = value
    return result
