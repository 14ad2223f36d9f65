"""The ResNet, and the same program without raysgd: equal losses, accuracies, weights and statistics, and the same best epoch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.programs import resnet
from tests.programs import by_hand

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

# The last batch of an epoch has 13 pictures, and that of the validation has 1.
SMALL = {
    "workers": 2,
    "epochs": 3,
    "batch": 16,
    "train": 16 * 9 + 13,
    "held_out": 33,
    "side": 12,
    "width": 4,
    "lr": 0.1,
}
LARGE = {**SMALL, "workers": 3, "epochs": 5, "batch": 30, "train": 610, "held_out": 205, "side": 24, "width": 8}


class Loop:
    """The program by hand, on one rank."""

    def __init__(self, rank: int, **config: Any) -> None:
        self.config, self.share = config, (config["batch"], rank, config["workers"])
        torch.manual_seed(0)
        self.model = resnet.resnet(config["width"])
        self.ddp, self.weight = DistributedDataParallel(self.model), by_hand.Weight(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, config["epochs"])
        self.data = resnet.pictures(config["train"], config["side"], 0)
        self.held_out = resnet.pictures(config["held_out"], config["side"], 1)
        order = torch.Generator().manual_seed(1)
        self.shuffled = torch.utils.data.DataLoader(range(config["train"]), shuffle=True, generator=order)  # type: ignore[arg-type]

    def run(self) -> Any:
        rows, best, kept = [], -1.0, {}
        for _ in range(self.config["epochs"]):
            rows += [self.train(), self.validate()]
            if rows[-1]["val_top1"] > best:
                best, kept = rows[-1]["val_top1"], copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(kept)
        return [*rows, self.validate()], self.model.state_dict()

    def train(self) -> dict[str, float]:
        self.model.train()
        losses = samples = 0.0
        for mine, size in by_hand.own(torch.cat(list(self.shuffled)), *self.share):
            images, labels = by_hand.collated(self.data, mine)
            self.weight.value = len(mine) * self.config["workers"] / size
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(images), labels)
            loss.backward()
            self.optimizer.step()
            losses, samples = losses + loss.item() * len(mine), samples + len(mine)
        self.schedule.step()
        losses, samples = by_hand.total(losses, samples)
        return {"train_loss": losses / samples, "num_samples": samples}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        self.model.eval()
        for buffer in self.model.buffers():  # each rank has counted its own batch after DDP's last exchange
            torch.distributed.broadcast(buffer, 0)
        losses = first = five = samples = 0.0
        for mine, _ in by_hand.own(torch.arange(len(self.held_out)), *self.share):
            if not len(mine):
                continue
            images, labels = by_hand.collated(self.held_out, mine)
            output = self.model(images)
            losses += nn.functional.cross_entropy(output, labels).item() * len(mine)
            ranks = output.argsort(1, descending=True)
            first += (ranks[:, 0] == labels).sum().item()
            five += (ranks[:, :5] == labels.unsqueeze(1)).any(1).sum().item()
            samples += len(mine)
        losses, first, five, samples = by_hand.total(losses, first, five, samples)
        return {"val_loss": losses / samples, "val_top1": first / samples, "val_top5": five / samples}


def loop(rank: int, **config: Any) -> Any:
    return Loop(rank, **config).run()


def extra(folder: Path) -> dict[str, Any]:
    return {"checkpoints": folder / "checkpoints"}


@pytest.mark.parametrize("config", [SMALL, pytest.param(LARGE, marks=pytest.mark.nightly)], ids=["small", "large"])
def test_equal_to_a_loop_by_hand(config: dict[str, Any], tmp_path: Path) -> None:
    history, model = resnet.main(by_hand.arguments(config | extra(tmp_path)))
    rows, weights = by_hand.run(loop, tmp_path, config)
    assert rows[-1]["val_loss"] != rows[-2]["val_loss"], "the best epoch is not the last one"
    by_hand.assert_equal(history, rows)
    by_hand.assert_equal_weights(model, weights)
