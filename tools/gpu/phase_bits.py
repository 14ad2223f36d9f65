"""A: a trainer with one worker has the bits of a hand-written loop, in all precisions and with all options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.operators.language_model import GPT
from raysgd.operators.resnet import ResNet18
from tools.gpu import common
from tools.gpu.notes import Notes, first_line

ROWS, VOCABULARY, BLOCK = 8, 64, 32
FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
    "accumulate": {"accumulate": 2},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "channels_last": {"channels_last": True},
    "compile": {"compile": True},
}


def gpt() -> nn.Module:
    return GPT(vocabulary=VOCABULARY, block_size=BLOCK, width=64, heads=4, layers=2)


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(VOCABULARY, (rows, BLOCK + 1))
    return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()


def token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), following.flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


Pair = tuple[torch.Tensor, torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Pair], Callable[..., torch.Tensor]]] = {
    "MLP": (mlp, lambda rows: (torch.randn(rows, 32), torch.randint(10, (rows,))), cross_entropy),
    "GPT": (gpt, tokens, token_loss),
    "ResNet-18": (ResNet18, lambda rows: (torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))), cross_entropy),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    model: str
    precision: str
    optimizer: str
    variant: str
    steps: int

    @property
    def accumulate(self) -> int:
        return int(VARIANTS[self.variant].get("accumulate", 1))

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable[..., torch.Tensor]]:
        make, data, loss = MODELS[self.model]
        torch.manual_seed(1)
        model = make()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters(), lr=0.01)
        return model, optimizer, TensorDataset(*data(ROWS * self.steps * self.accumulate)), loss


class Trained(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer, data, loss = config["case"].parts()
        self.model, self.optimizer, self.criterion = self.register(models=model, optimizers=optimizer, criterion=loss)
        self.register_data(train_loader=DataLoader(data, batch_size=ROWS))


def by_raysgd(case: Case) -> torch.Tensor:
    options = TrainingOptions(precision=case.precision, **VARIANTS[case.variant])  # type: ignore[arg-type]
    given: dict[str, Any] = {"config": {"case": case}, "options": options, "use_gpu": common.gpus() > 0}
    with TorchTrainer(training_operator_cls=Trained, **given) as trainer:
        trainer.train()
        return flat(trainer.get_model(to_cpu=True))


def by_hand(case: Case) -> torch.Tensor:
    """Train with the loop that people write themselves."""
    device, given = common.device(), VARIANTS[case.variant]
    bare, optimizer, data, criterion = case.parts()
    kept: Any = {"memory_format": torch.channels_last} if given.get("channels_last") else {}
    bare.to(device, **kept)
    model = torch.compile(bare) if given.get("compile") else bare
    scaler = torch.amp.GradScaler(device.type, enabled=case.precision == "fp16")
    half = FORMATS[case.precision]
    for number, (features, target) in enumerate(DataLoader(data, batch_size=ROWS)):
        if number % case.accumulate == 0:
            optimizer.zero_grad()
        features, target = features.to(device, **(kept if features.dim() == 4 else {})), target.to(device)
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            loss = criterion(model(features), target)
        scaler.scale(loss / case.accumulate).backward()
        if (number + 1) % case.accumulate == 0:
            if "clip_norm" in given:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(bare.parameters(), given["clip_norm"])
            scaler.step(optimizer)
            scaler.update()
    return flat(bare)


def flat(model: nn.Module) -> torch.Tensor:
    parts = [*model.parameters(), *model.buffers()]
    return torch.cat([each.detach().cpu().double().contiguous().flatten() for each in parts])


def cases(small: bool) -> Iterator[Case]:
    """Yield those first that differ most; what compiles is slow, and last."""
    models = list(MODELS)[: 2 if small else 3]
    for variant, precision, model, optimizer in product(VARIANTS, FORMATS, models, OPTIMIZERS):
        slow = variant == "compile" and (model, precision, optimizer) != ("MLP", "bf16", "SGD")
        if not slow and (variant != "channels_last" or model == "ResNet-18") and not (small and variant == "compile"):
            yield Case(model, precision, optimizer, variant, steps=3 if small else 30)


def against_handwritten(notes: Notes) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    seen: dict[str, list[str]] = {}
    for case in cases(notes.small):
        if notes.left() < (15 if case.variant == "compile" else 2):
            break
        name = f"{case.precision} {case.optimizer} {case.variant}"
        try:
            differs = float((by_raysgd(case) - by_hand(case)).abs().max())
            said = "" if differs == 0 else f"{name}: {differs:.2g}"
        except Exception as error:
            said = f"{name}: {first_line(error)}"
        notes.add(f"{case.model} {name}", said or "same bits", detail=True)
        seen.setdefault(case.model, []).append(said)
    steps = 3 if notes.small else 30
    for model, all_said in seen.items():
        equal = f"{all_said.count('')} of {len(all_said)} have the same bits"
        notes.add(
            f"{model}, {steps} steps in all precisions and options", equal, note="; ".join(filter(None, all_said))
        )
