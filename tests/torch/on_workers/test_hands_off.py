"""raysgd writes nothing to the user's objects, in processes with DistributedDataParallel, FSDP and Horovod.

`tests/local/test_hands_off.py` has the options that need no such process.
"""

from typing import Any

import pytest

from raysgd import TorchTrainer, TrainingOptions
from tests.local.test_hands_off import Own
from tests.recorded import touched

# What shards a model is FSDP's.
FSDP = {"__class__", "__dict__"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"options": TrainingOptions(accumulate=2)}, set()),
        ({"options": TrainingOptions(parallel="fsdp")}, FSDP),
        pytest.param(
            {"backend": "horovod", "options": TrainingOptions(accumulate=2, clip_norm=1.0)},
            set(),
            marks=[pytest.mark.horovod, pytest.mark.more],
        ),
    ],
)
def test_wrapped_models(given: dict[str, Any], allowed: set[str], ray_cluster: None) -> None:
    with TorchTrainer(
        training_operator_cls=Own, num_workers=2, use_gpu=False, scheduler_step_freq="batch", **given
    ) as trainer:
        trainer.load_state_dict(trainer.state_dict())
        trainer.train()
        trainer.validate()
        trainer.resize(1)
        trainer.train()
        notes = trainer.apply_all_operators(lambda operator: touched())
        assert [each for part in notes for each in part if each[1] not in allowed] == []
