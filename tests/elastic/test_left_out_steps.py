"""The ranks of a sharded model leave out the same steps. tests/torch/test_left_out_steps.py has the rest."""

from typing import Any

import pytest
import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.local.runs import train
from tests.torch.test_exact_gradients import Curve

pytestmark = [
    pytest.mark.elastic,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:the training loader does not shuffle"),
]
ROWS = 50


class Spoiled(Curve):
    """In the steps `row`, the gradient of the first layer's first row is NaN, and the loss is finite; in the steps `spike`, rank 1's
    loss is large, which the rule refuses. The steps `none` are not made."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (x, y), step, config = batch, batch_info["global_step"], self.config
        if step in config.get("none", ()):
            return {"num_samples": len(x)}
        found: list[torch.Tensor] = []  # what the first layer returns
        hook = self._parts.models[0][0].register_forward_hook(lambda module, given, output: found.append(output))
        loss = self.criterion(self.model(x), y)
        hook.remove()
        if step in config.get("row", ()):
            loss = loss + (found[0][:, 0] * 0).sqrt().sum()  # 0 with the derivative inf, and inf * 0 is NaN
        if step in config.get("spike", ()) and self.world_rank == 1:
            loss = loss * 1e6
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"num_samples": len(x)}


class Ruled(Spoiled):
    def skip_step(self, info: dict[str, Any]) -> bool:
        return info["loss"] > 1e3  # NaN is not


def trainer(kind: type[Curve], config: dict[str, Any], workers: int, **more: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=kind,
        config={"rows": ROWS, "batch": 3, **config},
        num_workers=workers,
        use_gpu=False,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(batch="global", grow=False, snapshot_every=None),
        **more,
    )


def expected(none: set[int], workers: int) -> torch.Tensor:
    """Return the weights of a run that leaves these batches out."""
    return train(Spoiled, {"rows": ROWS, "batch": 3, "none": none}, [(None, workers)], batch="global")


def vector(trainer: TorchTrainer) -> torch.Tensor:
    return nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()


def test_a_gradient_in_one_shard_and_a_rule_that_one_rank_causes() -> None:
    config = {"row": {2}, "spike": {4, 5}}
    options = TrainingOptions(on_nonfinite="skip", parallel="fsdp")
    with trainer(Ruled, config, 2, options=options) as mine:
        result = mine.train()
        assert (result["num_samples"], result["skipped_steps"]) == (ROWS, 3)
        torch.testing.assert_close(vector(mine), expected({2, 4, 5}, 2), rtol=1e-9, atol=1e-9)
