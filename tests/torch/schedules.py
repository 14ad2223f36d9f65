"""Random runs: a model, its data and options, and what happens to its ranks, all derived from one number.

setting = Setting.draw(17)
"""

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.data import SampleSeeds
from raysgd.torch import TrainingOperator
from raysgd.torch.data.sample_seeds import seeded_for
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of

EPOCHS, MOST = 2, 8
TEXT = "any schedule of failures, growth and resizing yields the weights of an undisturbed run, up to rounding. "
LETTERS = sorted(set(TEXT))
LENGTH = 6


@dataclass(frozen=True)
class Setting:
    """One random run. Each field is small, so that a failure is easy to repeat by hand."""

    seed: int
    model: str = "mlp"
    rows: int = 20
    batch: int = 2
    workers: int = 3
    optimizer: str = "sgd"
    rates: str | None = None
    accumulate: int = 1
    clip: dict[str, float] = field(default_factory=dict)
    mode: Any = "auto"
    double: bool = True
    augments: str = "data set"
    compile: Any = False
    faults: tuple[Fault, ...] = ()
    room: int = 6
    then: int | None = None  # how many workers the second epoch begins with

    @classmethod
    def draw(cls, seed: int, **given: Any) -> "Setting":
        draw = random.Random(seed)
        chosen: dict[str, Any] = {
            "model": draw.choice(["mlp", "conv", "gpt"]),
            "rows": draw.randint(1, 36),
            "batch": draw.randint(1, 4),
            "workers": draw.randint(2, 5),
            "optimizer": draw.choice(["sgd", "adam"]),
            "rates": draw.choice([None, "onecycle", "cosine"]),
            "accumulate": draw.choice([1, 1, 1, 2, 3]),
            "clip": draw.choice([{}, {"clip_norm": 0.1}, {"clip_value": 0.01}]),
            "mode": draw.choice(["auto", "auto", "per_worker"]),
            "augments": draw.choice(["data set", "operator"]),
        }
        setting = cls(seed, **{**chosen, **given})
        more = {"faults": tuple(faults(setting, draw)), "room": setting.workers + draw.randint(0, 2)}
        most = setting.workers if setting.mode == "auto" else more["room"]
        more["then"] = draw.choice([None, None, draw.randint(1, most)])
        return replace(setting, **{**more, **given})

    @property
    def steps(self) -> int:
        """Return how many batches an undisturbed epoch has."""
        return -(-self.rows // (self.batch * self.workers))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def options(self) -> TrainingOptions:
        return TrainingOptions(parallel="ddp", accumulate=self.accumulate, compile=self.compile, **self.clip)

    def config(self, **more: Any) -> dict[str, Any]:
        return {"setting": self, "batch": self.batch, **more}


def faults(setting: Setting, draw: random.Random) -> list[Fault]:
    """Draw what happens to the ranks. A rank may have left before its turn comes."""
    found: list[Fault] = []
    for step in sorted(draw.randrange(EPOCHS * setting.steps) for _ in range(draw.randint(1, 4))):
        kind = draw.choices(["kill", "notice", "freeze", "restart"], [6, 3, 1, 1])[0]
        at = draw.choice(["begun", "forward", "reduced", "applied"])
        ranks = draw.sample(range(setting.workers), draw.randint(1, setting.workers - 1))
        if kind == "restart":
            kind, ranks = "kill", list(range(MOST))
        found += [Fault(kind, at, rank=rank, step=step) for rank in ranks]
    return found


# -- models --------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.further = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.further(x))))


class CharacterModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Attention(width), Attention(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.letters(x) + self.places.weight)
        return self.head(self.norm(hidden)).transpose(1, 2)


def model_of(setting: Setting) -> nn.Module:
    if setting.model == "gpt":
        return CharacterModel().to(setting.dtype)
    if setting.model == "conv":
        first = [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)]
        return nn.Sequential(*first, nn.GELU(), nn.Flatten(), nn.Linear(16, 3)).to(setting.dtype)
    norm = [nn.BatchNorm1d(8)] if setting.model == "batchnorm" else []
    return nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Linear(8, 1)).to(setting.dtype)


class Samples(Dataset[Any]):
    """Numbered samples. With `augmented`, each is drawn with the numbers of the global generators."""

    def __init__(self, setting: Setting, *, augmented: bool) -> None:
        self._setting, self._augmented = setting, augmented

    def __len__(self) -> int:
        return self._setting.rows

    def __getitem__(self, index: int) -> Any:
        setting = self._setting
        if setting.model == "gpt":
            begin = index * 7 + (random.randrange(9) if self._augmented else 0)
            letters = [LETTERS.index(TEXT[(begin + place) % len(TEXT)]) for place in range(LENGTH + 1)]
            return index, torch.tensor(letters[:-1]), torch.tensor(letters[1:])
        own = torch.Generator().manual_seed(index)
        shape = (1, 6, 6) if setting.model == "conv" else (4,)
        x = torch.randn(shape, generator=own, dtype=torch.float64)
        y = torch.tensor(index % 3) if setting.model == "conv" else (2 * x).sin().sum(0, keepdim=True).to(setting.dtype)
        if self._augmented:
            x = x + noise(shape)
        return index, x.to(setting.dtype), y


def noise(shape: Any) -> torch.Tensor:
    """Draw from all generators that a sample may use."""
    drawn = 0.1 * torch.randn(shape, dtype=torch.float64)
    return drawn * random.uniform(0.5, 1.5) * float(numpy.random.uniform(0.5, 1.5))


