"""Automatic checkpoints between two batches of a call, on several ranks that fail, leave and join."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import AutoCheckpoint
from tests.faults import LedgerOperator
from tests.local.ground import Fault, LocalGround
from tests.peek import finish_saves, leave_no_checkpoint_out

Make = Callable[..., LocalGround]
SAMPLES, STEPS = 64, 8  # in an epoch of two ranks


class Parts(LedgerOperator):
    """Has a loop of its own, whose local state must not begin again in an epoch: each call of it is noted."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012

    def train_epoch(self, iterator: Iterator[Any], info: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        local = 0
        for number, batch in enumerate(iterator):
            local += 1
            result = self.train_batch(batch, {"batch_idx": number})
            self.global_step += 1
        self.calls.append((self.world_rank, local))
        return result


def started(make: Make, folder: Path, every: Any, *, patient: bool = True, **arguments: Any) -> LocalGround:
    checkpoints = AutoCheckpoint(path=folder, every=every, **arguments.pop("settings", {}))
    config = {"samples": SAMPLES, **arguments.pop("config", {})}
    ground = make(num_workers=2, config=config, checkpoints=checkpoints, resume="auto", seed=3, **arguments)
    if patient:
        leave_no_checkpoint_out(ground.trainer)
    return ground


@pytest.mark.parametrize(
    "every", [3, 3600.0, *(pytest.param(each, marks=pytest.mark.more) for each in (1, 1e-6, 0.05))]
)
def test_an_epoch_is_one_call_of_train_epoch(make: Make, tmp_path: Path, every: Any) -> None:
    Parts.calls.clear()
    ground = started(make, tmp_path / "saves", every, operator=Parts)
    for _ in ground.trainer.epochs(2):
        ground.trainer.train()
        ground.assert_epoch_exact()
    assert sorted(Parts.calls) == [(0, STEPS), (0, STEPS), (1, STEPS), (1, STEPS)]


def killed_after(make: Make, folder: Path, every: Any, step: int, **arguments: Any) -> None:
    """Let a script end at the beginning of the batch after this step, when what was to be saved is in the folder."""
    ground = started(make, folder, every, **arguments)
    begun = ground.trainer.apply_all_operators(lambda operator: operator.global_step)[0]
    ground.arm(Fault(0, step + 1 - begun, "raise"))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.fit(3)
    finish_saves(ground.trainer)
    ground.trainer.shutdown(force=True)


def rows_of(ground: LocalGround) -> list[Any]:
    names = ("kind", "epoch", "step", "batch_count", "num_samples", "train_loss", "last_train_loss", "val_loss")
    return [{name: pytest.approx(row[name]) for name in names if name in row} for row in ground.trainer.history]


def test_a_resumed_epoch_has_the_results_of_an_undisturbed_one(make: Make, tmp_path: Path) -> None:
    """On two ranks, also after two restarts in one epoch, and so has the choice of the best checkpoint."""
    settings = {"best": "train_loss", "mode": "max"}
    undisturbed = started(make, tmp_path / "undisturbed", 3, settings=settings)
    undisturbed.trainer.fit(3)
    expected, best = rows_of(undisturbed), undisturbed.trainer.best_checkpoint
    for step in (4, 7, STEPS + 5):
        killed_after(make, tmp_path / "saves", 3, step, settings=settings)
    resumed = started(make, tmp_path / "saves", 3, settings=settings)
    assert Path(str(resumed.trainer.resumed_from)).stem == "loop1-epoch00001-step000000012"
    resumed.trainer.fit(3)
    assert rows_of(resumed) == expected
    assert Path(str(resumed.trainer.best_checkpoint)).name == Path(str(best)).name


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step in (2, 7) else pytest.mark.more) for step in range(1, STEPS + 1)]
)
def test_a_planned_change_at_any_batch_adds_no_epoch(make: Make, tmp_path: Path, step: int) -> None:
    """Also one that stops the ranks after the last batch of a call, where a checkpoint is due."""
    ground = started(make, tmp_path / "saves", 2, elastic={"grow": True})
    ground.arm(Fault(1, step, "term"))
    for epoch in ground.trainer.epochs(2):
        if epoch == 2:  # the script ends here
            break
        ground.trainer.train()
    finish_saves(ground.trainer)
    ground.trainer.shutdown(force=True)
    again = started(make, tmp_path / "saves", 2)
    for _ in again.trainer.epochs(2):
        again.trainer.train()
    assert again.trained() == Counter({sample: 2 for sample in range(SAMPLES)})


@pytest.mark.parametrize("others", [(), (1,)], ids=["rank 0", "all"])
def test_a_worker_that_fails_while_it_copies_leaves_the_checkpoint_out(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, others: tuple[int, ...]
) -> None:
    ground = started(make, tmp_path / "saves", 3, settings={"keep": None})
    ground.arm(Fault(0, 4, where="save", others=others))
    for _ in ground.trainer.epochs(1):
        assert ground.trainer.train()["num_samples"] == SAMPLES
        ground.assert_epoch_exact()
    assert ground.fired() == 1 and len(ground.trainer.recoveries) == 1
    left_out = [each for each in caplog.messages if "no automatic checkpoint was saved after step" in each]
    assert left_out == ["no automatic checkpoint was saved after step 3: the workers' call has ended before it began"]
