"""Memory format, SyncBatchNorm and the compiler change the model, but not its checkpoints."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOptions
from raysgd.torch.wrapping import ddp_arguments, formatted
from tests.torch.small import Line, inline, operator_of, weights


class Pictures(Line):
    """A convolution that records the memory formats of its inputs."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.inputs: list[bool] = []

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 1, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(torch.randn(12, 3, 8, 8), torch.randn(12, 1))
        return dict.fromkeys(("train_loader", "validation_loader"), DataLoader(data, batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.inputs.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return super().train_batch(batch, batch_info)


def test_channels_last_for_models_and_batches() -> None:
    with inline(Pictures, options=TrainingOptions(channels_last=True)) as trainer:
        trainer.train()
        operator = operator_of(trainer)
        assert operator.inputs == [True] * 3
        assert operator.model[0].weight.is_contiguous(memory_format=torch.channels_last)
        ours = weights(trainer)
    with inline(Pictures) as plain:
        plain.train()
        assert operator_of(plain).inputs == [False] * 3
        assert torch.allclose(ours, weights(plain), atol=1e-6)


def test_compiled_models_train_the_same_and_checkpoints_do_not_show_it(tmp_path: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with inline(Pictures, options=TrainingOptions(compile={"backend": "eager", "dynamic": False})) as trainer:
        trainer.train()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        trainer.save(tmp_path / "compiled.pt")
        ours = weights(trainer)
        assert trainer.get_model()._compiled_call_impl is None
    with inline(Pictures) as plain:
        plain.train()
        assert torch.allclose(ours, weights(plain), atol=1e-6)
        plain.load(tmp_path / "compiled.pt")
        assert torch.equal(ours, weights(plain))


def test_sync_batchnorm_keeps_the_parameters_that_optimizers_hold() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    held = list(model.parameters())
    (shared,) = formatted([model], TrainingOptions(sync_batchnorm=True), distributed=True)
    assert isinstance(shared[1], nn.SyncBatchNorm)
    assert all(one is other for one, other in zip(shared.parameters(), held, strict=True))
    (alone,) = formatted([nn.Sequential(nn.BatchNorm1d(3))], TrainingOptions(sync_batchnorm=True), distributed=False)
    assert type(alone[0]) is nn.BatchNorm1d


def test_ddp_arguments_of_register_override_those_of_the_trainer() -> None:
    options = TrainingOptions(ddp_args={"bucket_cap_mb": 50, "static_graph": True})
    assert ddp_arguments(options, {"bucket_cap_mb": 5}, [0]) == {
        "device_ids": [0],
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 5,
        "static_graph": True,
    }
