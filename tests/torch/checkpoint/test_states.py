"""Checkpoints are complete, portable between trainers, and refused with a reason if they are invalid."""

import io
import random
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from raysgd import AutoCheckpoint, CheckpointError, TorchTrainer, train
from raysgd.torch.group.fsdp import gathered, placed
from raysgd.torch.state import shard_files
from tests import storing
from tests.peek import parts_of
from tests.torch.checkpoint.cases import seed_all
from tests.torch.small import Line, inline, operator_of, weights


class Noisy(Line):
    """Every batch depends on all random states, and the operator has extra state."""

    drawn = 0.0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.drawn += random.random() + float(numpy.random.rand())
        return super().train_batch((nn.functional.dropout(x, 0.3) + 0.1 * random.random(), y), batch_info)

    def state_dict(self) -> Any:
        return {"drawn": self.drawn}

    def load_state_dict(self, state_dict: Any) -> None:
        self.drawn = state_dict["drawn"]


def halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 2, gamma=0.5)


CONFIG: dict[str, Any] = {"shuffle": True, "scheduler": halving}
ARGUMENTS: dict[str, Any] = {"config": CONFIG, "scheduler_step_freq": "batch", "seed": 5}


@pytest.mark.parametrize("before", [0, 2, 3])
def test_training_after_a_load_equals_uninterrupted_training(tmp_path: Path, before: int) -> None:
    """The weights are equal, also in the middle of a shuffled epoch, with dropout."""
    with inline(Noisy, **ARGUMENTS) as trainer:
        trainer.train(num_steps=before)
        path = trainer.save(tmp_path / "line.pt")
        steps = [trainer.train(num_steps=3), trainer.train()]
        expected, drawn = weights(trainer), operator_of(trainer).drawn
        rate = operator_of(trainer).optimizer.param_groups[0]["lr"]
    seed_all(99)
    with inline(Noisy, **ARGUMENTS) as trainer:
        trainer.train(num_steps=1)
        trainer.load(path)
        assert [trainer.train(num_steps=3), trainer.train()] == steps
        assert torch.equal(weights(trainer), expected)
        assert operator_of(trainer).drawn == drawn
        assert operator_of(trainer).optimizer.param_groups[0]["lr"] == rate


def test_state_dict_does_the_same_without_a_file() -> None:
    with inline(Noisy, **ARGUMENTS) as first, inline(Noisy, **ARGUMENTS) as second:
        first.train()
        state = first.state_dict()
        kept = weights(first)
        assert {"models", "optimizers", "schedulers", "operator", "epoch", "global_step"} <= state.keys()
        assert state["epoch"] == 1
        assert not any(key.startswith("module.") for key in state["models"][0])
        first.train()
        second.load_state_dict(state)
        assert torch.equal(kept, weights(second)), "the state is a copy"
        assert second.train()["epoch"] == 2


@pytest.mark.parametrize(("epoch", "within"), [(7, 0), (0, 1)])
def test_a_changed_epoch_begins_with_the_next_call(epoch: int, within: int) -> None:
    """Steps, weights and schedulers continue from where the state was taken."""
    with inline(Noisy, **ARGUMENTS) as trainer:
        trainer.train()
        if within:
            trainer.train(num_steps=within)
        state, kept = trainer.state_dict(), weights(trainer)
        trainer.train()
        trainer.load_state_dict({**state, "epoch": epoch})
        operator = operator_of(trainer)
        assert torch.equal(weights(trainer), kept)
        assert [each.state_dict() for each in parts_of(operator).schedulers] == state["schedulers"]
        steps = state["position"]["step"]
        first, second = trainer.train(), trainer.train()
        assert [(each["epoch"], each["num_samples"]) for each in (first, second)] == [(epoch + 1, 12), (epoch + 2, 12)]
        assert trainer.state_dict()["position"]["step"] == steps + 2 * first["batch_count"]
        assert trainer.state_dict()["epoch"] == epoch + 2


def test_a_checkpoint_of_v1_can_be_loaded() -> None:
    with inline() as trainer:
        operator = operator_of(trainer)
        model, optimizer = operator.model.state_dict(), operator.optimizer.state_dict()
        given = {"epoch": 7, "operator": None, "models": [model], "optimizers": [optimizer]}
        trainer.load_state_dict(given)
        assert trainer.train()["epoch"] == 8


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Other(Line):
    def setup(self, config: dict[str, Any]) -> None:
        model = config["model"]()
        optimizers = [config.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)]
        self.model, (self.optimizer, *_), self.criterion = self.register(
            models=model, optimizers=optimizers * config.get("optimizers", 1), criterion=nn.MSELoss()
        )
        self.register_data(**self.loaders(config))


