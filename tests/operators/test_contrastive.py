"""The ready-made contrastive operator: it learns captions, and its negatives and gradients are those of all workers."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE

pytest.importorskip("transformers")

from raysgd.operators.contrastive import Captioned, ContrastiveOperator


@pytest.mark.more
def test_learns_which_caption_belongs_to_which_image() -> None:
    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=ContrastiveOperator) as trainer:
        before = trainer.validate()
        losses = [trainer.train()["train_loss"] for _ in range(10)]
        result = trainer.validate()
    assert losses[-1] < losses[0] / 2
    for kind in ("text", "image"):
        assert before[f"val_{kind}_recall_at_5"] < 0.3
        assert result[f"val_{kind}_recall_at_1"] > 0.5 and result[f"val_{kind}_recall_at_5"] > 0.8


class PlainSgd(ContrastiveOperator):
    """Steps with SGD, because a step of AdamW hides how large the gradient is."""

    def make_optimizer(self, model: Any, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def make_model(self, config: Any) -> Any:
        torch.manual_seed(3)
        return super().make_model(config)


def measured(workers: int) -> tuple[dict[str, Any], Any]:
    config = {"train_data": Captioned(16, seed=1), "validation_data": Captioned(47, seed=2), BATCH_SIZE: 16}
    with TorchTrainer(training_operator_cls=PlainSgd, config=config, num_workers=workers, use_gpu=False) as trainer:
        trained = trainer.train()
        return {"mode": trainer.batch_mode, **trained, **trainer.validate()}, trainer.get_model().cpu()


@pytest.mark.more  # the gradients that go through an all_gather are those of real workers
def test_two_workers_measure_and_step_as_one(ray_cluster: None) -> None:
    one, model = measured(1)
    two, other = measured(2)
    assert one["num_samples"] == two["num_samples"] == 47
    assert two["mode"] == "per_worker", "its loss compares the samples of all workers"
    names = [name for name in one if name.startswith(("val_", "train_")) and not name.startswith("last_")]
    assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)
    torch.manual_seed(3)
    start = ContrastiveOperator.make_model(None, {})  # type: ignore[arg-type]
    for (name, value), (_, same), (_, first) in zip(
        model.named_parameters(), other.named_parameters(), start.named_parameters(), strict=True
    ):
        moved = (value - first).abs().max()
        assert (value - same).abs().max() < 1e-6 + 1e-3 * moved, name

    pairs = [Captioned(47, seed=2)[index] for index in range(47)]
    with torch.no_grad():
        output = model.eval()(
            pixel_values=torch.stack([image for image, _ in pairs]), input_ids=torch.stack([text for _, text in pairs])
        )
    similarity = normalize(output.image_embeds, dim=1) @ normalize(output.text_embeds, dim=1).T
    for name, scores in (("text", similarity), ("image", similarity.T)):
        found = [index in scores[index].topk(5).indices for index in range(47)]
        assert two[f"val_{name}_recall_at_5"] == pytest.approx(sum(found) / 47)
    labels, logits = torch.arange(47), similarity * model.logit_scale.exp()
    loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    assert two["val_loss"] == pytest.approx(loss.item(), rel=1e-4)
