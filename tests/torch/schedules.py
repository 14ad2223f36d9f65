"""Runs: a model, its data and options, and what happens to its ranks and its script. A number derives a random one.

shown = trained(Setting.draw(17))
shown = trained(Setting(7, model="dropout", faults=(Fault("kill", "reduced", rank=1, step=3),)))
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.data import SampleSeeds
from raysgd.data.sample_seeds import seeded_for
from raysgd.torch import TrainingOperator
from raysgd.torch.step.parts.witness import watched
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.peek import models_of

EPOCHS, MOST = 2, 8
TEXT = "any schedule of failures, growth and resizing yields the weights of an undisturbed run, up to rounding. "
LETTERS = sorted(set(TEXT))
LENGTH, IGNORED = 6, -100
# What a checkpoint has that must not depend on workers, and what a call measures.
STATE = ("models", "optimizers", "schedulers", "amp_native", "epoch", "global_step")
MEASURED = ("epoch", "num_samples", "train_loss", "val_loss", "skipped_steps")


class Move(NamedTuple):
    """What the script does before a step: it resizes the run, or saves it, and another script with so many workers `loads` that."""

    step: int
    workers: int
    loads: bool = False


@dataclass(frozen=True)
class Setting:
    """One run of so many `parts`, one for each worker. Each field is small, so that a failure is easy to repeat by hand.

    finer     the trainer's argument `parts`, which are dealt in `shares`
    augments  with random numbers that belong to a sample, in the data set ("samples") or in train_batch ("operator"); or that belong
              to a part, in the data set ("data"), in loader processes ("processes") or in train_batch ("batch")
    """

    seed: int
    model: str = "mlp"
    rows: int = 20
    batch: int = 2
    parts: int = 3
    finer: int | None = None
    shares: Any = "equal"
    optimizer: str = "sgd"
    rates: str | None = None
    accumulate: int = 1
    clip: Mapping[str, float] = field(default_factory=dict)
    mode: Any = "auto"
    precision: str = "fp32"
    double: bool = True
    augments: str = ""
    compile: Any = False
    faults: tuple[Fault, ...] = ()
    grow: bool = True
    room: int = 6
    moves: tuple[Move, ...] = ()

    @classmethod
    def draw(cls, seed: int, **given: Any) -> "Setting":
        draw = random.Random(seed)
        chosen: dict[str, Any] = {
            "model": draw.choice(["mlp", "conv", "gpt", "dropout", "batchnorm", "ragged"]),
            "rows": draw.randint(1, 36),
            "batch": draw.randint(1, 4),
            "parts": draw.randint(2, 5),
            "optimizer": draw.choice(["sgd", "adam", "two", "in turn"]),
            "rates": draw.choice([None, "onecycle", "cosine"]),
            "accumulate": draw.choice([1, 1, 1, 2, 3]),
            "clip": draw.choice([{}, {"clip_norm": 0.1}, {"clip_value": 0.01}]),
            "mode": draw.choice(["auto", "auto", "auto", "per_worker"]),
            "augments": draw.choice(["", "samples", "operator", "data", "batch"]),
        }
        if (chosen["model"], chosen["optimizer"]) in (("batchnorm", "two"), ("batchnorm", "in turn")):
            # The ranks share BatchNorm's buffers before each optimizer's step. If one fails between two, docs/elasticity.md says
            # that the rest of that batch is left out.
            chosen["optimizer"] = "adam"
        setting = cls(seed, **{**chosen, **given})
        more: dict[str, Any] = {"faults": tuple(faults(setting, draw)), "room": setting.parts + draw.randint(0, 2)}
        more["moves"] = tuple(moves(setting, draw)) if setting.mode == "auto" else ()
        return replace(setting, **{**more, **given})

    @property
    def steps(self) -> int:
        """Return how many batches an undisturbed epoch has."""
        return -(-self.rows // (self.batch * self.parts))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def by_samples(self) -> bool:
        """Return whether a loop over the batches of all parts together computes the same."""
        of_parts = self.model in ("dropout", "batchnorm") or self.augments in ("data", "batch", "processes")
        return not of_parts and self.precision == "fp32"

    def calls(self) -> list[tuple[int, int]]:
        """Return from which step to which one each call trains."""
        ends = {0, *(move.step for move in self.moves), *(epoch * self.steps for epoch in range(1, EPOCHS + 1))}
        return list(zip(sorted(ends), sorted(ends)[1:], strict=False))

    def windows(self) -> list[list[int]]:
        """Return how many samples each step of an optimizer has, for each epoch."""
        size, found = self.batch * self.parts, [list[int]() for _ in range(EPOCHS)]
        for first, last in self.calls():
            sizes = [min(size, self.rows - step % self.steps * size) for step in range(first, last)]
            found[first // self.steps] += [
                sum(sizes[at : at + self.accumulate]) for at in range(0, len(sizes), self.accumulate)
            ]
        return found

    def options(self) -> TrainingOptions:
        given = {"accumulate": self.accumulate, "compile": self.compile, "precision": self.precision}
        return TrainingOptions(parallel="ddp", **given, **self.clip)

    def config(self, **more: Any) -> dict[str, Any]:
        return {"setting": self, "batch": self.batch, **more}


def faults(setting: Setting, draw: random.Random) -> list[Fault]:
    """Draw what happens to the ranks. A rank may have left before its turn comes."""
    found: list[Fault] = []
    for step in sorted(draw.randrange(EPOCHS * setting.steps) for _ in range(draw.randint(1, 4))):
        kind = draw.choices(["kill", "notice", "freeze", "restart"], [6, 3, 1, 1])[0]
        at = draw.choice(["begun", "forward", "reduced", "applied"])
        ranks = draw.sample(range(setting.parts), draw.randint(1, setting.parts - 1))
        if kind == "restart":
            kind, ranks = "kill", list(range(MOST))
        found += [Fault(kind, at, rank=rank, step=step) for rank in ranks]
    return found


def moves(setting: Setting, draw: random.Random) -> list[Move]:
    steps = draw.sample(range(EPOCHS * setting.steps), min(draw.randint(0, 3), EPOCHS * setting.steps))
    return [
        Move(step, draw.randint(1, setting.parts), loads=step > 0 and draw.random() < 0.4) for step in sorted(steps)
    ]


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
    if setting.model in ("gpt", "ragged"):
        return CharacterModel().to(setting.dtype)
    if setting.model in ("conv", "batchnorm"):
        # A bias before BatchNorm has the gradient 0, whose rounding errors Adam would multiply.
        normed = setting.model == "batchnorm"
        norms = [nn.BatchNorm2d(4) if normed else nn.GroupNorm(2, 4) for _ in range(2)]
        convs = [nn.Conv2d(channels, 4, 3, bias=not normed) for channels in (1, 4)]
        layers = [convs[0], norms[0], nn.Tanh(), convs[1], norms[1], nn.GELU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, 3)).to(setting.dtype)
    drops = [nn.Dropout(0.3)] if setting.model == "dropout" else []
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *drops, nn.Linear(8, 1)).to(setting.dtype)


class Samples(Dataset[Any]):
    """Numbered samples. With `augmented`, each is drawn with the numbers of the global generators."""

    def __init__(self, setting: Setting, *, augmented: bool) -> None:
        self._setting, self._augmented = setting, augmented

    def __len__(self) -> int:
        return self._setting.rows

    def __getitem__(self, index: int) -> Any:
        setting = self._setting
        if setting.model in ("gpt", "ragged"):
            begin = index * 7 + (random.randrange(9) if self._augmented else 0)
            letters = torch.tensor([LETTERS.index(TEXT[(begin + at) % len(TEXT)]) for at in range(LENGTH + 1)])
            counts = torch.arange(LENGTH) <= (index % LENGTH if setting.model == "ragged" else LENGTH)
            return index, letters[:-1], letters[1:].where(counts, IGNORED)
        own, images = torch.Generator().manual_seed(index), setting.model in ("conv", "batchnorm")
        shape = (1, 6, 6) if images else (4,)
        x = torch.randn(shape, generator=own, dtype=torch.float64)
        y = torch.tensor(index % 3) if images else (2 * x).sin().sum(0, keepdim=True).to(setting.dtype)
        if self._augmented:
            x = x + noise(shape)
        return index, x.to(setting.dtype), y


def noise(shape: Any) -> torch.Tensor:
    """Draw from all generators that a sample may use."""
    drawn = 0.1 * torch.randn(shape, dtype=torch.float64)
    return drawn * random.uniform(0.5, 1.5) * float(numpy.random.uniform(0.5, 1.5))


def optimizers_of(setting: Setting, model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the optimizers, and their schedules."""
    every = list(model.parameters())
    halves = (
        [every[: len(every) // 2], every[len(every) // 2 :]] if setting.optimizer in ("two", "in turn") else [every]
    )
    found: list[Any] = [torch.optim.SGD(halves[0], lr=0.1, momentum=0.9)] if setting.optimizer != "adam" else []
    # Adam's first steps go by the signs of gradients, and in half precision, rounding decides those of gradients near 0.
    eps = 1e-8 if setting.precision == "fp32" else 1e-3
    found += [torch.optim.Adam(each, lr=0.01, eps=eps) for each in halves[len(found) :]]
    # With batch="per_worker", fewer ranks make more steps.
    total = EPOCHS * (setting.steps if setting.mode == "auto" else setting.rows) + 1
    scheduler = torch.optim.lr_scheduler
    made: dict[str, Any] = {
        "onecycle": lambda each: scheduler.OneCycleLR(each, 0.1, total_steps=total),
        "cosine": lambda each: scheduler.CosineAnnealingLR(each, total),
    }
    return found, [made[setting.rates](each) for each in found] if setting.rates else []


def stepping(setting: Setting, optimizers: Sequence[Any], step: int) -> Sequence[Any]:
    """Return which optimizers step: "in turn", the second one does in every other batch."""
    return optimizers[: 1 + (step // setting.accumulate) % 2] if setting.optimizer == "in turn" else optimizers


def criterion_of(setting: Setting) -> nn.Module:
    return nn.MSELoss() if setting.model in ("mlp", "dropout") else nn.CrossEntropyLoss()


def augmented(setting: Setting, epoch: int, index: Any, x: torch.Tensor) -> torch.Tensor:
    with seeded_for(setting.seed, epoch, index):
        return x if x.dtype == torch.int64 else x + noise(x.shape).to(x.dtype)


class Disturbed(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        self.setting: Setting = config["setting"]
        setting = self.setting
        model = model_of(setting)
        optimizers, schedulers = optimizers_of(setting, model)
        given: dict[str, Any] = {"schedulers": schedulers} if schedulers else {}
        parts = self.register(models=model, optimizers=optimizers, criterion=criterion_of(setting), **given)
        self.model, self.optimizers, self.criterion, *_ = parts
        self.optimizer = self.optimizers[0]
        data: Any = Samples(setting, augmented=setting.augments in ("samples", "data", "processes"))
        if setting.augments == "samples":
            data = SampleSeeds(data, seed=setting.seed)
        processes = {"num_workers": 2} if setting.augments == "processes" else {}
        self.register_data(
            train_loader=DataLoader(data, batch_size=setting.batch, shuffle=True, **processes),
            validation_loader=DataLoader(Samples(setting, augmented=False), batch_size=setting.batch),
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index, x, y = batch
        setting, step = self.setting, batch_info["global_step"]
        if setting.augments == "operator":
            epoch = self._internals.position.epoch - 1
            x = torch.stack([augmented(setting, epoch, number, row) for number, row in zip(index, x, strict=True)])
        if setting.augments == "batch" and x.is_floating_point():
            x = x + noise(x.shape).to(x.dtype)
        self.begin(step, index.tolist())
        self.zero_grad()  # the default method clears the gradients of one optimizer, and steps it
        result = super().train_batch((x, y), batch_info)
        for each in stepping(setting, self.optimizers, step)[1:]:
            self.step(each)
        self.end()
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().validate_batch(batch[1:], batch_info)

    def begin(self, step: int, samples: list[int]) -> None:
        """Called before a batch is trained."""

    def end(self) -> None:
        """Called afterwards."""


class Noted(Disturbed):
    """Notes which samples each attempt at a step has. Faults can happen when a batch has begun."""

    def begin(self, step: int, samples: list[int]) -> None:
        cluster = Cluster.running
        cluster.notes.append((cluster.here.client.generation, self._internals.position.epoch - 1, step, samples))
        cluster.point("begun")


# -- runs ----------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What a run has shown: the numbers of each call (if a worker has failed in it, without its means, which lack what that worker
    had not reported), the weight of each sample in each epoch, what a checkpoint has, and how its workers have changed. `steps` are
    the samples of each step of each epoch, of the last script."""

    results: list[dict[str, Any]] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)
    steps: list[list[list[int]]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def differences(self, other: "Shown", tolerance: float = 0.0) -> list[str]:
        """Return what differs from another run: in bits, or with a tolerance by more than rounding."""
        own, its = (flat([each.results, each.entered, each.state]) for each in (self, other))
        assert own.keys() <= its.keys()
        return [
            f"{place}: {own[place]}, and {its[place]}" for place in own if differ(own[place], its[place], tolerance)
        ]


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Return what a tree holds, by place."""
    if isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {name: each for key, inner in pairs for name, each in flat(inner, f"{place}.{key}").items()}
    return {place: value}


def differ(one: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(one, (float, torch.Tensor)):
        return bool(one != other)
    pair = [torch.as_tensor(each).double() for each in (one, other)]
    return not torch.allclose(*pair, rtol=tolerance, atol=tolerance, equal_nan=True)


@contextmanager
def started(
    setting: Setting, operator: type[Disturbed], struck: Sequence[Fault], **given: Any
) -> Iterator[tuple[Cluster, Any]]:
    """Return a context with a cluster that these faults strike, and a trainer in it."""
    every = 1 if len({fault.rank for fault in struck}) == MOST else "epoch"
    with (
        Cluster(struck, seed=setting.seed, room=setting.room) as cluster,
        trainer_of(setting, operator, snapshot_every=every, **given) as trainer,
    ):
        yield cluster, trainer


def trainer_of(setting: Setting, operator: type[Disturbed], *, snapshot_every: Any = "epoch", **given: Any) -> Any:
    return TorchTrainer(
        training_operator_cls=watched(operator, setting.rows),
        config=setting.config(),
        num_workers=setting.parts,
        parts=setting.finer,
        use_gpu=False,
        seed=setting.seed,
        scheduler_step_freq="batch" if setting.rates else None,
        options=setting.options(),
        elastic=ElasticConfig(
            batch=setting.mode,
            shares=setting.shares,
            hang_timeout_s=60,
            snapshot_every=snapshot_every,
            grow=setting.grow,
        ),
        **given,
    )


def trained(setting: Setting, operator: type[Disturbed] = Noted, *, undisturbed: bool = False) -> Shown:
    """Train the epochs, and validate after the first one. What is `undisturbed` makes the same calls."""
    shown, total = Shown(), torch.zeros(setting.rows, dtype=torch.float64)
    does = {} if undisturbed else {move.step: move for move in setting.moves}
    with TemporaryDirectory() as folder, ExitStack() as script:
        path = Path(folder, "saved.pt")
        cluster, run = script.enter_context(started(setting, operator, () if undisturbed else setting.faults))
        for first, last in setting.calls():
            if first in does and does[first].loads:
                run.save(path)
                shown.recoveries += [each.reason for each in run.recoveries]
                script.close()
                cluster, run = script.enter_context(started(setting, operator, cluster.left))
                run.resize(does[first].workers)
                run.load(path)
            elif first in does:
                run.resize(does[first].workers)
            ends = last % setting.steps == 0
            before = len(run.recoveries)
            result = measured(run.train(num_steps=None if ends else last - first, max_retries=-1))
            if any(each.reason not in ("growth", "shrink") for each in run.recoveries[before:]):
                result.pop("train_loss", None)  # without any, if none was reported before the failure
            shown.results.append(result)
            if ends:
                now = run.apply_all_operators(lambda each: models_of(each)[-1].entered.detach().clone())
                assert all(torch.equal(each, now[0]) for each in now)
                shown.entered.append(now[0] - total)
                total = now[0]
            if last == setting.steps:
                shown.results.append(measured(run.validate()))
        shown.weights, state = weights_of(run), run.state_dict()
        shown.state = {name: state[name] for name in STATE if name in state}
        shown.recoveries += [each.reason for each in run.recoveries]
        shown.steps = noted(cluster.notes, state["global_step"])
    return shown


def measured(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in MEASURED if name in result}


def noted(notes: list[Any], done: int) -> list[list[list[int]]]:
    """Return the samples of each step of each epoch: of its last attempt. Repeated ones count once."""
    last: dict[int, int] = {}
    for generation, _, step, _ in notes:
        last[step] = max(last.get(step, 0), generation)
    found: list[list[list[int]]] = [[] for _ in range(EPOCHS)]
    used: dict[int, tuple[int, set[int]]] = {}
    for generation, epoch, step, samples in notes:
        if step < done and generation == last[step]:
            used.setdefault(step, (epoch, set()))[1].update(samples)
    for _, (epoch, together) in sorted(used.items()):
        found[epoch].append(sorted(together))
    return found


def by_hand(setting: Setting, epochs: list[list[list[int]]]) -> torch.Tensor:
    """Return the weights of a plain loop over these steps: lists of samples, for each epoch."""
    torch.manual_seed(setting.seed)
    model = copy.deepcopy(model_of(setting))
    optimizers, schedulers = optimizers_of(setting, model)
    in_data, in_code, done = setting.augments == "samples", setting.augments == "operator", 0
    criterion, data = criterion_of(setting), Samples(setting, augmented=in_data)
    for epoch, steps in enumerate(epochs):
        source: Any = data
        if in_data:
            source = SampleSeeds(data, seed=setting.seed)
            source.set_epoch(epoch)
        ends = {last - epoch * setting.steps for _, last in setting.calls() if setting.mode == "auto"} | {len(steps)}
        start = 0
        while start < len(steps):
            stop = min([start + setting.accumulate, *(end for end in ends if end > start)])
            rows = [source[index] for step in steps[start:stop] for index in step]
            xs = [augmented(setting, epoch, index, x) if in_code else x for index, x, _ in rows]
            model.zero_grad()
            criterion(model(torch.stack(xs)), torch.stack([row[2] for row in rows])).backward()
            for optimizer in stepping(setting, optimizers, done + stop - 1):
                every = [each for group in optimizer.param_groups for each in group["params"]]
                if setting.clip.get("clip_norm"):
                    nn.utils.clip_grad_norm_(every, setting.clip["clip_norm"])
                if setting.clip.get("clip_value"):
                    nn.utils.clip_grad_value_(every, setting.clip["clip_value"])
            for number in range(start, stop):
                for optimizer in stepping(setting, optimizers, done + stop - 1) if number == stop - 1 else ():
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
            start = stop
        done += len(steps)
    return nn.utils.parameters_to_vector(model.parameters()).detach()
