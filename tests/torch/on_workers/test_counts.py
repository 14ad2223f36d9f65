"""Real process groups: losses that are means over tokens lead to the weights of one process that was written by hand."""

from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.torch.counted import Counting, Default, by_hand, entered
from tests.torch.small import weights

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the training"),
]

ROWS, BATCH = 23, 3


def two(operator: type[Any], options: TrainingOptions, **more: Any) -> TorchTrainer:
    config = {"rows": ROWS, "batch": BATCH}
    return TorchTrainer(
        training_operator_cls=operator, config=config, num_workers=2, use_gpu=False, options=options, **more
    )


@pytest.mark.parametrize("backend", ["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_tokens_of_two_workers_and_of_one(backend: str) -> None:
    with two(Counting, TrainingOptions(clip_norm=0.1), backend=backend, elastic=ElasticConfig(grow=False)) as trainer:
        trainer.train(num_steps=2)
        trainer.resize(1)
        trainer.train()
        assert trainer.batch_mode == "parts"
        found = trainer.apply_all_operators(
            lambda operator: (operator.unwrapped(operator.model).state_dict(), entered(operator))
        )
    theirs, entries = by_hand(ROWS, 2 * BATCH, clip=0.1)
    mine = torch.cat([each.flatten() for each in found[0][0].values()])
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][1], entries, rtol=1e-12, atol=1e-12)


class Late(Default):
    full = 14


@pytest.mark.parametrize(
    ("parallel", "accumulate"), [("ddp", 1), ("ddp", 2), pytest.param("fsdp", 1, marks=pytest.mark.more)]
)
def test_default_methods_of_which_one_begins_to_count_later(parallel: Any, accumulate: int) -> None:
    options = TrainingOptions(parallel=parallel, accumulate=accumulate)
    with two(Late, options, scheduler_step_freq="epoch") as trainer:
        trainer.load_state_dict(trainer.state_dict())
        result = trainer.train()
        found = weights(trainer)
        assert [each.batches_redone for each in trainer.recoveries] == [0] * (parallel == "ddp" and accumulate == 1)
    assert result["num_samples"] == ROWS
    theirs, _ = by_hand(ROWS, 2 * accumulate * BATCH, full=14)
    torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)
