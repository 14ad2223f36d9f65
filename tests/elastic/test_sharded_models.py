"""Sharded models: after a kill, a growth and a resize, new processes load the newest checkpoint. The final weights equal an undisturbed
run's."""

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
import torch.distributed as dist

from raysgd import (
    AutoCheckpoint,
    CheckpointError,
    ConfigError,
    ElasticConfig,
    TorchTrainer,
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
    marks: Path,
    workers: int = 2,
    checkpoints: AutoCheckpoint | None = None,
    operator: type[Mortal] = Mortal,
    **elastic: Any,
) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator,
        config={"batch": 12 // workers, "marks": str(marks)},
        num_workers=workers,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, parallel="fsdp"),
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


def two_shards(marks: Path, *fates: str, every: Any = None) -> TorchTrainer:
    """Return a trainer of two workers, with checkpoints if they are made every so often."""
    for fate in fates:
        (marks / fate).touch()
    checkpoints = None if every is None else AutoCheckpoint(path=marks / "checkpoints", every=every)
    return mortal(marks, 2, checkpoints, grow=False)


def redone_in(trainer: TorchTrainer) -> list[tuple[bool, int, int]]:
    return [(each.in_place, each.batches_redone, each.world_size_after) for each in trainer.recoveries]


@pytest.mark.parametrize(
    ("every", "fates", "redone"),
    [
        ("epoch", ["before-6-1"], (2,)),
        (3, ["before-7-1"], (1,)),
        ("epoch", ["before-6-0", "before-6-1"], (1, 2)),  # as far as the script's process has heard
        ("epoch", ["before-2-0"], (2,)),  # before there is a checkpoint, training begins again
    ],
    ids=["of the last epoch", "within the epoch", "all workers", "the first epoch"],
)
def test_after_a_kill_new_processes_load_the_newest_checkpoint(
    every: Any, fates: list[str], redone: tuple[int, ...], tmp_path: Path, undisturbed: Any
) -> None:
    with two_shards(tmp_path, *fates, every=every) as two:
        pids, results = two.apply_all_workers(os.getpid), []
        for epoch in two.epochs(3):
            results.append(two.train())
            finish_saves(two)
            assert same(weights(two), undisturbed[epoch - 1])
        assert not list(tmp_path.glob("before-*"))
        assert [each.in_place for each in two.recoveries] == [False]
        assert two.recoveries[0].batches_redone in redone
        assert not set(two.apply_all_workers(os.getpid)) & set(pids)
    assert [each["num_samples"] for each in results] == [42] * 3


def test_a_resize_and_a_growth_begin_at_the_newest_checkpoint(tmp_path: Path, undisturbed: Any) -> None:
    checkpoints = AutoCheckpoint(path=tmp_path / "checkpoints")
    with mortal(tmp_path, 3, checkpoints, grow=False) as sharded:
        for epoch in sharded.epochs(3):
            if epoch == 2:
                sharded.resize(2)
                sharded.train(num_steps=2)
                sharded.resize(3)
            sharded.train()
            assert sharded.world_size == 3
            assert same(weights(sharded), undisturbed[epoch - 1])
        assert redone_in(sharded) == [(False, 0, 2), (False, 2, 3)]


