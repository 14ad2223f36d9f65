"""Clients without the key cannot disturb a save: it writes the weights, or fails and leaves the old file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer
from tests.attacks.save_ports import KINDS, attacked, listening
from tests.tiers import NIGHTLY
from tests.torch.small import Line, weights

pytestmark = [pytest.mark.more, pytest.mark.skipif(sys.platform != "linux", reason="the attackers find ports in /proc")]

SAVES = 40 if NIGHTLY else 2
PATIENCE_S = 60.0  # a save that waits for an attacker would take 600 s


class Paced(Line):
    """Has a state whose save takes long enough for an attacker to connect first."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        model = nn.Linear(1000, 1000)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in self._parts.models[0].parameters():
                parameter.normal_()
        return {}

    def state_dict(self) -> Any:
        time.sleep(0.3)
        return None


@pytest.fixture(scope="module")
def rays_ports(ray_cluster: None) -> set[tuple[str, int]]:
    """Return the ports on which this process listened before it created a trainer."""
    return listening(os.getpid())


@pytest.fixture(scope="module")
def trainer(rays_ports: set[tuple[str, int]]) -> Iterator[TorchTrainer]:
    with TorchTrainer(training_operator_cls=Paced, use_ray=True, use_gpu=False) as trainer:
        yield trainer


@pytest.mark.parametrize("kind", KINDS)
def test_clients_without_the_key_change_nothing(
    trainer: TorchTrainer, rays_ports: set[tuple[str, int]], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    with attacked(kind, rays_ports) as attack:
        for number in range(SAVES):
            trainer.train()
            expected, began = weights(trainer), time.monotonic()
            saved = trainer.save(path, blocking=number % 2 == 0)
            if not isinstance(saved, str):
                assert saved.result(PATIENCE_S) == str(path)
            assert time.monotonic() - began < PATIENCE_S
            assert torch.equal(stored(path), expected)
            assert os.listdir(tmp_path) == ["x.pt"]
    assert attack.connections >= 1
    assert trainer.recoveries == [] and trainer.world_size == 1


def stored(path: Path) -> torch.Tensor:
    """Return the weights in a checkpoint's file."""
    state = torch.load(path, weights_only=True)
    return torch.cat([value.flatten() for value in state["models"][0].values()])
