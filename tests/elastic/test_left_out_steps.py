"""The ranks of a sharded model leave out the same steps. tests/torch/test_left_out_steps.py has the rest."""

from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from tests.local.runs import train
from tests.peek import models_of
from tests.torch.small import weights
from tests.torch.test_exact_gradients import Curve

pytestmark = [
    pytest.mark.elastic,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore:the training loader does not shuffle"),
]
CONFIG = {"rows": 50, "batch": 3}


class Spoiled(Curve):
    """In step 2, the gradient of the first layer's first row is NaN, and the loss is finite. With
    `config["leaves_out"]`, this step is not made."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (x, y), step = batch, batch_info["global_step"]
        if self.config.get("leaves_out") and step == 2:
            return {"num_samples": len(x)}
        found: list[torch.Tensor] = []  # what the first layer returns
        hook = models_of(self)[0][0].register_forward_hook(lambda module, given, output: found.append(output))
        loss = self.criterion(self.model(x), y)
        hook.remove()
        if step == 2:
            loss = loss + (found[0][:, 0] * 0).sqrt().sum()  # 0 with the derivative inf, and inf * 0 is NaN
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"num_samples": len(x)}


def test_a_gradient_in_one_shard() -> None:
    elastic = ElasticConfig(grow=False, snapshot_every=None)
    options = TrainingOptions(on_nonfinite="skip", parallel="fsdp")
    given: dict[str, Any] = {"elastic": elastic, "options": options, "scheduler_step_freq": "batch", "use_gpu": False}
    with TorchTrainer(training_operator_cls=Spoiled, config=CONFIG, num_workers=2, **given) as trainer:
        trainer.load_state_dict(trainer.state_dict())
        result = trainer.train()
        assert (result["num_samples"], result["skipped_steps"]) == (CONFIG["rows"], 1)
        found = weights(trainer)
    expected = train(Spoiled, {**CONFIG, "leaves_out": True}, [(None, 2)], batch="auto")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