def optimizer_of(setting: Setting, model: nn.Module) -> tuple[Any, Any]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if setting.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # With batch="per_worker", fewer ranks make more steps.
    total = EPOCHS * (setting.steps if setting.mode == "auto" else setting.rows) + 1
    schedulers: dict[str | None, Any] = {
        "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
        None: lambda: None,
    }
    return optimizer, schedulers[setting.rates]()


def criterion_of(setting: Setting) -> nn.Module:
    return nn.CrossEntropyLoss() if setting.model in ("conv", "gpt") else nn.MSELoss()


def augmented(setting: Setting, epoch: int, index: Any, x: torch.Tensor) -> torch.Tensor:
    with seeded_for(setting.seed, epoch, index):
        return x if setting.model == "gpt" else x + noise(x.shape).to(x.dtype)


class Disturbed(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        self.setting: Setting = config["setting"]
        setting = self.setting
        model = model_of(setting)
        optimizer, scheduler = optimizer_of(setting, model)
        given = {} if scheduler is None else {"schedulers": scheduler}
        parts = self.register(models=model, optimizers=optimizer, criterion=criterion_of(setting), **given)
        self.model, self.optimizer, self.criterion, *_ = parts
        in_data = setting.augments == "data set"
        data: Any = Samples(setting, augmented=in_data)
        if in_data:
            data = SampleSeeds(data, seed=setting.seed)
        self.register_data(train_loader=DataLoader(data, batch_size=setting.batch, shuffle=True))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index, x, y = batch
        setting = self.setting
        if setting.augments == "operator":
            rows = []
            for number, row in zip(index, x, strict=True):
                with self.sample_rng(number):
                    rows.append(row if setting.model == "gpt" else row + noise(row.shape).to(row.dtype))
            x = torch.stack(rows)
        x = self.augment(x, index)
        self.begin(batch_info["global_step"], index.tolist())
        result = super().train_batch((x, y), batch_info)
        self.end()
        return result

    def begin(self, step: int, samples: list[int]) -> None:
        """Called before a batch is trained."""

    def end(self) -> None:
        """Called afterwards."""

    def augment(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the batch as the model gets it."""
        return x


class Noted(Disturbed):
    """Notes which samples each attempt at a step has. Faults can happen when a batch has begun."""

    def begin(self, step: int, samples: list[int]) -> None:
        cluster = Cluster.running
        cluster.notes.append((cluster.here.client.generation, self._epochs_before(), step, samples))
        cluster.point("begun")


def trained(
    setting: Setting, operator: type[Noted] = Noted, *, undisturbed: bool = False
) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """Return the weights, and the samples of each step of each epoch: of its last attempt. Repeated ones count once."""
    faults = () if undisturbed else setting.faults
    restarts = len({fault.rank for fault in faults}) == MOST
    with (
        Cluster(faults, seed=setting.seed, room=setting.room) as cluster,
        TorchTrainer(
            training_operator_cls=operator,
            config=setting.config(),
            num_workers=setting.workers,
            use_gpu=False,
            seed=setting.seed,
            scheduler_step_freq="batch" if setting.rates else None,
            options=setting.options(),
            elastic=ElasticConfig(batch=setting.mode, hang_timeout_s=60, snapshot_every=1 if restarts else "epoch"),
        ) as trainer,
    ):
        for epoch in range(EPOCHS):
            if epoch == 1 and setting.then is not None and not undisturbed:
                trainer.resize(setting.then)
            trainer.train(max_retries=-1)
        weights, done = weights_of(trainer), trainer.apply_all_operators(lambda each: each.global_step)[0]
    last: dict[int, int] = {}
    for generation, _, step, _ in cluster.notes:
        last[step] = max(last.get(step, 0), generation)
    found: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    used: dict[int, tuple[int, set[int]]] = {}
    for generation, epoch, step, samples in cluster.notes:
        if step < done and generation == last[step]:
            used.setdefault(step, (epoch, set()))[1].update(samples)
    for _, (epoch, together) in sorted(used.items()):
        found[epoch].append(sorted(together))
    return weights, found


def by_hand(setting: Setting, epochs: list[list[list[int]]]) -> torch.Tensor:
    """Return the weights of a plain loop over these steps: lists of samples, for each epoch."""
    torch.manual_seed(setting.seed)
    model = copy.deepcopy(model_of(setting))
    optimizer, scheduler = optimizer_of(setting, model)
    in_data, criterion = setting.augments == "data set", criterion_of(setting)
    data: Any = Samples(setting, augmented=in_data)
    for epoch, steps in enumerate(epochs):
        if in_data:
            data = SampleSeeds(Samples(setting, augmented=True), seed=setting.seed)
            data.set_epoch(epoch)
        for start in range(0, len(steps), setting.accumulate):
            window = steps[start : start + setting.accumulate]
            rows = [data[index] for step in window for index in step]
            xs = [x if in_data else augmented(setting, epoch, index, x) for index, x, _ in rows]
            optimizer.zero_grad()
            criterion(model(torch.stack(xs)), torch.stack([row[2] for row in rows])).backward()
            if setting.clip.get("clip_norm"):
                nn.utils.clip_grad_norm_(model.parameters(), setting.clip["clip_norm"])
            if setting.clip.get("clip_value"):
                nn.utils.clip_grad_value_(model.parameters(), setting.clip["clip_value"])
            for number in range(len(window)):
                if number == len(window) - 1:
                    optimizer.step()
                if scheduler is not None:
                    scheduler.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()
