"""Training with Horovod gives the same weights as DistributedDataParallel, in different kinds of loops."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.peek import models_of

pytestmark = [pytest.mark.more, pytest.mark.horovod]

Weights = dict[str, torch.Tensor]


class Loops(TrainingOperator):
    """Three models, each with its optimizer, and several ways to train them. They start differently on every rank, and only
    the broadcast makes the ranks equal."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(5 + self.world_rank)
        models = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(3, 3), nn.Linear(3, 1)]
        optimizers = [
            torch.optim.Adam(models[0].parameters(), lr=0.03),
            *(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5) for model in models[1:]),
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=3, gamma=0.9)
        self.models, self.optimizers, self.scheduler = self.register(
            models=models, optimizers=optimizers, schedulers=scheduler
        )
        # 43 samples over 2 ranks: the last batches and accumulation windows have different sizes.
        x = torch.randn(43, 3, generator=torch.Generator().manual_seed(1))
        self.register_data(train_loader=DataLoader(TensorDataset(x, 5 * x.sum(1, keepdim=True)), batch_size=4))
        self.loop = "helpers"

    def reset(self, loop: str) -> None:
        torch.manual_seed(7)
        self.loop = loop
        for model in self._registered.models:
            for part in model.modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = getattr(self, f"batch_{self.loop}")(*batch)
        return {"train_loss": float(loss), "num_samples": len(batch[0])}

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.models[0](x) - y).pow(2).mean()
        return loss

    def batch_helpers(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            loss = self.loss(x, y)
        self.zero_grad(self.optimizers[0])
        self.backward(loss)
        self.step(self.optimizers[0])
        return loss

    def batch_plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x, y)
        self.optimizers[0].zero_grad()
        (loss / self.world_size if self.config.get("halved") else loss).backward()
        self.optimizers[0].step()
        return loss

    def batch_manual(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """float16 with the names of v1, two backward passes, then clipping."""
        self.optimizers[0].zero_grad()
        for _ in range(2):
            with self._amp.autocast():
                loss = self.loss(x, y) / 2
                if self.global_step % 6 == 3 and self.world_rank == 1:
                    loss = loss * float("inf")  # the gradients of one rank overflow, so all ranks skip the step
            self._amp_scaler.scale(loss).backward()
        self._amp_scaler.unscale_(self.optimizers[0])
        nn.utils.clip_grad_norm_(self.models[0].parameters(), 1.0)
        self._amp_scaler.step(self.optimizers[0])
        self._amp_scaler.update()
        return loss

    def batch_two_models(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of one model goes through the other, as in a GAN. The second optimizer computes its gradients in its step."""
        _, first, second = self.optimizers

        def closure() -> torch.Tensor:
            first.zero_grad()
            second.zero_grad()
            loss: torch.Tensor = (self.models[2](torch.tanh(self.models[1](x))) - y).pow(2).mean()
            loss.backward()
            return loss

        closure()
        first.step()
        loss: torch.Tensor = second.step(closure)
        return loss


def trained(*loops: str, **arguments: Any) -> Weights:
    """Return the weights after two epochs with each loop. They are the same on both ranks."""
    found = {}
    with TorchTrainer(
        training_operator_cls=Loops, num_workers=2, use_gpu=False, scheduler_step_freq="batch", **arguments
    ) as trainer:
        for number, loop in enumerate(loops):
            if number:
                trainer.apply_all_operators(partial(reset, loop=loop))
            else:
                trainer.apply_all_operators(partial(set_loop, loop=loop))
            trainer.train()
            trainer.train()
            ranks = trainer.apply_all_operators(weights_of)
            assert torch.equal(ranks[0], ranks[1])
            found[loop] = ranks[0]
    return found


def reset(operator: Any, loop: str) -> None:
    operator.reset(loop)


def set_loop(operator: Any, loop: str) -> None:
    operator.loop = loop


def weights_of(operator: TrainingOperator) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten() for model in models_of(operator) for parameter in model.parameters()]
    )


def differences(horovod: Weights, ddp: Weights) -> dict[str, float]:
    return {loop: float((horovod[loop] - ddp[loop]).abs().max()) for loop in horovod}


def trained_with_each_loop(backend: str) -> Weights:
    clipped = trained("helpers", backend=backend, options=TrainingOptions(precision="fp16", clip_norm=1.0))
    in_float16 = trained("manual", backend=backend, options=TrainingOptions(precision="fp16"))
    return {**clipped, **in_float16, **trained("plain", "two_models", backend=backend)}


@pytest.fixture(scope="module")
def by_ddp(ray_cluster: None) -> Weights:
    return trained_with_each_loop("gloo")


def test_every_loop_gives_the_weights_of_ddp(by_ddp: Weights) -> None:
    assert max(differences(trained_with_each_loop("horovod"), by_ddp).values()) < 1e-5


@pytest.mark.nightly
def test_accumulation_windows_give_the_weights_of_ddp(ray_cluster: None) -> None:
    options = TrainingOptions(precision="bf16", accumulate=2, clip_value=0.5)
    horovod, ddp = (trained("helpers", backend=backend, options=options) for backend in ("horovod", "gloo"))
    assert max(differences(horovod, ddp).values()) < 1e-5


def test_a_sum_of_halved_losses_is_the_mean(by_ddp: Weights) -> None:
    given = {"op": "sum", "groups": 1}
    horovod = trained("plain", backend="horovod", horovod_args=given, config={"halved": True})
    assert max(differences(horovod, by_ddp).values()) < 1e-5


def test_gradients_that_are_sent_as_float16_are_rounded(by_ddp: Weights) -> None:
    given = {"compression": "fp16", "gradient_predivide_factor": 2.0, "backward_passes_per_step": 1}
    horovod = trained("plain", backend="horovod", horovod_args=given)
    assert 1e-5 < differences(horovod, by_ddp)["plain"] < 0.05


class Frozen(Loops):
    """The first layer is frozen when it is registered."""

    def register(self, **parts: Any) -> Any:
        parts["models"][0][0].requires_grad_(False)
        return super().register(**parts)


def unfreeze(operator: Any) -> None:
    operator.models[0][0].requires_grad_(True)


def test_a_layer_that_is_unfrozen_between_calls_is_averaged(ray_cluster: None) -> None:
    given = {"num_workers": 2, "use_gpu": False, "backend": "horovod", "scheduler_step_freq": "epoch"}
    with TorchTrainer(training_operator_cls=Frozen, **given) as trainer:
        frozen = []
        for _ in range(2):
            trainer.train()
            frozen.append(weights_of_first(trainer))
            trainer.apply_all_operators(unfreeze)
    assert torch.equal(*frozen[0]) and torch.equal(*frozen[1])
    assert not torch.equal(frozen[0][0], frozen[1][0])


def weights_of_first(trainer: TorchTrainer) -> list[torch.Tensor]:
    return trainer.apply_all_operators(lambda operator: operator.models[0][0].weight.detach().clone())
