"""One trainer with two workers, and most of its calls."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import NotActiveError
from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.peek import parts_of
from tests.torch.on_workers.operators import Classes, Net, OwnError
from tests.torch.small import weights

OWN_CONFIG: dict[str, Any] = {BATCH_SIZE: 17}


def set_variable() -> None:
    """Set a variable as a user sets those of NCCL: before the process group is up, and before the operator is created."""
    os.environ["RAYSGD_TEST_HOOK"] = str(torch.distributed.is_initialized())


class Hooked(Classes):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.note["hook"] = os.environ.get("RAYSGD_TEST_HOOK")
        total = torch.ones(1)
        if self._is_distributed:
            torch.distributed.all_reduce(total)  # the process group is up before setup
        self.note["ranks"] = int(total)


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    with pytest.warns(UserWarning) as caught:
        made = TorchTrainer(
            training_operator_cls=Hooked,
            initialization_hook=set_variable,
            config=OWN_CONFIG,
            num_workers=2,
            use_gpu=False,
        )
    with made:
        made.warned = " | ".join(str(each.message) for each in caught)  # type: ignore[attr-defined]
        yield made


def test_the_global_batch_is_divided_and_the_callers_dict_is_unchanged(trainer: TorchTrainer) -> None:
    assert trainer.config[BATCH_SIZE] == 16
    assert OWN_CONFIG == {BATCH_SIZE: 17}
    assert trainer.apply_all_operators(lambda operator: operator.config[BATCH_SIZE]) == [8, 8]
    assert "is 17, which num_workers=2 does not divide: each worker uses 8, all together 16" in trainer.warned  # type: ignore[attr-defined]


def test_hook_rendezvous_and_setup_run_in_this_order(trainer: TorchTrainer) -> None:
    notes = trainer.apply_all_operators(lambda operator: operator.note)
    assert notes == [{"rank": rank, "hook": "False", "ranks": 2} for rank in range(2)]


def test_ranks(trainer: TorchTrainer) -> None:
    def place(operator: Any) -> Any:
        wrapped = type(operator.model).__name__, type(operator.unwrapped()).__name__
        assert operator.unwrapped(operator.model) is operator.unwrapped()
        return operator.world_rank, operator.local_rank, operator.world_size, operator.device.type, wrapped

    wrapped = ("DistributedDataParallel", "Net")
    assert trainer.apply_all_operators(place) == [(0, 0, 2, "cpu", wrapped), (1, 1, 2, "cpu", wrapped)]
    assert trainer.world_size == trainer.max_replicas == 2
    pids = trainer.apply_all_workers(os.getpid)
    assert len({os.getpid(), *pids}) == 3


def test_an_epoch_and_a_validation_which_uses_every_sample_once(trainer: TorchTrainer) -> None:
    first, second = trainer.train(profile=True), trainer.train()
    assert set(first.pop("profile")) == {"mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s"}
    operator = trainer.get_local_operator()
    assert torch.equal(nn.utils.parameters_to_vector(operator.model.parameters()), weights(trainer))
    expected, val = operator.validate(parts_of(operator).validation_loader), trainer.validate()
    assert val["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert val["val_accuracy"] == pytest.approx(expected["val_accuracy"], rel=1e-6)
    assert list(first) == ["epoch", "batch_count", "num_samples", "train_loss", "last_train_loss"]
    assert (first["batch_count"], first["num_samples"]) == (4, 64)
    assert second["epoch"] == first["epoch"] + 1
    assert second["train_loss"] < first["train_loss"]
    assert val["num_samples"] == 101
    assert val["batch_count"] == 7
    assert 0.5 < val["val_accuracy"] <= 1


def test_without_reduction_each_rank_has_a_result(trainer: TorchTrainer) -> None:
    train, val = trainer.train(reduce_results=False), trainer.validate(reduce_results=False)
    assert [each["num_samples"] for each in train] == [32, 32]
    assert sorted(each["num_samples"] for each in val) == [50, 51]
    assert train[0]["train_loss"] != train[1]["train_loss"]
    assert not [name for each in train for name in each if name.startswith("__")]


def test_the_model_has_the_users_class(trainer: TorchTrainer) -> None:
    model = trainer.get_model()
    assert type(model) is type(trainer.get_local_operator().model) is Net
    assert not any(name.startswith("module.") for name in model.state_dict())
    ranks = trainer.apply_all_operators(lambda operator: operator.model.module.layers[0].weight.detach().clone())
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[0], model.layers[0].weight)


def test_an_error_on_one_rank_is_raised_at_once_with_rank_and_traceback(trainer: TorchTrainer) -> None:
    trainer.train()
    before = weights(trainer)
    started = time.monotonic()
    with pytest.raises(OwnError, match="rank failed with 1") as caught:
        trainer.train(info={"fail_rank": 1})
    assert time.monotonic() - started < 20
    assert caught.value.code == 1
    story = str(caught.value.__cause__)
    assert "on rank 1 (process " in story
    assert "in train_batch" in story
    assert 'raise OwnError("rank", code=self.world_rank)' in story

    result = trainer.train()
    assert result["batch_count"] == 3, "the batch that failed and the rest"
    assert not torch.equal(weights(trainer), before)
    ranks = trainer.apply_all_operators(lambda operator: operator.model.module.layers[0].weight.detach().clone())
    assert torch.equal(ranks[0], ranks[1])


def test_a_result_that_cannot_be_pickled_is_named(trainer: TorchTrainer) -> None:
    started = time.monotonic()
    with pytest.raises(TypeError, match=r"the answer cannot be sent.*lock.*return plain values"):
        trainer.apply_all_workers(lambda: threading.Lock())
    assert time.monotonic() - started < 20
    assert trainer.apply_all_workers(lambda: 1) == [1, 1]


def test_shutdown_can_be_called_twice(trainer: TorchTrainer) -> None:
    trainer.shutdown()
    trainer.shutdown(force=True)
    with pytest.raises(NotActiveError):
        trainer.train()
