"""raysgd writes nothing to the user's objects: models, optimizers, schedulers, loaders; and to operators only what is its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.callbacks import TorchProfilerCallback
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.recorded import forget, recorded, touched

WORKERS, ROWS, BATCH = 2, 24, 2


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    forget()
    yield
    forget()


class Own(TrainingOperator):
    """All its parts are watched, and so is it."""

    def setup(self, config: dict[str, Any]) -> None:
        self.names = {*vars(self)}  # of what raysgd keeps in operators
        model = recorded(nn.Sequential)(nn.Linear(2, 3), recorded(nn.BatchNorm1d)(3), recorded(nn.Linear)(3, 1))
        optimizer = recorded(torch.optim.SGD)(model.parameters(), lr=0.01, momentum=0.9)
        schedule = recorded(ExponentialLR)(optimizer, 0.9)
        self.parts = model, optimizer, schedule
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=recorded(nn.MSELoss)(), schedulers=schedule
        )
        x = torch.arange(2.0 * ROWS).reshape(ROWS, 2) / ROWS
        loader = recorded(DataLoader)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        self.register_data(
            train_loader=loader(data, batch_size=BATCH, shuffle=True), validation_loader=loader(data, batch_size=BATCH)
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulate": {"options": TrainingOptions(accumulate=2)},
    "clip_norm": {"options": TrainingOptions(clip_norm=0.1)},
    "clip_value": {"options": TrainingOptions(clip_value=0.1)},
    "fp16": {"options": TrainingOptions(precision="fp16")},
    "bf16": {"options": TrainingOptions(precision="bf16")},
    "on_nonfinite": {"options": TrainingOptions(on_nonfinite="skip")},
    "gradients": {"options": TrainingOptions(gradients="ranks")},
    "compile": {"options": TrainingOptions(compile={"backend": "eager"})},
    "channels_last": {"options": TrainingOptions(channels_last=True)},
    "per_worker": {"elastic": ElasticConfig(batch="per_worker", grow=False)},
    "global": {"elastic": ElasticConfig(grow=False)},
    "epochs": {"scheduler_step_freq": "epoch"},
    "manual": {"scheduler_step_freq": "manual"},
    "seed": {"seed": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_writes_to_the_users_objects(name: str, tmp_path: Path) -> None:
    given = {"training_operator_cls": Own, "elastic": ElasticConfig(grow=False), **OPTIONS[name]}
    given = {"scheduler_step_freq": "batch", "num_workers": WORKERS, "use_gpu": False, **given}
    with Cluster([Fault("kill", "forward", rank=1, step=3)]) as cluster, TorchTrainer(**given) as trainer:
        trainer.train()
        assert trainer.world_size == 1 and not cluster.left
        trainer.save(tmp_path / "a.pt")
        trainer.resize(WORKERS)  # the new one gets a state
        trainer.train(num_steps=2, profile=True)
        trainer.validate()
        trainer.predict(torch.zeros(4, 2))
        trainer.load(tmp_path / "a.pt")
        trainer.train()
        assert_as_made(trainer)


def test_a_trace_writes_nothing(tmp_path: Path) -> None:
    """In this process, because the profiler is one for all threads."""
    tracing = TorchProfilerCallback(tmp_path)
    with TorchTrainer(training_operator_cls=Own, scheduler_step_freq="batch", callbacks=[tracing]) as trainer:
        trainer.train(num_steps=3)
        assert_as_made(trainer)


def assert_as_made(trainer: TorchTrainer) -> None:
    # `compile` sets what torch's own `model.compile()` sets.
    assert [each for each in touched() if each[1] != "_compiled_call_impl"] == []
    for names in trainer.apply_all_operators(lambda operator: sorted({*vars(operator)} - operator.names)):
        assert names == ["criterion", "model", "names", "optimizer", "parts", "schedule"]
