"""raysgd sets those attributes of a LightningModule that Lightning's own Trainer sets or uses, and no others."""

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import TorchTrainer, TrainingOperator
from tests.recorded import forget, recorded, touched
from tests.torch.lightning.modules import Net


def test_a_lightning_module() -> None:
    forget()
    operator = TrainingOperator.from_ptl(recorded(Net))
    with TorchTrainer(training_operator_cls=operator, use_gpu=False, config={"count": 40}) as trainer:
        trainer.train()
        trainer.validate()
        assert {name for _, name, _ in touched()} == {"trainer", "log"}
        module: Any = trainer.get_local_operator().module
        assert "log" not in vars(module)
