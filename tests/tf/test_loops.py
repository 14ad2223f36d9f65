"""`fit` and automatic checkpoints with TensorFlow: a killed script ends with the weights of an undisturbed run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from raysgd import AutoCheckpoint
from raysgd.tf import TFTrainer
from tests.peek import finish_saves, leave_no_checkpoint_out
from tests.tf.small import Small, arrays


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == self.config.get("die_at"):
            raise Killed
        return super().train_batch(batch, batch_info)


def started(folder: Path, **config: Any) -> TFTrainer:
    checkpoints = AutoCheckpoint(path=folder, every=4, best="val_hits", mode="max")
    trainer = TFTrainer(training_operator_cls=Dying, config=config, checkpoints=checkpoints, resume="auto")
    leave_no_checkpoint_out(trainer)
    return trainer


def test_a_killed_script_ends_as_if_it_never_was(tmp_path: Path) -> None:
    with TFTrainer(training_operator_cls=Dying) as plain:
        expected = [row["train_loss"] for row in plain.fit(2).of("train")]
        state = arrays(plain.state_dict())
    killed = started(tmp_path, die_at=14)
    with pytest.raises(Killed):
        killed.fit(2)
    finish_saves(killed)
    killed.shutdown(force=True)
    with started(tmp_path) as trainer:
        assert trainer.resumed_from == str(tmp_path / "loop1-epoch00001-step000000012.ckpt"), "within the second epoch"
        assert len(trainer.fit(2)) == 4
        assert trainer.history.of("train")[0]["train_loss"] == expected[0]
        found = arrays(trainer.state_dict())
        assert all(np.array_equal(one, other) for one, other in zip(found, state, strict=True))
        assert trainer.best_checkpoint is not None and trainer.best_checkpoint.endswith(".ckpt")
