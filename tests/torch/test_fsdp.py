"""Sharded models (FSDP2) over gloo: training, validation, full and sharded checkpoints, other numbers of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CheckpointError, ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from raysgd.torch.foreign import resharding

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("ray_cluster")]


class Layers(TrainingOperator):
    """A model with sizes that the number of workers does not divide, a frozen weight, a buffer, and Adam's state."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config.get("seed", 5))
        body = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        model = nn.Sequential(body, nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 1))
        model[1].eval()
        model[2].bias.requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.03)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(42, 3, generator=generator)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        batch = config["batch"]
        validation = DataLoader(TensorDataset(*data[:13]), batch_size=4)
        self.register_data(train_loader=DataLoader(data, batch_size=batch), validation_loader=validation)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.model[1].eval()
        mark = self.config.get("fails")
        if mark and self.world_rank == 1 and batch_info["global_step"] == 4 and not Path(mark).exists():
            Path(mark).touch()
            raise ZeroDivisionError("planned")
        return super().train_batch(batch, batch_info)


def trainer(
    workers: int,
    batch: int,
    config: dict[str, Any] | None = None,
    elastic: ElasticConfig | None = None,
    callbacks: Any = (),
    operator: type[Layers] = Layers,
    **options: Any,
) -> TorchTrainer:
    made = TorchTrainer(
        training_operator_cls=operator,
        config={"batch": batch, **(config or {})},
        num_workers=workers,
        use_gpu=False,
        options=TrainingOptions(clip_norm=0.5, **options),
        elastic=elastic,
        callbacks=callbacks,
    )
    if options.get("parallel") == "fsdp":
        made.load_state_dict(made.state_dict())
    return made


def weights(from_trainer: TorchTrainer) -> torch.Tensor:
    model = from_trainer.get_model()
    assert not any(hasattr(each, "full_tensor") for each in model.parameters()) and not hasattr(model, "unshard")
    assert [each.requires_grad for each in model.parameters()][-1] is False
    return torch.cat([value.detach().flatten().float() for value in model.state_dict().values()])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


@pytest.fixture(scope="module")
def alone() -> tuple[torch.Tensor, float, torch.Tensor]:
    """Return one worker's weights and validation loss after an epoch, and its weights after another one."""
    with trainer(1, 12) as plain:
        plain.train()
        after, loss = weights(plain), plain.validate()["val_loss"]
        plain.train()
        return after, loss, weights(plain)


def test_from_two_workers_to_three_and_back(alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the workers run elsewhere
    whole, parts = str(tmp_path / "whole.pt"), "parts"
    expected, loss, later = alone
    with trainer(2, 2, {"fails": str(tmp_path / "failed")}, parallel="fsdp", accumulate=3) as two:
        with pytest.raises(ZeroDivisionError):
            two.train()
        two.train()
        assert same(weights(two), expected)
        result = two.validate()
        assert result["num_samples"] == 13 and result["val_loss"] == pytest.approx(loss, rel=1e-4)
        is_shared(two)
        two.save(whole)
        assert two.save(parts, sharded=True) == str(tmp_path / parts)
        two.save(parts, sharded=True)  # replaces the old one
        assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "parts", "whole.pt"]
    loads_with_other_numbers_of_workers(whole, parts, expected, later)


def is_shared(two: TorchTrainer) -> None:
    """Check that each worker has a part of the model, and that the parts together are the full model."""
    kinds = two.apply_all_operators(lambda op: [type(p).__name__ for p in op.model.parameters()])
    assert set(kinds[0]) == {"DTensor"}
    held = two.apply_all_operators(lambda op: sum(p.to_local().numel() for p in op.model.parameters()))
    assert sum(held) == sum(p.numel() for p in two.get_model().parameters()) and min(held) > 0


def loads_with_other_numbers_of_workers(whole: str, parts: str, expected: torch.Tensor, later: torch.Tensor) -> None:
    with trainer(1, 12, {"seed": 6}) as plain:
        plain.load(whole)
        plain.train()
        assert same(weights(plain), later)

    with trainer(3, 4, {"seed": 7}, parallel="fsdp") as three:
        with pytest.raises(CheckpointError, match="trusted=True"):
            three.load(parts)
        three.load(parts, trusted=True)
        assert same(weights(three), expected)
        three.load(whole)
        three.train()
        assert same(weights(three), later)
        three.save(parts, sharded=True)
        three.save(whole)
        three.resize(2)
        assert same(weights(three), later) and three.world_size == 2

    with trainer(2, 6, {"seed": 8}, parallel="fsdp", precision="bf16") as two:
        two.load(parts, trusted=True)
        assert same(weights(two), later)
        assert two.train()["train_loss"] < 2
        two.load(whole)
        assert same(weights(two), later)


class Leaves(Layers):
    """Can leave its loop in the middle of a window. Its first layers keep their full weights until the backward pass."""

    def _configure_fsdp(self, model: nn.Module, mesh: Any) -> None:
        fully_shard(model[0], mesh=mesh, reshard_after_forward=False)  # type: ignore[index]
        fully_shard(model, mesh=mesh)

    def train_epoch(self, iterator: Any, info: Any) -> Any:
        if not info.get("leaves"):
            return super().train_epoch(iterator, info)
        self.train_batch(next(iter(iterator)), {"global_step": 0})
        return {}


def keeps_full_weights(operator: Any) -> list[bool]:
    sharded = [each for each in operator.model.modules() if hasattr(each, "unshard")]
    return [value is None for _, name, value in resharding(sharded) if name == "post_forward_mesh_info"]


def test_a_window_that_was_left_and_a_validation_change_nothing(alone: Any) -> None:
    expected, loss, later = alone
    with trainer(2, 2, operator=Leaves, parallel="fsdp", accumulate=3) as two:
        two.train(info={"leaves": True})
        two.train()
        assert same(weights(two), expected)
        before = two.apply_all_operators(keeps_full_weights)
        assert two.validate()["val_loss"] == pytest.approx(loss, rel=1e-4)
        assert two.apply_all_operators(keeps_full_weights) == before == [[True, True]] * 2
        two.train()
        assert same(weights(two), later)


@pytest.mark.more
def test_compiled_shards_are_saved_in_the_background(alone: Any, tmp_path: Path) -> None:
    expected, _, later = alone
    with trainer(2, 6, parallel="fsdp", compile={"backend": "eager"}) as two:
        two.train()
        handle = two.save(tmp_path / "then.pt", blocking=False)
        two.train()
        assert same(weights(two), later)
        two.load(handle.result(60))
        assert same(weights(two), expected)
        two.train()
        assert same(weights(two), later)
