"""The DCGAN, and the same program without raysgd: equal losses, weights of both models, and pictures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.programs import dcgan
from raysgd import seed_for
from tests.programs import by_hand

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

# The last batch of an epoch has 11 rings.
CONFIG = {"epochs": 2, "batch": 18, "rings": 18 * 8 + 11, "noise": 8, "width": 4, "lr": 0.002}


class Loop:
    """The program by hand, on one rank."""

    def __init__(self, rank: int, folder: Path, **config: Any) -> None:
        self.rank, self.folder, self.config = rank, folder, config
        torch.manual_seed(0)
        self.models = dcgan.networks(config["noise"], config["width"])
        # As raysgd wraps them. In the second backward pass of a step, DDP then divides gradients by the number of ranks, where it
        # otherwise multiplies them by its inverse; for three ranks, that rounds in another way.
        self.generator, self.discriminator = (
            DistributedDataParallel(model, gradient_as_bucket_view=True) for model in self.models
        )
        self.weights = [by_hand.Weight(model) for model in self.models]
        self.g_optimizer, self.d_optimizer = (
            torch.optim.Adam(model.parameters(), lr=config["lr"], betas=(0.5, 0.999)) for model in self.models
        )
        self.data = dcgan.rings(config["rings"])
        order = torch.Generator().manual_seed(1)
        self.shuffled = torch.utils.data.DataLoader(range(config["rings"]), shuffle=True, generator=order)  # type: ignore[arg-type]
        self.shown = torch.randn(8, config["noise"])

    def run(self) -> Any:
        rows = []
        for epoch in range(1, self.config["epochs"] + 1):
            rows.append(self.train(epoch))
            if self.rank == 0:
                self.draw(self.folder / f"epoch_{epoch}.pgm")
        return rows, [model.state_dict() for model in self.models]

    def draw(self, path: Path) -> None:
        generator = self.models[0].eval()
        with torch.no_grad():
            dcgan.write(path, generator(self.shown))
        generator.train()

    def train(self, epoch: int) -> dict[str, float]:
        d_losses = g_losses = samples = 0.0
        order = torch.cat(list(self.shuffled))
        how = self.config["batch"], self.rank, self.config["workers"]
        for number, (mine, size) in enumerate(by_hand.own(order, *how)):
            seed_for(0, epoch=epoch, offset=by_hand.place(number, how[0], len(order), *how[1:]))
            for weight in self.weights:
                weight.value = len(mine) * self.config["workers"] / size
            drawn = self.generator(torch.randn(len(mine), self.config["noise"]))
            self.d_optimizer.zero_grad()
            d_loss = self.backward(self.data[mine], torch.ones(len(mine)))
            d_loss += self.backward(drawn.detach(), torch.zeros(len(mine)))
            self.d_optimizer.step()
            self.g_optimizer.zero_grad()
            g_loss = self.backward(drawn, torch.ones(len(mine)))
            self.g_optimizer.step()
            d_losses, g_losses, samples = (
                d_losses + d_loss * len(mine),
                g_losses + g_loss * len(mine),
                samples + len(mine),
            )
        d_losses, g_losses, samples = by_hand.total(d_losses, g_losses, samples)
        return {"d_loss": d_losses / samples, "g_loss": g_losses / samples, "num_samples": samples}

    def backward(self, pictures: torch.Tensor, target: torch.Tensor) -> float:
        loss = nn.functional.binary_cross_entropy_with_logits(self.discriminator(pictures), target)
        loss.backward()
        return loss.item()


def loop(rank: int, **config: Any) -> Any:
    return Loop(rank, **config).run()


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_equal_to_a_loop_by_hand(workers: int, tmp_path: Path) -> None:
    config = {"workers": workers, **CONFIG}
    history, models = dcgan.main(by_hand.arguments({**config, "pictures": tmp_path / "pictures"}))
    rows, weights = by_hand.run(loop, tmp_path, {**config, "folder": tmp_path})
    by_hand.assert_equal(history, rows)
    for model, state in zip(models, weights, strict=True):
        by_hand.assert_equal_weights(model, state)
    for epoch in range(1, config["epochs"] + 1):
        name = f"epoch_{epoch}.pgm"
        assert (tmp_path / "pictures" / name).read_bytes() == (tmp_path / name).read_bytes()
