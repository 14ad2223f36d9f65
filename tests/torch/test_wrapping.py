"""Memory format, SyncBatchNorm and the compiler change the model, but not its checkpoints."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from raysgd.torch.group.wrapping import ddp_arguments, formatted, rewrap
from raysgd.torch.step.parts.batch_mode import OwnCalls
from tests.replicas import operator_alone
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


def test_ddp_that_is_made_again_averages_parameters_that_are_frozen_just_now() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, averaged = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), set[int]()
        trained, arguments = list(model.parameters()), {"find_unused_parameters": True}
        wrapper = DistributedDataParallel(model, **arguments)
        model[0].requires_grad_(False)
        rewrap([wrapper], trained, arguments, TrainingOptions())
        assert [each.requires_grad for each in trained] == [False, False, True, True]

        def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            averaged.update(id(each) for each in bucket.parameters())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model[0].requires_grad_(True)
        wrapper.register_comm_hook(None, hook)
        wrapper(torch.ones(1, 2)).sum().backward()
        assert averaged == {id(each) for each in trained}
    finally:
        dist.destroy_process_group()


def test_a_call_of_the_unwrapped_model_is_no_collective_call() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper, made = DistributedDataParallel(nn.Linear(2, 1)), [7]
        for model, calls in ((wrapper, 0), (wrapper.module, 0), (nn.Identity(), 1)):
            counted = OwnCalls(lambda: made[0], [wrapper], sharded=False)
            model(torch.ones(1, 2))
            made[0] += calls
            assert counted.ended() == calls
    finally:
        dist.destroy_process_group()


def test_ddp_arguments_of_register_override_those_of_the_trainer() -> None:
    options = TrainingOptions(ddp_args={"bucket_cap_mb": 50, "static_graph": True})
    assert ddp_arguments(options, {"bucket_cap_mb": 5}, [0]) == {
        "device_ids": [0],
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 5,
        "static_graph": True,
    }


def test_a_parameter_that_ddp_does_not_know_is_refused_at_the_next_call() -> None:
    with inline() as trainer:
        registered = operator_of(trainer)._registered
        (model,), registered.ddp_args = registered.models, {"bucket_cap_mb": 5}  # as with several workers
        model.bias.requires_grad_(False)
        registered.keep_parameters()
        trainer.train()
        model.bias.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"the parameter bias of Linear .*batch_info\['epoch_idx'\] >= 2"):
            trainer.train()
        model.bias = nn.Parameter(torch.zeros(1))
        with pytest.raises(ConfigError, match=r"bias of Linear is new since self.register\(\).*replace layers first"):
            trainer.train()


def freeze(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def tie(model: Any) -> None:
    model[0].weight = model[1].weight


def freeze_all(model: Any) -> None:
    """Such a model, a teacher for example, gets no gradient, and DDP waits for none."""
    model.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "before", "unused", "refused"),
    [
        *[(change, False, False, True) for change in (freeze, tie)],
        *[(change, True, False, False) for change in (freeze, tie)],
        *[(change, False, True, False) for change in (freeze, tie)],
        (freeze_all, False, False, False),
    ],
)
def test_parameters_that_setup_freezes_or_ties_after_register_are_refused(
    change: Any, before: bool, unused: bool, refused: bool
) -> None:
    class Changing(Line):
        def setup(self, config: dict[str, Any]) -> None:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            if before:
                change(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.register(models=model, optimizers=optimizer, ddp_args={"find_unused_parameters": unused})
            if not before:
                change(model)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        refuses = pytest.raises(ConfigError, match=r"0\.weight after self.register\(\), or replaced it.*Do that before")
        with refuses if refused else nullcontext():
            operator_alone(Changing, alone=False, num_workers=2)
    finally:
        dist.destroy_process_group()
