"""`self.part_state` in real processes: a recurrent model on two workers, against a loop by hand."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.torch.small import weights
from tests.torch.test_part_state import EPOCHS, STEPS, Recurrent, assert_equal

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:the training loader does not shuffle"),
]


class Mortal(Recurrent):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        mark = Path(self.config["mark"])
        if mark.exists() and (batch_info["part"], batch_info["batch_idx"]) == (1, 1):
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batch, batch_info)


def trainer(mark: Path, **options: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Mortal,
        num_workers=2,
        use_gpu=False,
        config={"columns": 6, "mark": str(mark)},
        elastic=ElasticConfig(grow=False),
        options=TrainingOptions(**options),
    )


def test_it_goes_with_its_part_and_is_lost_with_its_only_worker(tmp_path: Path) -> None:
    with trainer(tmp_path / "mark") as run:
        for count in (2, 1, 2):
            run.resize(count)
            run.train(num_steps=2)
        saved = run.state_dict()
        for _ in range(2):
            run.train(num_steps=STEPS * EPOCHS - 6)
            assert_equal(weights(run), 2)
            run.load_state_dict(saved)
        (tmp_path / "mark").touch()
        run.train(num_steps=3)
        assert (run.world_size, run.recoveries[-1].batches_redone) == (1, 0)
        run.train(num_steps=1)
        states = run.state_dict()["part_states"]
    assert {part: each["seen"] for part, each in states.items()} == {0: 10, 1: 3}


@pytest.mark.more
def test_it_is_in_sharded_checkpoints(tmp_path: Path) -> None:
    with trainer(tmp_path / "mark", parallel="fsdp") as run:
        run.load_state_dict(run.state_dict())
        run.train(num_steps=3)
        run.save(tmp_path / "half")
        for _ in range(2):
            run.train(num_steps=STEPS * EPOCHS - 3)
            assert_equal(weights(run), 2)
            run.load(tmp_path / "half")
