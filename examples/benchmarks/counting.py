"""Which samples were trained, exactly: data that return their index, and an operator that keeps count.

In every batch the ranks tell each other their indices before they step, and after the step each notes those
of all. The notes are part of the operator's state, so they travel with it when a worker is lost, joins, or
begins from a snapshot: after an epoch they hold what went into the weights, no more and no less, on every
rank.
"""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from traces import StepTrace

from raysgd import TrainingOperator


class Indexed(Dataset[Any]):
    """`samples` rows of noise, each with its index in front."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(samples, 32, generator=generator)
        self.labels = torch.randint(10, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.features[index], self.labels[index]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


class CountingOperator(TrainingOperator):
    """A small model on indexed data. config: samples, batch_size, step_s (rest in each batch, as if a device
    worked), trace (a folder for the times of the steps, or None), counts (whether the ranks exchange their indices,
    which takes time; True if it is left out)."""

    def setup(self, config):
        model = small_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(
            train_loader=DataLoader(Indexed(config["samples"]), batch_size=config["batch_size"], shuffle=True)
        )
        self.trace = StepTrace(config["trace"]) if config.get("trace") else None
        self.epoch, self.committed = -1, []

    def train_batch(self, batch, batch_info):
        index, features, target = batch
        time.sleep(self.config["step_s"])
        everybodys = self.exchange(index) if self.config.get("counts", True) else index[:0]
        loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        loss.backward()
        if self.epoch != batch_info["epoch_idx"]:
            self.epoch, self.committed = batch_info["epoch_idx"], []
        # The note goes first: once the optimizer has stepped, whatever comes after, the batch is committed.
        self.committed.append(everybodys)
        noted = len(self.committed)
        try:
            self.optimizer.step()
        except BaseException:
            del self.committed[noted - 1 :]
            raise
        if self.trace is not None:
            self.trace.step(self.world_rank, self.epoch)
        return {"train_loss": loss.detach(), "num_samples": len(target)}

    def exchange(self, index: torch.Tensor) -> torch.Tensor:
        """The indices of all ranks in this step. Shares may differ by one, so they are filled up with -1."""
        mine = torch.full((self.config["batch_size"],), -1, dtype=torch.int64)
        mine[: len(index)] = index
        if self.world_size == 1:
            return index.clone()
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        together = torch.cat(parts)
        together = together[together >= 0]
        # Fewer samples than ranks at the very end: one may be repeated, so that every rank has a batch.
        return together.unique() if len(together.unique()) < self.world_size else together

    def state_dict(self):
        kept = torch.cat(self.committed) if self.committed else torch.empty(0, dtype=torch.int64)
        return {"epoch": self.epoch, "committed": kept}

    def load_state_dict(self, state_dict):
        if state_dict:
            self.epoch, self.committed = state_dict["epoch"], [state_dict["committed"].clone()]


def lost_and_doubled(trainer: Any, samples: int) -> tuple[int, int]:
    """Of the epoch that has just ended: samples in no committed batch, and uses beyond the first."""
    notes = trainer.apply_all_operators(lambda operator: operator.state_dict()["committed"])
    worst = (0, 0)
    for note in notes:
        used = Counter(note.tolist())
        lost = sum(index not in used for index in range(samples))
        doubled = sum(used.values()) - len(used)
        worst = (max(worst[0], lost), max(worst[1], doubled))
    return worst
