"""Planned changes (growth, preemption notices, spares): no batch is lost or repeated. tests/local has `resize`."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from raysgd import ConfigError, ElasticConfig
from tests.faults import Fault, Ground, LedgerOperator, once, until
from tests.peek import ready_replacements, set_limits

pytestmark = pytest.mark.elastic


class Listening(LedgerOperator):
    """Writes down which processes were set up, and which were told of their preemption."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        Path(config["marks"], f"setup-{os.getpid()}").touch()

    def on_preemption_notice(self, deadline_s: float | None) -> None:
        with Path(self.marks, "notices").open("a") as file:
            file.write(f"{os.getpid()} {deadline_s}\n")


@pytest.fixture(scope="module")
def ground(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(
        tmp_path_factory.mktemp("members"),
        num_workers=3,
        operator=Listening,
        config={"samples": 600, "pace": 0.02},
        elastic=ElasticConfig(hang_timeout_s=60),
    )
    yield ground
    ground.trainer.shutdown()


def test_a_replacement_joins_in_the_middle_of_an_epoch(ground: Ground) -> None:
    ground.arm(Fault(1, 3))
    before = len(ground.trainer.recoveries)
    for _ in until(lambda: len(ground.trainer.recoveries) >= before + 2):
        ground.trainer.train()
        ground.assert_epoch_exact()
    failure, growth = ground.trainer.recoveries[before : before + 2]
    assert (failure.reason, growth.reason) == ("worker death", "growth")
    assert (growth.world_size_before, growth.world_size_after) == (2, 3)
    assert growth.in_place and growth.batches_redone == 0


def die_in_a_share(mark: Path, who: str) -> None:
    """Let this process die, once, when ranks share a state, after some of its parts."""
    from raysgd.torch.group import sharing

    calls: list[int] = []

    def broadcast(part: Any, giver: int) -> None:
        calls.append(giver)
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        place = {giver: "giver", last: "taker"}.get(rank, "third")
        if place == who and len(calls) % 4 == 0 and once(mark):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.broadcast(part, giver)

    more: Any = {"PIECE": 256, "dist": SimpleNamespace(**{**vars(dist), "broadcast": broadcast})}
    vars(sharing).update(more)


@pytest.mark.more
@pytest.mark.parametrize("who", ["giver", "taker", "third"])
def test_a_worker_dies_while_a_state_is_shared(ray_cluster: None, who: str, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    ground = Ground(tmp_path / "marks", num_workers=3, initialization_hook=partial(die_in_a_share, mark, who))
    with ground.trainer as trainer:
        trainer.train()
        ground.assert_epoch_exact()
        ground.arm(Fault(1, 3))
        for _ in until(lambda: mark.exists() and trainer.world_size == 3 and len(trainer.recoveries) >= 3):
            trainer.train()
            ground.assert_epoch_exact()
        assert all(each.in_place and each.batches_redone == 0 for each in trainer.recoveries)


def test_resized_is_called_for_every_change(ground: Ground) -> None:
    ground.whole_again(3)
    heard = ground.trainer.apply_all_operators(lambda operator: (operator.resizes, operator.world_size))
    assert all(world == 3 for _, world in heard)
    assert heard[0][0][:2] == [(3, 2), (2, 3)]


def test_a_replacement_joins_at_the_boundary_at_which_a_preempted_worker_leaves(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, notice_s=600.0)  # on a slow machine, the replacement may need more than 20 s
    ground.whole_again(3)
    ground.arm(Fault(1, 6, "term"))
    pids = ground.trainer.apply_all_workers(os.getpid)
    before = len(ground.trainer.recoveries)
    for _ in until(lambda: len(ground.trainer.recoveries) > before):
        result = ground.trainer.train()
        ground.assert_epoch_exact()
        assert result["num_samples"] == ground.samples
    (change,) = ground.trainer.recoveries[before:]
    assert (change.reason, change.removed_ranks, change.batches_redone) == ("preemption", (1,), 0)
    assert (change.world_size_before, change.world_size_after, change.in_place) == (3, 3, True)
    assert (ground.marks / "notices").read_text() == f"{pids[1]} None\n"
    assert ground.trainer.apply_all_workers(os.getpid)[:2] == [pids[0], pids[2]]


def test_a_failure_takes_a_hot_spare(ray_cluster: None, tmp_path: Path) -> None:
    ground = Ground(
        tmp_path / "spares",
        num_workers=2,
        operator=Listening,
        config={"pace": 0.01},
        elastic=ElasticConfig(hang_timeout_s=60, hot_spares=1),
    )
    trainer = ground.trainer
    try:
        for _ in until(lambda: ready_replacements(trainer) > 0):
            trainer.train()
            ground.assert_epoch_exact()
            assert trainer.world_size == 2
        spares = {f"setup-{pid}" for pid in trainer.apply_all_workers(os.getpid)} ^ {
            each.name for each in ground.marks.glob("setup-*")
        }
        ground.arm(Fault(1, 9))
        result = trainer.train()
        ground.assert_epoch_exact()
        assert result["num_samples"] == ground.samples
        (failure,) = trainer.recoveries
        assert (failure.reason, failure.removed_ranks) == ("worker death", (1,))
        assert (failure.world_size_before, failure.world_size_after) == (2, 2)
        assert failure.in_place and failure.batches_redone == 0
        # On a busy machine, a spare that is overdue and its substitute may both be set up.
        assert f"setup-{trainer.apply_all_workers(os.getpid)[1]}" in spares, "it was set up before the failure"
        for _ in until(lambda: ready_replacements(trainer) > 0):
            trainer.train()
        assert len(trainer.recoveries) == 1, "the next spare waits"
        assert len(list(ground.marks.glob("setup-*"))) >= 4
    finally:
        trainer.shutdown()


def test_spares_need_workers_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hot_spares=2 cannot replace a worker that is this process"):
        Ground(tmp_path / "inline", num_workers=1, elastic=ElasticConfig(hot_spares=2))
