"""Real process groups: unequal shares, and fewer workers than at the beginning, lead to the weights of one worker."""

from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.local.runs import train
from tests.torch.small import weights
from tests.torch.test_exact_gradients import Curve, Direct

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

ROWS, BATCH = 23, 3


def noting(kind: type[Curve]) -> type[Curve]:
    """Return a class that notes the size of its largest batch."""

    class Notes(kind):  # type: ignore[misc, valid-type]
        largest = 0

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.largest = max(self.largest, len(batch[0]))
            return super().train_batch(batch, batch_info)

    return Notes


def two(kind: type[Curve], **arguments: Any) -> TorchTrainer:
    config = {"rows": ROWS, "batch": BATCH, "adam": True}
    return TorchTrainer(training_operator_cls=kind, config=config, num_workers=2, use_gpu=False, **arguments)


def check(found: torch.Tensor, kind: type[Curve], batch: int, freq: str, **options: Any) -> None:
    """Compare with the weights of one worker, after an epoch with this batch size."""
    config, given = {"rows": ROWS, "batch": batch, "adam": True}, TrainingOptions(parallel="ddp", **options)
    alone = train(kind, config, [(None, 1)], options=given, scheduler_step_freq=freq)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)


CASES: dict[str, tuple[type[Curve], dict[str, Any], dict[str, Any]]] = {
    "helpers": (Curve, {"clip_norm": 0.1}, {}),
    "compiled": (Curve, {"compile": {"backend": "aot_eager"}}, {}),
    "horovod": (Curve, {"clip_norm": 0.1}, {"backend": "horovod"}),
}


@pytest.mark.parametrize(
    "case",
    [
        "helpers",
        pytest.param("compiled", marks=pytest.mark.nightly),
        pytest.param("horovod", marks=pytest.mark.horovod),
    ],
)
def test_an_epoch_of_two_workers_ends_on_one(case: str) -> None:
    kind, options, more = CASES[case]
    arguments = {"options": TrainingOptions(**options), "scheduler_step_freq": "batch", **more}
    with two(noting(kind), elastic=ElasticConfig(), **arguments) as trainer:
        first = trainer.train(num_steps=2)
        trainer.resize(1)
        second = trainer.train()
        assert trainer.apply_all_operators(lambda operator: operator.largest) == [BATCH]
        found = weights(trainer)
    assert [each["batch_count"] for each in (first, second)] == [2, 2]
    assert first["num_samples"] + second["num_samples"] == ROWS
    check(found, kind, 2 * BATCH, "batch", clip_norm=options.get("clip_norm"))


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_unequal_shares_of_sharded_models(direct: bool) -> None:
    options = TrainingOptions(parallel="fsdp", **({} if direct else {"clip_norm": 0.1, "accumulate": 2}))
    kind = Direct if direct else Curve
    with two(kind, options=options, scheduler_step_freq="epoch") as trainer:
        trainer.load_state_dict(trainer.state_dict())
        trainer.train()
        found = weights(trainer)
    check(found, kind, 2 * BATCH if direct else 4 * BATCH, "epoch", clip_norm=None if direct else 0.1)
