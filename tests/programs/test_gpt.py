"""The character-level GPT, and the same program without raysgd: equal losses, rates, accuracies and weights."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler

from examples.programs import gpt
from tests.programs import by_hand

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

# Each epoch ends with half an accumulation window.
CONFIG = {"epochs": 2, "batch": 18, "windows": 18 * 18, "validated": 41, "accumulate": 4, "lr": 0.003}
CONFIG |= {"length": 32, "width": 32, "heads": 2, "layers": 2, "precision": "bf16"}


class Loop:
    """The program by hand, on one rank."""

    def __init__(self, rank: int, **config: Any) -> None:
        self.config, self.share = config, (config["batch"], rank, config["workers"])
        torch.manual_seed(0)
        self.model = gpt.GPT(*(config[name] for name in ("length", "width", "heads", "layers")))
        self.ddp, self.weight = DistributedDataParallel(self.model), by_hand.Weight(self.model)
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        vectors = [each for each in self.model.parameters() if each.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
        self.data = gpt.windows(gpt.TEXT[: gpt.CUT], config["length"])
        self.held_out = gpt.windows(gpt.TEXT[gpt.CUT :], config["length"])
        self.sampler = RandomSampler(self.data, True, config["windows"], torch.Generator().manual_seed(1))
        self.step, each_epoch = 0, -(-config["windows"] // config["batch"])
        self.steps = config["epochs"] * -(-each_epoch // config["accumulate"])

    def run(self) -> Any:
        rows = []
        for _ in range(self.config["epochs"]):
            rows += [self.train(), self.validate()]
        return rows, self.model.state_dict()

    def train(self) -> dict[str, float]:
        self.model.train()
        batches = list(by_hand.own(torch.tensor(list(self.sampler)), *self.share))
        losses = samples = 0.0
        for first in range(0, len(batches), self.config["accumulate"]):
            window = batches[first : first + self.config["accumulate"]]
            lr = self.config["lr"] * gpt.rate(self.step, self.steps, self.steps // 10)
            losses, samples = losses + self.optimize(window, lr), samples + sum(len(mine) for mine, _ in window)
            self.step += 1
        losses, samples = by_hand.total(losses, samples)
        return {"train_loss": losses / samples, "num_samples": samples}

    def optimize(self, window: Sequence[tuple[torch.Tensor, int]], lr: float) -> float:
        """Make one step of the optimizer. Return the sum of the losses of this rank's samples."""
        losses, total = 0.0, sum(size for _, size in window)
        self.optimizer.zero_grad()
        for number, (mine, size) in enumerate(window, 1):
            self.weight.value = len(mine) * self.config["workers"] / size
            with nullcontext() if number == len(window) else self.ddp.no_sync():
                loss = self.loss(self.ddp, self.data, mine)[0]
                (loss * (size / total)).backward()
            losses += loss.item() * len(mine)
        clipped = [
            each for group in self.optimizer.param_groups for each in group["params"]
        ]  # in this order, for equal bits
        nn.utils.clip_grad_norm_(clipped, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return losses

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        self.model.eval()
        losses = right = samples = 0.0
        rows = torch.arange(0, len(self.held_out), len(self.held_out) // self.config["validated"])
        for mine, _ in by_hand.own(rows, *self.share):
            if len(mine):
                loss, found = self.loss(self.model, self.held_out, mine)
                losses, right = losses + loss.item() * len(mine), right + found
                samples += len(mine)
        losses, right, samples = by_hand.total(losses, right, samples)
        return {
            "val_loss": losses / samples,
            "val_accuracy": right / samples / self.config["length"],
            "num_samples": samples,
        }

    def loss(self, model: nn.Module, data: Any, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the loss of these rows, and how many letters are right."""
        codes, target = by_hand.collated(data, rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config["precision"] == "bf16"):
            output = model(codes)
            loss = nn.functional.cross_entropy(output, target)
        return loss, (output.argmax(1) == target).sum().item()


def loop(rank: int, **config: Any) -> Any:
    return Loop(rank, **config).run()


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.more)])
def test_equal_to_a_loop_by_hand(workers: int, tmp_path: Path) -> None:
    config = {"workers": workers, **CONFIG}
    history, model = gpt.main(by_hand.arguments(config))
    rows, weights = by_hand.run(loop, tmp_path, config)
    by_hand.assert_equal(history, rows)
    by_hand.assert_equal_weights(model, weights)
