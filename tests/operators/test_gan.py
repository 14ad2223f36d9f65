"""The ready-made GAN operator: each of its two optimizers changes only its own model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raysgd import ConfigError, TorchTrainer, TrainingOptions
from raysgd.operators.gan import GANOperator, digit_images


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_generated_images_approach_the_real_ones() -> None:
    real = torch.stack([image for (image,) in digit_images()[1]]).mean(dim=0)

    def distance(trainer: TorchTrainer) -> float:
        images = trainer.apply_all_operators(lambda operator: operator.generate(200))[0]
        assert images.shape == (200, 1, 8, 8)
        return float((images.mean(dim=0) - real).abs().mean())

    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=GANOperator, config={"lr": 2e-3, "batch_size": 32}) as trainer:
        before = distance(trainer)
        results = [trainer.train() for _ in range(5)]
        assert distance(trainer) < before / 2
        val = trainer.validate()
    assert all(result["num_samples"] == 1437 for result in results)
    assert {"loss_d", "loss_g", "p_real", "p_fake"} <= results[0].keys()
    assert 0 < val["val_p_fake"] < 1
    assert 0 < val["val_p_real"] < 1
    assert val["num_samples"] == 360


class FrozenPart(GANOperator):
    """One of the two optimizers changes nothing, because its learning rate is 0."""

    def make_optimizers(self, generator: nn.Module, discriminator: nn.Module, config: Any) -> Any:
        return tuple(
            torch.optim.SGD(model.parameters(), lr=0.0 if config["frozen"] == name else 0.1)
            for name, model in (("generator", generator), ("discriminator", discriminator))
        )


@pytest.mark.parametrize(("frozen", "moving"), [("generator", 1), ("discriminator", 0)])
def test_each_optimizer_changes_only_its_own_model(frozen: str, moving: int) -> None:
    with TorchTrainer(training_operator_cls=FrozenPart, config={"frozen": frozen}) as trainer:
        before = [weights(model) for model in trainer.get_model()]
        trainer.train(num_steps=2)
        after = [weights(model) for model in trainer.get_model()]
    assert not torch.equal(before[moving], after[moving])
    assert torch.equal(before[1 - moving], after[1 - moving])


def test_models_and_data_can_have_other_shapes() -> None:
    config = {
        "generator": lambda: nn.Sequential(nn.Linear(4, 27), nn.Unflatten(1, (3, 3, 3))),
        "discriminator": lambda: nn.Sequential(nn.Flatten(), nn.Linear(27, 1)),
        "latent_size": 4,
        "train_data": TensorDataset(torch.rand(20, 3, 3, 3), torch.arange(20)),
    }
    with TorchTrainer(training_operator_cls=GANOperator, config=config) as trainer:
        assert trainer.train()["num_samples"] == 20
        images = trainer.apply_all_operators(lambda operator: operator.generate(2))[0]
    assert images.shape == (2, 3, 3, 3)


def test_accumulation_would_mix_the_gradients_of_both_losses() -> None:
    with pytest.raises(ConfigError, match=r"cannot train with accumulate=4.*Leave accumulate out"):
        TorchTrainer(training_operator_cls=GANOperator, options=TrainingOptions(accumulate=4))
    with TorchTrainer(training_operator_cls=GANOperator, options=TrainingOptions(accumulate=1)) as trainer:
        assert trainer.train(num_steps=1)["batch_count"] == 1
