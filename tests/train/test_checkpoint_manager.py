"""The checkpoint manager keeps the newest checkpoint in memory, and those of the strategy in storage."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd.train import Checkpoint, CheckpointConfig, CheckpointStrategy
from raysgd.train.run.checkpoint_manager import CheckpointManager


def manager_of(tmp_path: Path, *losses: float, initial: bytes | None = None, **strategy: Any) -> CheckpointManager:
    made = CheckpointManager(tmp_path, CheckpointStrategy(**strategy), initial=initial)
    for number, loss in enumerate(losses):
        add(made, stored({"number": number, "loss": loss}), {})
    return made


def stored(content: dict[str, Any]) -> bytes:
    return Checkpoint.from_dict(content).to_bytes()


def add(manager: CheckpointManager, payload: bytes, metrics: dict[str, Any]) -> None:
    manager.store(manager.register(payload), payload, metrics)


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(path.name.removeprefix("checkpoint_") for path in tmp_path.iterdir())


KEPT: list[tuple[list[float], dict[str, Any], list[int], int | None]] = [
    ([3, 2, 1], {}, [1, 2, 3], 3),
    ([3, 2], {"num_to_keep": 0}, [], None),
    ([1, 1, 1], {"num_to_keep": 2}, [2, 3], 3),
    ([1, 1, 1, 1], {"num_to_keep": 3}, [2, 3, 4], 4),
    ([1, 4, 2, 3], {"num_to_keep": 3, "checkpoint_score_attribute": "loss"}, [2, 3, 4], 2),
    ([2, 4, 1, 3], {"num_to_keep": 2, "checkpoint_score_attribute": "loss"}, [2, 4], 2),
    (
        [2, 4, 1, 3],
        {"num_to_keep": 2, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"},
        [1, 3],
        3,
    ),
    ([1, 1], {"num_to_keep": 1, "checkpoint_score_attribute": "loss"}, [1], 1),
    ([math.nan, 3, math.nan], {"num_to_keep": 1, "checkpoint_score_attribute": "loss"}, [2], 2),
    (
        [math.nan, 3, math.nan],
        {"num_to_keep": 1, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"},
        [2],
        2,
    ),
]


@pytest.mark.parametrize(("losses", "strategy", "kept", "best"), KEPT)
def test_as_many_are_kept_as_the_strategy_says(
    tmp_path: Path, losses: list[float], strategy: dict[str, Any], kept: list[int], best: int | None
) -> None:
    """All by default; of equal ones the first; and NaN is worse than any number."""
    made = manager_of(tmp_path, *losses, **strategy)
    assert on_disk(tmp_path) == [f"{number:06d}" for number in kept]
    assert made.best_path == (None if best is None else tmp_path / f"checkpoint_{best:06d}")
    assert made.latest_path == (tmp_path / f"checkpoint_{kept[-1]:06d}" if kept else None)
    assert made.latest is not None
    assert made.latest.to_dict()["number"] == len(losses) - 1, "the newest is in memory, whether it is stored or not"
    assert made.latest_id == len(losses)
    for number in kept:
        assert Checkpoint(tmp_path / f"checkpoint_{number:06d}").to_dict()["number"] == number - 1


@pytest.mark.parametrize("kind", ["dictionary", "folder"])
def test_the_score_can_be_in_the_metrics(tmp_path: Path, kind: str) -> None:
    (tmp_path / "source").mkdir()
    payload = (
        stored({"weights": [1]}) if kind == "dictionary" else Checkpoint.from_directory(tmp_path / "source").to_bytes()
    )
    strategy = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="accuracy")
    made = CheckpointManager(tmp_path / "kept", strategy)
    for accuracy in (0.5, 0.9, 0.7):
        add(made, payload, {"accuracy": accuracy})
    assert on_disk(tmp_path / "kept") == ["000002"]


def test_fewer_can_be_kept_than_an_earlier_run_stored(tmp_path: Path) -> None:
    manager_of(tmp_path, 3, 1, 2, 5)
    made = CheckpointManager(tmp_path, CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss"))
    made.adopt({})
    add(made, stored({"loss": 0}), {})
    assert on_disk(tmp_path) == ["000001", "000004"], "the new one is not among the best"


def test_a_score_in_the_checkpoint_has_priority_over_the_metrics(tmp_path: Path) -> None:
    strategy = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    made = CheckpointManager(tmp_path, strategy)
    add(made, stored({"loss": 1}), {"loss": 9})
    add(made, stored({"loss": 2}), {"loss": 0})
    assert on_disk(tmp_path) == ["000001"]


NUMBERS: dict[str, Any] = {
    "float": float,
    "NumPy's float64": np.float64,
    "NumPy's float32": np.float32,
    "an array without dimensions": np.array,
    "a tensor without dimensions": torch.tensor,
    "a tensor of one element": lambda loss: torch.tensor([loss]),
    "bfloat16": lambda loss: torch.tensor(loss, dtype=torch.bfloat16),
    "a parameter": lambda loss: torch.nn.Parameter(torch.tensor(loss)),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("reported", [False, True], ids=["in the checkpoint", "in the metrics"])
def test_a_score_may_be_any_number(tmp_path: Path, kind: str, reported: bool) -> None:
    made = CheckpointManager(tmp_path, CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss"))
    for loss in (1.5, 3.5, 2.5):
        score, own = {"loss": NUMBERS[kind](loss)}, {"weights": np.zeros(5)}
        add(made, stored(own if reported else {**own, **score}), score if reported else {})
    assert on_disk(tmp_path) == ["000002"]


def test_a_score_that_shares_its_memory_with_others_ranks_a_checkpoint(tmp_path: Path) -> None:
    made, losses = manager_of(tmp_path, num_to_keep=1, checkpoint_score_attribute="loss"), torch.tensor([2.5, 1.5])
    for number in range(2):
        add(made, stored({"losses": losses, "loss": losses[number]}), {})
    assert on_disk(tmp_path) == ["000001"]


@pytest.mark.parametrize("content", [{}, {"loss": [1.0]}, {"loss": None}])
def test_a_missing_or_invalid_score_is_an_error(tmp_path: Path, content: dict[str, Any]) -> None:
    made = CheckpointManager(tmp_path, CheckpointStrategy(checkpoint_score_attribute="loss"))
    with pytest.raises(ValueError, match="'loss' must be a number"):
        add(made, stored(content), {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_to_keep": -1},
        {"num_to_keep": True},
        {"checkpoint_score_order": "best"},
        {"checkpoint_score_attribute": 3},
        {"checkpoint_score_attribute": ""},
    ],
)
def test_a_strategy_is_checked(wrong: dict[str, Any]) -> None:
    for kind in (CheckpointConfig, CheckpointStrategy):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kind(**wrong)


def test_a_directory_is_stored_as_a_directory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "weights.bin").write_bytes(b"123")
    made = CheckpointManager(tmp_path / "kept")
    add(made, Checkpoint.from_directory(source).to_bytes(), {"loss": 1})
    path = made.latest_path
    assert path is not None
    assert (path / "sub" / "weights.bin").read_bytes() == b"123"
    assert [each.name for each in (tmp_path / "kept").iterdir()] == ["checkpoint_000001"], "no incomplete files"


@pytest.mark.parametrize("attribute", [None, "loss"])
def test_checkpoints_of_an_earlier_run_are_adopted(tmp_path: Path, attribute: str | None) -> None:
    manager_of(tmp_path, 3, 1, 2)
    (tmp_path / ".checkpoint_000004.0.tmp").write_bytes(b"an incomplete file of a killed process")
    (tmp_path / "checkpoint_notes").write_bytes(b"another file")
    made = CheckpointManager(tmp_path, CheckpointConfig(checkpoint_score_attribute=attribute))
    made.adopt({7: {"loss": 1}})
    assert [each.number for each in made.stored] == [1, 2, 3]
    assert made.latest_id == 7, "numbers are not used twice"
    assert made.latest is not None
    assert made.latest.to_dict() == {"number": 2, "loss": 2}
    assert made.best_path == tmp_path / ("checkpoint_000003" if attribute is None else "checkpoint_000001")


def test_a_checkpoint_without_a_report_is_ranked_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager_of(tmp_path, 3, 1, 2)
    made = CheckpointManager(tmp_path, CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="accuracy"))
    made.adopt({1: {"accuracy": 0.5}, 2: {"accuracy": 0.9}})
    assert "checkpoint_000003 is ranked last" in caplog.text
    assert [each.score for each in made.stored] == [0.5, 0.9, -math.inf]
    assert made.latest is not None and made.latest.to_dict()["loss"] == 2, "it is still the newest"
    add(made, stored({}), {"accuracy": 0.1})
    assert on_disk(tmp_path) == ["000001", "000002", "000004"]
