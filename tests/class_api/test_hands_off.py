"""raysgd writes nothing to the user's objects, in processes with DistributedDataParallel and FSDP.

`tests/local/test_hands_off.py` has the options that need no such process.
"""

import pytest

from raysgd import TorchTrainer, TrainingOptions
from tests.local.test_hands_off import Own
from tests.recorded import touched

# What shards a model, and undoes that when the workers change, is FSDP's.
FSDP = {"__class__", "__dict__"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "allowed"), [(TrainingOptions(accumulate=2), set()), (TrainingOptions(parallel="fsdp"), FSDP)]
)
def test_wrapped_models(options: TrainingOptions, allowed: set[str], ray_cluster: None) -> None:
    with TorchTrainer(
        training_operator_cls=Own, num_workers=2, use_gpu=False, options=options, scheduler_step_freq="batch"
    ) as trainer:
        trainer.train()
        trainer.validate()
        trainer.resize(1)
        trainer.train()
        notes = trainer.apply_all_operators(lambda operator: touched())
        assert [each for part in notes for each in part if each[1] not in allowed] == []
