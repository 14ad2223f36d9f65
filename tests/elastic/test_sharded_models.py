"""Sharded models whose shards have copies: kills, growth and resizing. The final weights equal an undisturbed run's."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError, ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests import storing
from tests.faults import alive
from tests.peek import before_resharding, newest_snapshot
from tests.speed.test_fsdp import Layers, same, trainer, weights

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.usefixtures("ray_cluster")]


class Mortal(Layers):
    """Ranks kill themselves in the batches that `config["kills"]` names, as "step-rank": before its forward pass, or after its step."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        with open(Path(self.config["marks"]) / "ledger", "a", encoding="utf-8") as ledger:
            ledger.write(f"{self.global_step} ")

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self._end_if_marked("before", batch_info["global_step"])
        result = super().train_batch(batch, batch_info)
        self._end_if_marked("after", batch_info["global_step"])
        return result

    def _end_if_marked(self, when: str, step: int) -> None:
        mark = Path(self.config["marks"]) / f"{when}-{step}-{self.world_rank}"
        if mark.exists():
            mark.unlink()
            # The first death would keep the other ranks from getting here.
            wait_until(lambda: not list(mark.parent.glob(f"{when}-{step}-*")), 30)
            os.kill(os.getpid(), signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def repeated(marks: Path, workers: int = 4) -> int:
    """Return how many steps were made by more processes than there were workers: they were made again."""
    return sum(count > workers for count in Counter((marks / "ledger").read_text(encoding="utf-8").split()).values())


def mortal(marks: Path, workers: int = 4, replicas: int = 2, **elastic: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Mortal,
        config={"batch": 12 // workers, "marks": str(marks)},
        num_workers=workers,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, parallel="fsdp", replicas=replicas),
        elastic=ElasticConfig(batch="global", **elastic),
    )


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    """Return one worker's weights after each of three epochs."""
    with trainer(1, 12) as plain:
        found = []
        for _ in range(3):
            plain.train()
            found.append(weights(plain))
        return found


def held(sharded: TorchTrainer) -> list[int]:
    """Return how many numbers each worker holds for parameters and the optimizer."""

    def count(operator: Any) -> int:
        states = operator.optimizer.state.values()
        tensors = [*operator.model.parameters(), *(each for state in states for each in state.values())]
        return sum(each.to_local().numel() for each in tensors if hasattr(each, "to_local"))

    return sharded.apply_all_operators(count)


@pytest.mark.parametrize(
    ("fates", "left", "in_place"),
    [
        (["before-3-1"], 3, True),
        (["after-3-0"], 3, True),
        (["before-3-0", "before-3-3"], 2, True),
        (["before-3-1", "before-3-3"], 2, False),
    ],
    ids=["one", "one after its step", "two with different shards", "both copies of one shard"],
)
def test_kills(fates: list[str], left: int, in_place: bool, tmp_path: Path, undisturbed: Any) -> None:
    for fate in fates:
        (tmp_path / fate).touch()
    with mortal(tmp_path, grow=False, snapshot_every=3) as four:
        pids = four.apply_all_workers(os.getpid)
        four.train()
        assert not list(tmp_path.glob("*-*"))
        assert {each.in_place for each in four.recoveries} == {in_place}
        assert four.world_size == left
        assert set(four.apply_all_workers(os.getpid)) < set(pids)  # no survivor was replaced
        assert same(weights(four), undisturbed[0])
        four.train()
        assert same(weights(four), undisturbed[1])
    assert repeated(tmp_path) == four.recoveries[0].batches_redone


def test_growth_and_resizing(tmp_path: Path, undisturbed: Any) -> None:
    with mortal(tmp_path, grow="epoch") as sharded:
        sharded.train(num_steps=2)
        for count, divided in (
            (3, 3),
            (1, 1),
            (2, 1),
        ):  # with three workers there is one copy of each shard, with two there are two
            sharded.resize(count)
            assert sharded.world_size == count
            assert sum(held(sharded)) == count // divided * held_by_one(sharded)
        sharded.train()
        assert same(weights(sharded), undisturbed[0])
        (tmp_path / "before-5-0").touch()
        sharded.train()
        assert sharded.world_size == 1
        sharded.resize(2)  # the survivor has another rank than in the earlier mesh of the same shape
        sharded.train()
        assert all(each.in_place and not each.batches_redone for each in sharded.recoveries)
        assert same(weights(sharded), undisturbed[2])


def test_new_workers_keep_snapshots_when_the_others_do(tmp_path: Path, undisturbed: Any) -> None:
    """They have not counted the batches before they joined."""
    with mortal(tmp_path, grow="epoch", snapshot_every=2, hang_timeout_s=30) as sharded:
        for count in (2, 4):
            sharded.train(num_steps=1)
            sharded.resize(count)
        sharded.train()
        assert [each.reason for each in sharded.recoveries] == ["shrink", "growth"]
        assert same(weights(sharded), undisturbed[0])


def held_by_one(sharded: TorchTrainer) -> int:
    """Return how many numbers the model and its optimizer have, of which each parameter that is trained has three."""
    return sum(each.numel() * (3 if each.requires_grad else 1) for each in sharded.get_model().parameters())


def test_a_step_that_only_some_ranks_have_made(tmp_path: Path, undisturbed: Any) -> None:
    """The failure of rank 1 keeps some of the others from seeing that all ranks have the gradients of a step."""
    with mortal(tmp_path, grow=False) as four:

        def fail_in_the_next_step(operator: Any) -> None:
            def after_agreement(*_: Any) -> None:
                handle.remove()
                if operator.world_rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if operator.world_rank == 2:
                    raise torch.distributed.DistBackendError("a peer failed")

            handle = operator.optimizer.register_step_pre_hook(after_agreement)

        four.train(num_steps=1)
        four.apply_all_operators(fail_in_the_next_step)
        four.train()
        assert [(each.in_place, each.removed_ranks) for each in four.recoveries] == [(True, (1,))]
        assert same(weights(four), undisturbed[0])


@pytest.mark.parametrize(
    ("fates", "redone"),
    [(["before-3-1"], 1), (["after-3-0"], 2), (["before-3-1", "before-3-3"], 1), (["before-3-1", "before-3-2"], 3)],
    ids=["one", "the first one after its step", "two", "one and its neighbour"],
)
def test_snapshots_in_the_memory_of_neighbours(
    fates: list[str], redone: int, tmp_path: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one copy of each shard. Rank 2 keeps the snapshot of rank 1's shard, and so on."""
    for fate in fates:
        (tmp_path / fate).touch()
    with mortal(tmp_path, replicas=1, grow=False, snapshot_every=2) as four:
        pids = four.apply_all_workers(os.getpid)
        four.train()
        is_lost = redone == 3
        assert not list(tmp_path.glob("*-*"))
        assert [(each.in_place, each.batches_redone) for each in four.recoveries] == [(False, redone)]
        assert same(weights(four), undisturbed[0])
        assert ("no copy of a shard is left, nor a snapshot of it" in caplog.text) == is_lost
        now = four.apply_all_workers(os.getpid)
        assert set(now).isdisjoint(pids) if is_lost else set(now) == set(pids) - set(dead(pids))
        four.train()
        assert same(weights(four), undisturbed[1])
        kept = newest_snapshot(four)
        assert kept is not None and kept.progress.step == 8 and not bytes(kept.data), "the driver has no shards"
    assert repeated(tmp_path) == redone or (fates[0].startswith("after") and repeated(tmp_path) < redone)


def test_one_death_after_another(tmp_path: Path, undisturbed: Any) -> None:
    """The second one is not taken for ranks that make different collective calls, although they have divided the model again."""
    for fate in ("before-1-1", "before-3-1"):
        (tmp_path / fate).touch()
    with mortal(tmp_path, grow=False) as four:
        four.train()
        assert [(each.in_place, each.batches_redone) for each in four.recoveries] == [(True, 0), (False, 2)]
        assert four.world_size == 2 and same(weights(four), undisturbed[0])


def dead(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not alive(pid)]


@pytest.mark.parametrize(("when", "redone"), [("_from_neighbour", 2), ("_agree", 0)])
def test_a_death_while_a_snapshot_is_exchanged(when: str, redone: int, tmp_path: Path, undisturbed: Any) -> None:
    """Rank 1 dies before it sends its shard of the second snapshot, or when all have sent theirs, and none knows that the others have."""

    def die_in_the_next(name: str) -> None:
        def die(taken: int) -> None:
            if torch.distributed.get_rank() == 1 and taken > 2 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        mark = tmp_path / "dead"
        before_resharding(name, die)

    with mortal(tmp_path, replicas=1, grow=False, snapshot_every=3) as four:
        four.apply_all_workers(partial(die_in_the_next, when))
        four.train(num_steps=1)
        four.train()
        assert [(each.in_place, each.batches_redone) for each in four.recoveries] == [(False, redone)]
        assert same(weights(four), undisturbed[0])
        four.train()
        assert same(weights(four), undisturbed[1])


def test_a_death_after_a_resize(tmp_path: Path, undisturbed: Any) -> None:
    """The workers that leave take a part of the last snapshot with them, so the ones that stay have made a new one."""
    with mortal(tmp_path, replicas=1, grow=False) as sharded:
        sharded.train()
        sharded.resize(3)
        assert all(each.in_place for each in sharded.recoveries)
        victim = sharded.apply_all_workers(os.getpid)[1]
        os.kill(victim, signal.SIGKILL)
        sharded.train()
        assert sharded.world_size == 2 and [each.batches_redone for each in sharded.recoveries] == [0, 0]
        assert same(weights(sharded), undisturbed[1])


class Wide(Layers):
    """Four layers of equal size, with Adam's state."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.Adam(model.parameters()))
        data = torch.utils.data.TensorDataset(torch.randn(8, 512), torch.randn(8, 512))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=1))
        self.criterion = torch.nn.MSELoss()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return TrainingOperator.train_batch(self, batch, batch_info)


def bytes_held(operator: Any) -> int:
    """Return how many bytes of memory the parameters and the optimizer's state have, padding included."""
    states = operator.optimizer.state.values()
    tensors = [*operator.model.parameters(), *(each for state in states for each in state.values())]
    storages = [getattr(each, "_local_tensor", each).untyped_storage() for each in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Refusing(Mortal):
    """The last rank refuses a state while there is a file for it, and the rank in `config["dies"]` dies while it loads one."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        marks, rank = Path(self.config["marks"]), self.config["dies"]
        if self.world_rank == rank and (marks / "die").exists():
            (marks / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (marks / "refuse").exists() and self.world_rank == self.world_size - 1:
            raise ValueError("this rank refuses")


@pytest.mark.parametrize("dies", [1, None])
def test_a_load_that_fails_on_one_rank(dies: int | None, tmp_path: Path, undisturbed: Any) -> None:
    """Only a load helps then. If a rank fails in one, the shards of the others are enough to repeat it."""
    config = {"batch": 3, "marks": str(tmp_path), "dies": dies}
    with TorchTrainer(
        training_operator_cls=Refusing,
        config=config,
        num_workers=4,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, parallel="fsdp", replicas=2),
        elastic=ElasticConfig(batch="global", grow=False),
    ) as four:
        four.train(num_steps=1)
        path = four.save(tmp_path / "earlier.pt")
        four.train(num_steps=1)
        (tmp_path / "refuse").touch()
        (tmp_path / "die").touch()
        with pytest.raises(
            CheckpointError, match=r"rank \d: .*this rank refuses.*Now the state of this trainer is undefined"
        ):
            four.load(path)
        assert len(four.recoveries) == (dies is not None)
        (tmp_path / "refuse").unlink()
        with pytest.raises(CheckpointError, match="the state of this trainer is undefined"):
            four.train()
        four.load(path)
        four.train()
        assert same(weights(four), undisturbed[0])


class EndsWhenPickled:
    """Ends the process that pickles it, once. A copy of a state has the object itself."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __deepcopy__(self, memo: Any) -> "EndsWhenPickled":
        return self

    def __reduce__(self) -> Any:
        end_once(self.mark)
        return list, ()


def end_once(mark: Path) -> dict[str, Any]:
    """End the process when `save` has returned; in the call, it would be repeated."""
    if not mark.exists():
        wait_until((mark.parent / "returned").exists, 30)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


class Saving(Mortal):
    own: Any = None

    def state_dict(self) -> Any:
        return self.own

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        getattr(self.model, "module", self.model)[1].eval()
        return TrainingOperator.train_batch(self, batch, batch_info)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("options", [{"parallel": "fsdp", "replicas": 2}, {}], ids=["fsdp", "ddp"])
def test_a_worker_that_is_killed_during_a_save_in_the_background(
    options: dict[str, Any], sharded: bool, tmp_path: Path, undisturbed: Any
) -> None:
    """Rank 1 while it stores its part, or rank 0 while it writes the file. The older checkpoint stays."""

    def doom(operator: Any) -> None:
        if not sharded:
            operator.own = EndsWhenPickled(tmp_path / "dead")
        elif operator.world_rank == 1:
            storing.instead_of_storing(partial(end_once, tmp_path / "dead"))

    with TorchTrainer(
        training_operator_cls=Saving,
        config={"batch": 3, "marks": str(tmp_path)},
        num_workers=4,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, **options),
        elastic=ElasticConfig(batch="global", grow=False, snapshot_every=None),
    ) as four:
        four.train(num_steps=1)
        path = four.save(tmp_path / "saved", sharded=sharded)
        four.train(num_steps=1)
        four.apply_all_operators(doom)
        handle = four.save(path, blocking=False, sharded=sharded)
        (tmp_path / "returned").touch()
        with pytest.raises(CheckpointError, match="the worker that was sending the checkpoint failed"):
            handle.result(60)
        assert (tmp_path / "dead").exists()
        four.train()
        assert [each.in_place for each in four.recoveries] == [True] and four.world_size == 3
        assert same(weights(four), undisturbed[0])
        four.load(path, trusted=True)
        assert [each for each in os.listdir(tmp_path) if each.endswith(".tmp")] == []
        four.train()
        assert same(weights(four), undisturbed[0]), "from the step after which it was saved"


def test_memory_per_worker() -> None:
    """Print how many bytes each of four workers holds for parameters and Adam's state."""
    found = {}
    for name, options in {"ddp": {}, "fsdp": {"replicas": 1}, "fsdp, replicas=2": {"replicas": 2}}.items():
        wanted = TrainingOptions(parallel="fsdp", **options) if options else None
        with TorchTrainer(
            training_operator_cls=Wide, config={"batch": 1}, num_workers=4, use_gpu=False, options=wanted
        ) as four:
            four.train()
            found[name] = max(four.apply_all_operators(bytes_held))
    print(found)
    whole = found["ddp"]
    assert whole >= 3 * 4 * 4 * (512 * 512 + 512)
    assert found["fsdp"] < 1.01 * whole / 4 and found["fsdp, replicas=2"] < 1.01 * whole / 2