def of(**config: Any) -> bytes:
    with inline(Other, config={"model": lambda: nn.Linear(2, 1), **config}) as trainer:
        trainer.train(num_steps=0)
        return storing.state_file(trainer.state_dict())


def line() -> bytes:
    with inline() as trainer:
        return storing.state_file(trainer.state_dict())


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "truncated": (lambda: line()[:-100], "the file is damaged: it was cut off"),
    "text": (lambda: b"epoch: 3\nlr: 0.1\n", "not a complete checkpoint"),
    "bare model": (lambda: saved(nn.Linear(2, 1).state_dict()), "not a checkpoint of raysgd: it contains"),
    "a whole model": (lambda: saved(nn.Linear(2, 1)), "it is not a checkpoint of raysgd"),
    "other format": (lambda: saved({"models": [], "format": "x"}), "format is 'x'"),
    "from the future": (lambda: saved({"models": [], "format": "raysgd-torch", "version": 99}), "newer raysgd"),
    "another shape": (lambda: of(model=lambda: nn.Linear(3, 1), rows=0), "weight has shape (1, 2) here and (1, 3)"),
    "other layers": (
        lambda: of(model=lambda: nn.Sequential(nn.Linear(2, 1))),
        "missing in the checkpoint ['bias', 'weight']",
    ),
    "more optimizers": (lambda: of(optimizers=2), "has 2 optimizers, and this operator registers 1"),
    "another optimizer": (lambda: of(optimizer=torch.optim.Adam), "optimizer 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_state_is_refused_and_changes_nothing(tmp_path: Path, name: str) -> None:
    make, says = REFUSED[name]
    path = tmp_path / "given.pt"
    path.write_bytes(make())
    with inline() as trainer:
        trainer.train(num_steps=2)
        before = storing.state_file(trainer.state_dict())
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert says in str(caught.value)
        assert str(path) in str(caught.value)
        assert "Nothing was changed" in str(caught.value) or "damaged" in str(caught.value)
        assert storing.state_file(trainer.state_dict()) == before
        assert trainer.train()["batch_count"] == 1


class Scaled(nn.Linear):
    """Since its second version it has the whole weight in its state, of which the first one had a quarter."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *args: Any) -> None:
        if (local.get("version") or 1) < 2:
            state[prefix + "weight"] = 4 * state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, local, *args)


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "in the background": lambda trainer, path: trainer.save(path, blocking=False).result(60),
    "automatic": lambda trainer, path: trainer.fit(1, validate_every=0) and next(path.parent.glob("auto/*.pt")),
    "sharded": lambda trainer, path: trainer.save(path, sharded=True),
    "a dictionary": lambda trainer, path: trainer.state_dict(),
}


@pytest.mark.parametrize("name", SAVES)
def test_every_save_has_the_versions_of_modules(tmp_path: Path, name: str) -> None:
    automatic = {"checkpoints": AutoCheckpoint(path=tmp_path / "auto")} if name == "automatic" else {}
    with inline(Other, config={"model": lambda: Scaled(2, 1)}, **automatic) as trainer:
        saved = SAVES[name](trainer, tmp_path / "scaled")
        expected = weights(trainer)
        trainer.load_state_dict(saved) if isinstance(saved, dict) else trainer.load(saved, trusted=True)
        assert torch.equal(weights(trainer), expected)


@pytest.mark.parametrize(
    "changed",
    [
        lambda state: gathered({"models": [state]}, keep=True)["models"][0],
        lambda state: placed(state, state),
        lambda state: train.TorchConfig().backend_cls.encode_data({"model": state})["model"],
    ],
    ids=["gathered from shards", "divided into shards", "in a checkpoint of a function"],
)
def test_a_changed_state_has_the_versions_of_modules(changed: Callable[[Any], Any]) -> None:
    model, twin = Scaled(2, 1), Scaled(2, 1)
    twin.load_state_dict(changed(model.state_dict()))
    assert torch.equal(twin.weight, model.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("later", [False, True], ids=["", "in the background"])
def test_a_file_that_is_saved_on_a_gpu_can_be_read_without_one(tmp_path: Path, later: bool) -> None:
    path = tmp_path / "line.pt"
    with inline(Line, use_gpu=True) as trainer:
        operator_of(trainer).state_dict = lambda: Counter(kept=1)
        trainer.train()
        saved = trainer.save(path, blocking=not later)
        if later:
            saved.result()
        expected = weights(trainer).cpu()
    state = torch.load(path, weights_only=False)
    assert later or type(state["operator"]) is Counter
    moments = [each["momentum_buffer"] for each in state["optimizers"][0]["state"].values()]
    assert {each.device.type for each in [*state["models"][0].values(), *moments]} == {"cpu"} and moments
    assert torch.equal(torch.cat([each.flatten() for each in state["models"][0].values()]), expected.flatten())


def test_saving_makes_folders_and_returns_the_path(tmp_path: Path) -> None:
    with inline() as trainer:
        path = trainer.save(tmp_path / "deep" / "line.pt")
        assert path == str(tmp_path / "deep" / "line.pt")
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            trainer.load(tmp_path / "none.pt")
        with pytest.raises(DeprecationWarning, match=r"load\(\)"):
            trainer.restore(path)


def test_get_model_is_a_copy_in_eval_mode_whichever_call_came_before() -> None:
    with inline() as trainer:
        for call in (trainer.train, trainer.validate):
            call()
            model = trainer.get_model()
            assert type(model) is nn.Linear and not any(module.training for module in model.modules())
            assert trainer.get_local_operator().model.training, "the workers' model stays as it is"
            model.requires_grad_(False).weight.fill_(100.0)
            assert float(trainer.get_model().weight.detach().max()) < 100, "it is a copy"


@pytest.mark.parametrize("own", [False, True], ids=["copies", "own load_state_dict"])
def test_a_state_that_is_read_from_a_file_does_not_need_the_file_later(tmp_path: Path, own: bool) -> None:
    class Subject(Line):
        if own:

            def load_state_dict(self, state_dict: Any) -> None:
                pass

    with inline(Subject) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "line.pt")
        steps = [trainer.train(num_steps=2) for _ in range(2)]
        expected = weights(trainer)
        trainer.load(path)
        Path(path).write_bytes(bytes(Path(path).stat().st_size))  # the same file, and not another one of its name
        assert [trainer.train(num_steps=2)["train_loss"] for _ in range(2)] == [each["train_loss"] for each in steps]
        assert torch.equal(weights(trainer), expected)


def test_an_optimizer_keeps_its_memory_when_its_state_is_read_from_a_file(tmp_path: Path) -> None:
    """A new one, which has no state yet, gets memory of its own."""

    class Subject(Line):
        def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
            return torch.optim.Adam(model.parameters(), lr=lr)

    def moments(trainer: TorchTrainer) -> list[torch.Tensor]:
        return [state["exp_avg"] for state in operator_of(trainer).optimizer.state.values()]

    with inline(Subject) as trainer, inline(Subject) as other:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "line.pt")
        saved = [each.clone() for each in moments(trainer)]
        trainer.train(num_steps=2)
        before = moments(trainer)
        for each in trainer, other:
            each.load(path)
        Path(path).write_bytes(bytes(Path(path).stat().st_size))
        assert all(now is then for now, then in zip(moments(trainer), before, strict=True))
        for each in trainer, other:
            assert all(map(torch.equal, moments(each), saved))
        assert trainer.train(num_steps=2)["train_loss"] == other.train(num_steps=2)["train_loss"]


def test_a_learning_rate_that_is_a_tensor_takes_the_number_of_a_state() -> None:
    """`torch.compile` wants a tensor, so it is often one only in the run that continues."""
    with (
        inline(config={"scheduler": halving}, scheduler_step_freq="batch") as older,
        inline(config={"scheduler": halving, "lr": torch.tensor(0.1)}, scheduler_step_freq="batch") as newer,
    ):
        older.train()
        newer.train()
        newer.load_state_dict(older.state_dict())
        older.train()
        newer.train()
        assert torch.allclose(weights(older), weights(newer))


class WithAdam(Line):
    def make_optimizer(self, model: nn.Module, lr: float) -> Any:
        return torch.optim.Adam(model.parameters())


def test_a_state_of_captured_steps_continues_without_a_gpu() -> None:
    """With the state's `capturable=True`, each step on CPUs would fail."""
    with inline(WithAdam) as trainer:
        trainer.train()
        state = trainer.state_dict()
        trainer.train()
        expected = weights(trainer)
        state["optimizers"][0]["param_groups"][0]["capturable"] = True
        trainer.load_state_dict(state)
        trainer.train()
        assert torch.equal(weights(trainer), expected)


def test_a_worker_that_does_not_see_the_folder_of_its_shards_names_its_machine(tmp_path: Path) -> None:
    says = f"the worker on {socket.gethostname()} does not see .*/parts, .* or a URI"
    with pytest.raises(CheckpointError, match=says):
        shard_files.write(tmp_path / "parts", {}, later=False)
