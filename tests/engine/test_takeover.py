"""What ranks have measured in a call whose driver has ended, for the driver that continues it."""

from __future__ import annotations

from raysgd.core.measures.metrics import Measured, merge_call
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.ranks import RankInfo
from raysgd.engine.takeover import results_left
from raysgd.workers.orphan import Left


def measured(batches: int, samples: int, loss: float, *, ended: bool = False) -> Outcome:
    metrics = {"batch_count": batches, "num_samples": samples, "loss": loss}
    return Ok(Measured(metrics)) if ended else Interrupted(Measured(metrics))


def left(rank: int, *parts: tuple[int, Outcome], call: int = 7) -> Left:
    return Left(RankInfo(world_rank=rank), call, list(parts))


def test_parts_that_ranks_have_trained_together_are_one() -> None:
    """They stopped once in generation 3, and a third rank joined in generation 4, whose last part had ended on one rank."""
    ranks = [
        left(0, (3, measured(2, 4, 8.0)), (3, measured(1, 2, 2.0)), (4, measured(5, 10, 1.0))),
        left(1, (3, measured(2, 4, 4.0)), (3, measured(1, 2, 2.0)), (4, measured(5, 10, 1.0, ended=True))),
        left(2, (4, measured(5, 10, 1.0))),
    ]
    parts = results_left(ranks, call=7)
    assert [(part.generation, len(part.outcomes)) for part in parts] == [(3, 2), (3, 2), (4, 3)]
    result = merge_call([part.values for part in parts])
    assert result == {"batch_count": 8, "num_samples": 42, "loss": (8 * 6.0 + 4 * 2.0 + 30 * 1.0) / 42}


def test_other_calls_and_errors_do_not_count() -> None:
    error = Failed(ValueError("the user's"))
    parts = results_left([left(0, (3, measured(2, 4, 8.0)), call=6), left(1, (3, error))], call=7)
    assert [part.values for part in parts] == [[]]
