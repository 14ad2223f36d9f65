"""Sharded models whose shards have copies: kills, growth and resizing. The final weights equal an undisturbed run's."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import (
    AutoCheckpoint,
    CheckpointError,
    ElasticConfig,
    TorchTrainer,
    TrainingFailedError,
    TrainingOptions,
)
from raysgd.torch import TrainingOperator
from tests import storing
from tests.peek import delay_saves, finish_saves, forget_checkpoint
from tests.torch.test_fsdp import Layers, same, trainer, weights

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._end_if_marked("loads", 0)

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


def mortal(
    marks: Path, workers: int = 4, replicas: int = 2, checkpoints: AutoCheckpoint | None = None, **elastic: Any
) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Mortal,
        config={"batch": 12 // workers, "marks": str(marks)},
        num_workers=workers,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, parallel="fsdp", replicas=replicas),
        elastic=ElasticConfig(**elastic),
        checkpoints=checkpoints,
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
    """Without a copy of each shard, training continues from the state that was loaded before."""
    for fate in fates:
        (tmp_path / fate).touch()
    with mortal(tmp_path, grow=False) as four:
        pids = four.apply_all_workers(os.getpid)
        four.load_state_dict(four.state_dict())
        four.train()
        assert not list(tmp_path.glob("*-*"))
        assert {(each.in_place, each.batches_redone) for each in four.recoveries} == {(in_place, 0 if in_place else 3)}
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


def two_shards(marks: Path, *fates: str, every: Any = None) -> TorchTrainer:
    """Return a trainer of two workers, with one copy of each shard, and with checkpoints if they are made every so often."""
    for fate in fates:
        (marks / fate).touch()
    checkpoints = None if every is None else AutoCheckpoint(path=marks / "checkpoints", every=every)
    return mortal(marks, 2, 1, checkpoints, grow=False)


def redone_in(trainer: TorchTrainer) -> list[tuple[bool, int, int]]:
    return [(each.in_place, each.batches_redone, each.world_size_after) for each in trainer.recoveries]


@pytest.mark.parametrize(
    ("every", "fates", "redone"),
    [
        ("epoch", ["before-6-1"], [2]),
        (3, ["before-7-1"], [1]),
        ("epoch", ["before-6-0", "before-6-1"], [1]),  # as far as the script's process has heard
    ],
    ids=["of the last epoch", "within the epoch", "without a survivor"],
)
def test_a_lost_shard_is_in_the_newest_checkpoint(
    every: Any, fates: list[str], redone: list[int], tmp_path: Path, undisturbed: Any
) -> None:
    with two_shards(tmp_path, *fates, every=every) as two:
        results = []
        for epoch in two.epochs(3):
            results.append(two.train())
            finish_saves(two)
            assert same(weights(two), undisturbed[epoch - 1])
        assert not list(tmp_path.glob("before-*"))
        left = 1 if len(fates) == 1 else 2
        for in_place, batches, workers in redone_in(two):
            assert not in_place and workers == left and (batches in (1, 2) if left == 2 else [batches] == redone)
    assert [each["num_samples"] for each in results] == [42] * 3
    if left == 2:
        assert repeated(tmp_path, 1) > 0


def test_a_checkpoint_that_could_not_be_completed(tmp_path: Path, undisturbed: Any) -> None:
    """The call before is made again, too, under its own number: its results and its epoch stay."""
    with two_shards(tmp_path, every="epoch") as two:
        for epoch in two.epochs(3):
            if epoch == 3:
                finish_saves(two)
                forget_checkpoint(two)
                (tmp_path / "before-10-1").touch()
            result = two.train()
            assert result["epoch"] == epoch and result["num_samples"] == 42
        assert redone_in(two) == [(False, 6, 1)]
        assert same(weights(two), undisturbed[2])
        assert [row["epoch"] for row in two.history] == [1, 2, 3]


def test_calls_after_a_checkpoint_that_is_still_being_saved_are_made_again(tmp_path: Path, undisturbed: Any) -> None:
    """The first checkpoint takes longer than the next call of train(), and a worker fails in the one after that."""
    died: list[Path] = []
    with two_shards(tmp_path, every="epoch") as two:
        delay_saves(two, lambda: bool(died) and not died[0].exists())
        for epoch in two.epochs(2):
            counted = [two.train(num_steps=2)["num_samples"]]
            if epoch == 2:
                died.append(tmp_path / "before-7-1")
                died[0].touch()
            counted.append(two.train(num_steps=2)["num_samples"])
            assert counted == [24, 18]
        assert redone_in(two) == [(False, 3, 1)]
        assert same(weights(two), undisturbed[1])


def test_a_lost_shard_is_in_what_was_loaded(tmp_path: Path, undisturbed: Any) -> None:
    """In a file, a folder or a dictionary, and not in what was loaded before."""
    with two_shards(tmp_path) as two:
        two.train()
        whole, parts = two.save(tmp_path / "whole.pt"), two.save(tmp_path / "parts", sharded=True)
        state = two.state_dict()
    loads: list[Callable[[TorchTrainer], None]] = [
        lambda trainer: trainer.load(whole),
        lambda trainer: trainer.load(parts, trusted=True),
        lambda trainer: trainer.load_state_dict(state),
    ]
    for load in loads:
        with two_shards(tmp_path) as two:
            two.load_state_dict(two.state_dict())
            load(two)
            two.train(num_steps=1)
            (tmp_path / "before-6-0").touch()
            two.train()
            assert redone_in(two) == [(False, 2, 1)]
            assert same(weights(two), undisturbed[1])
            two.train()
            assert same(weights(two), undisturbed[2])


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "folder"])
def test_a_loaded_checkpoint_that_is_replaced(sharded: bool, tmp_path: Path, undisturbed: Any) -> None:
    """Training continues from what the trainer has saved in its place, and not from what others have."""
    with two_shards(tmp_path) as two:
        other, path = (two.save(tmp_path / name, sharded=sharded) for name in ("other", "path"))
        two.load(path, trusted=True)
        two.train()
        two.save(path, sharded=sharded)
        two.train(num_steps=1)
        (tmp_path / "before-6-0").touch()
        two.train()
        assert redone_in(two) == [(False, 2, 1)]
        assert same(weights(two), undisturbed[1])
    with two_shards(tmp_path) as two:
        two.load(path, trusted=True)
        two.train(num_steps=1)
        two.load(other, trusted=True)
        two.load(path, trusted=True)
        shutil.rmtree(path) if sharded else Path(path).unlink()
        Path(other).rename(path)
        (tmp_path / "before-5-0").touch()
        with pytest.raises(CheckpointError, match=r"(?s)too few shards .*path was replaced since it was loaded"):
            two.train()


def test_after_a_lost_shard_without_a_checkpoint_only_a_load_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: Any
) -> None:
    with two_shards(tmp_path) as two:
        start = two.state_dict()
    with two_shards(tmp_path, "before-3-1") as two:
        assert "replicas=1 keeps one copy of each shard" in caplog.text
        assert "TrainingOptions(replicas=2)" in caplog.text and "checkpoints=AutoCheckpoint(...)" in caplog.text
        for _ in range(2):
            with pytest.raises(
                TrainingFailedError, match=r"(?s)a part of the model was lost .*1 of [12] are left.*replicas=2"
            ):
                two.train()
        two.load_state_dict(start)
        two.train()
        assert same(weights(two), undisturbed[0])
    caplog.clear()
    with mortal(tmp_path, 2), two_shards(tmp_path, every="epoch"):
        assert "one copy of each shard" not in caplog.text


def test_a_change_after_the_newest_checkpoint_is_made_again(tmp_path: Path) -> None:
    found = []
    for number, fate in enumerate((["before-5-1"], [])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with two_shards(folder, *fate, every="epoch") as two:
            for epoch in two.epochs(2):
                if epoch == 2:
                    finish_saves(two)
                    two.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(lr=0.5))
                two.train()
            assert len(two.recoveries) == len(fate)
            found.append((weights(two), two.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])[0]))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1] == 0.5


def test_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    with (
        two_shards(tmp_path, "before-5-1", every="epoch") as two,
        pytest.raises(CheckpointError, match="too few shards"),
    ):
        for epoch in two.epochs(2):
            if epoch == 2:
                finish_saves(two)
                Path(two.latest_checkpoint or "").unlink()
            two.train()


def test_a_death_while_a_checkpoint_is_loaded_again(tmp_path: Path, undisturbed: Any) -> None:
    """Of three workers, one fails in a step, and another one when it loads the checkpoint."""
    with mortal(tmp_path, 3, 1, AutoCheckpoint(path=tmp_path / "checkpoints"), grow=False) as three:
        for epoch in three.epochs(2):
            if epoch == 2:
                finish_saves(three)
                (tmp_path / "before-6-1").touch()
                (tmp_path / "loads-0-0").touch()
            three.train()
        assert not list(tmp_path.glob("loads-*"))
        assert redone_in(three) == [(False, 2, 1)]
        assert same(weights(three), undisturbed[1])


def test_a_death_after_a_resize(tmp_path: Path, undisturbed: Any) -> None:
    """The workers that leave have given their shards to those that stay, and the checkpoint is older."""
    with mortal(tmp_path, 4, 1, AutoCheckpoint(path=tmp_path / "checkpoints"), grow=False) as sharded:
        for epoch in sharded.epochs(2):
            if epoch == 2:
                finish_saves(sharded)
                sharded.resize(3)
                (tmp_path / "before-5-1").touch()
            sharded.train()
        assert redone_in(sharded) == [(True, 0, 3), (False, 1, 2)]
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
        elastic=ElasticConfig(grow=False),
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
        elastic=ElasticConfig(grow=False, snapshot_every=None),
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