class Together(Mortal):
    """Makes a collective call before the backward pass, so a batch cannot be divided into parts."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        dist.all_reduce(torch.zeros(1))
        return super().train_batch(batch, batch_info)


def test_fewer_workers_for_a_batch_that_cannot_be_divided(tmp_path: Path) -> None:
    """Checkpoints have what the first step has shown. Without that, new processes would begin at the same step again and again."""
    checkpoints = AutoCheckpoint(path=tmp_path / "checkpoints")
    with mortal(tmp_path, 3, checkpoints, Together, grow=False) as three:
        for epoch in three.epochs(2):
            if epoch == 2:
                finish_saves(three)
                three.resize(2)
            three.train()
        assert redone_in(three) == [(False, 0, 2)] and three.batch_mode == "per_worker"
    with mortal(tmp_path, 3, None, Together, grow=False) as three:
        three.load_state_dict(three.state_dict())
        three.train()
        three.resize(2)
        with pytest.raises(
            ConfigError, match=r"a batch cannot be divided into parts.*ElasticConfig\(batch='per_worker'\)"
        ):
            three.train()


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
        assert redone_in(two) == [(False, 6, 2)]
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
        assert redone_in(two) == [(False, 3, 2)]
        assert same(weights(two), undisturbed[1])


def test_new_processes_load_what_was_loaded(tmp_path: Path, undisturbed: Any) -> None:
    """In a file, a folder or a dictionary, and not in what was loaded before."""
    with two_shards(tmp_path) as two:
        two.load_state_dict(two.state_dict())
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
            assert redone_in(two) == [(False, 2, 2)]
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
        assert redone_in(two) == [(False, 2, 2)]
        assert same(weights(two), undisturbed[1])
    with two_shards(tmp_path) as two:
        two.load(path, trusted=True)
        two.train(num_steps=1)
        two.load(other, trusted=True)
        two.load(path, trusted=True)
        shutil.rmtree(path) if sharded else Path(path).unlink()
        Path(other).rename(path)
        (tmp_path / "before-5-0").touch()
        with pytest.raises(
            CheckpointError, match=r"(?s)the workers have changed.*path was replaced since it was loaded"
        ):
            two.train()


def test_without_a_checkpoint_the_first_call_of_train_is_refused(tmp_path: Path, undisturbed: Any) -> None:
    with two_shards(tmp_path) as two:
        with pytest.raises(ConfigError, match=r"checkpoints=AutoCheckpoint\(...\).* load\(\)"):
            two.train()
        two.load_state_dict(two.state_dict())
        two.train()
        assert same(weights(two), undisturbed[0])


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
        pytest.raises(CheckpointError, match=r"the workers have changed, .* cannot be loaded"),
    ):
        for epoch in two.epochs(2):
            if epoch == 2:
                finish_saves(two)
                Path(two.latest_checkpoint or "").unlink()
            two.train()


def test_a_death_while_a_checkpoint_is_loaded_again(tmp_path: Path, undisturbed: Any) -> None:
    """Of three workers, one fails in a step, and another one when it loads the checkpoint."""
    with mortal(tmp_path, 3, AutoCheckpoint(path=tmp_path / "checkpoints"), grow=False) as three:
        for epoch in three.epochs(2):
            if epoch == 2:
                finish_saves(three)
                (tmp_path / "before-6-1").touch()
                (tmp_path / "loads-0-0").touch()
            three.train()
        assert not list(tmp_path.glob("loads-*"))
        assert redone_in(three) == [(False, 2, 3)]
        assert same(weights(three), undisturbed[1])


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
    """The last rank refuses a state while there is a file for it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (Path(self.config["marks"]) / "refuse").exists() and self.world_rank == self.world_size - 1:
            raise ValueError("this rank refuses")


def test_a_load_that_fails_on_one_rank(tmp_path: Path, undisturbed: Any) -> None:
    """Only a load helps then."""
    config = {"batch": 3, "marks": str(tmp_path)}
    with TorchTrainer(
        training_operator_cls=Refusing,
        config=config,
        num_workers=4,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, parallel="fsdp"),
        elastic=ElasticConfig(grow=False),
    ) as four:
        four.load_state_dict(four.state_dict())
        four.train(num_steps=1)
        path = four.save(tmp_path / "earlier.pt")
        four.train(num_steps=1)
        (tmp_path / "refuse").touch()
        with pytest.raises(
            CheckpointError, match=r"rank \d: .*this rank refuses.*Now the state of this trainer is undefined"
        ):
            four.load(path)
        assert not four.recoveries
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
def test_a_worker_that_is_killed_during_a_save_in_the_background(
    sharded: bool, tmp_path: Path, undisturbed: Any
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
        options=TrainingOptions(clip_norm=0.5),
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
    for name in ("ddp", "fsdp"):
        given: Any = {"config": {"batch": 1}, "num_workers": 4, "use_gpu": False}
        with TorchTrainer(training_operator_cls=Wide, options=TrainingOptions(parallel=name), **given) as four:
            four.load_state_dict(four.state_dict())
            four.train()
            found[name] = max(four.apply_all_operators(bytes_held))
    print(found)
    assert found["ddp"] >= 3 * 4 * 4 * (512 * 512 + 512)
    assert found["fsdp"] < 1.01 * found["ddp"] / 4
