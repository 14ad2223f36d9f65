"""Random programs with a Hugging Face Trainer: options, callbacks, models, orders and data, drawn from the rows of the page's table."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Sampler, WeightedRandomSampler, default_collate
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from raysgd.train.huggingface.transformers import prepare_trainer
from tests.train.events import points_of
from tests.train.huggingface.small import Tokens, arguments, entropy, make_model

EVENTS = [
    name for name in dir(TrainerCallback) if name.startswith("on_") and name not in ("on_init_end", "on_push_begin")
]
Place = Callable[[str], None]


def on(*events: str) -> Callable[[Any], Any]:
    """Let a method be called at each of these events."""

    def mark(method: Any) -> Any:
        method.events = events
        return method

    return mark


class Own(TrainerCallback):  # type: ignore[misc]
    """Calls `at(event, ...)` at each event."""

    def __init_subclass__(cls) -> None:
        for event in EVENTS:
            if event not in vars(cls):
                setattr(cls, event, cls._calling(event))

    @staticmethod
    def _calling(event: str) -> Any:
        def call(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.at(event, args, state, control, more)

        return call

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None: ...

    def result(self) -> Any:
        return None


class Places(Own):
    """Says where the Trainer is."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def at(self, event: str, *given: Any) -> None:
        self.place(event)


class Counts(Own):
    def __init__(self, draw: random.Random) -> None:
        self.number, self.names, self.kinds, self.newest = 0, list[str](), Counter[str](), deque[Any](maxlen=5)
        self.nested: dict[str, Any] = {"steps": [], "logs": {"all": 0}}

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event in ("on_epoch_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end"):
            self.number += 1
            self.names.append(event)
            self.kinds[event] += 1
            self.newest.append((event, state.global_step))
            self.nested["steps"].append(state.global_step)
            self.nested["logs"]["all"] += len(state.log_history)

    def result(self) -> Any:
        return self.number, self.names, self.kinds, self.newest, self.nested


class Resets(Own, ExportableState):  # type: ignore[misc]
    """Begins anew in `on_train_begin`."""

    def __init__(self, draw: random.Random) -> None:
        self.steps, self.epochs = -1, -1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_train_begin":
            self.steps = self.epochs = 0
        self.epochs += event == "on_epoch_begin"
        self.steps += event == "on_step_end"

    def result(self) -> Any:
        return self.steps, self.epochs


class Freezes(Own):
    """Freezes half of the parameters in a step, and lets go of them later."""

    def __init__(self, draw: random.Random) -> None:
        self.first, self.last, self.event = (
            draw.randint(1, 5),
            draw.randint(3, 9),
            draw.choice(["on_step_begin", "on_step_end"]),
        )

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == self.event and state.global_step in (self.first, self.last):
            for parameter in [*more["model"].parameters()][::2]:
                parameter.requires_grad = state.global_step != self.first


class FreezesByEpochs(Own):
    def __init__(self, draw: random.Random) -> None:
        self.epochs = 0

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_epoch_begin":
            self.epochs += 1
            next(more["model"].parameters()).requires_grad = self.epochs == 2


class Decays(Own):
    """Changes an option of the optimizer in each epoch."""

    def __init__(self, draw: random.Random) -> None:
        self.event = draw.choice(["on_epoch_begin", "on_epoch_end", "on_evaluate", "on_step_begin"])

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == self.event:
            for group in more["optimizer"].param_groups:
                group["weight_decay"] = group["weight_decay"] * 0.7 + 0.001

    def result(self) -> Any:
        return self.event


class Noise(Own):
    """Changes weights itself."""

    def __init__(self, draw: random.Random) -> None:
        self.generator, self.event = (
            torch.Generator().manual_seed(4),
            draw.choice(["on_epoch_begin", "on_step_begin", "on_step_end"]),
        )

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == self.event:
            with torch.no_grad():
                for parameter in more["model"].parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=self.generator), alpha=1e-3)

    def result(self) -> Any:
        return self.generator.get_state()


class Forgets(Own):
    """Clears the optimizer's state in each epoch."""

    def __init__(self, draw: random.Random) -> None: ...

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_epoch_begin":
            more["optimizer"].state.clear()


class Average(Own):
    """Keeps an average of the weights, and may evaluate with it."""

    def __init__(self, draw: random.Random) -> None:
        self.shadow, self.own, self.swaps = dict[str, Any](), dict[str, Any](), draw.random() < 0.5

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        named = dict(more["model"].named_parameters())
        with torch.no_grad():
            if event == "on_step_end":
                for name, value in named.items():
                    self.shadow[name] = 0.9 * self.shadow.get(name, value) + 0.1 * value
            if event == "on_prediction_step" and self.swaps and not self.own and self.shadow:
                self.own = {name: value.clone() for name, value in named.items()}
                for name, value in named.items():
                    value.copy_(self.shadow[name])
            if event == "on_evaluate" and self.own:
                for name, value in named.items():
                    value.copy_(self.own[name])
                self.own = {}

    def result(self) -> Any:
        return self.shadow


class AverageModule(Own):
    def __init__(self, draw: random.Random, model: Any = None) -> None:
        self.average: Any = None

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_train_begin":
            self.average = AveragedModel(more["model"])
        if event == "on_step_end":
            self.average.update_parameters(more["model"])

    def result(self) -> Any:
        return self.average.state_dict()


class Best(Own):
    """Keeps a copy of the model."""

    def __init__(self, draw: random.Random) -> None:
        self.best, self.loss, self.model = None, float("inf"), None

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        self.model = more["model"]
        if event == "on_log" and more["logs"].get("loss", float("inf")) < self.loss:
            self.loss, self.best = more["logs"]["loss"], copy.deepcopy(more["model"])

    def result(self) -> Any:
        return self.loss, self.best and self.best.state_dict()


class Clip(Own):
    """Changes an argument."""

    def __init__(self, draw: random.Random) -> None:
        self.steps = draw.randint(2, 6)

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_step_begin" and state.global_step == self.steps:
            args.max_grad_norm = 0.05
            args.logging_nan_inf_filter = False


class Flags(Own):
    """Asks for logs, evaluations and checkpoints, and ends the training."""

    def __init__(self, draw: random.Random) -> None:
        self.random, self.end = random.Random(draw.random()), draw.randint(6, 40)
        self.numpy = numpy.random.default_rng(3)
        self.event = draw.choice(["on_step_end", "on_epoch_end", "on_substep_end", "on_log", "on_epoch_begin"])

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_step_end":
            control.should_log |= self.random.random() < 0.3
            control.should_evaluate |= self.numpy.random() < 0.2
            control.should_save |= self.random.random() < 0.2
        if event == self.event and state.global_step >= self.end:
            control.should_training_stop = True

    def result(self) -> Any:
        return self.random.random(), self.numpy.random()


class Patience(Own):
    """Ends the training by the logged losses, which a list of the function has, too."""

    def __init__(self, draw: random.Random, losses: list[Any] | None = None) -> None:
        self.losses = [] if losses is None else losses
        self.patience = draw.randint(2, 8)

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_log" and "loss" in more["logs"]:
            self.losses.append(more["logs"]["loss"])
            control.should_training_stop |= len(self.losses) > self.patience and self.losses[-1] > min(self.losses)

    def result(self) -> Any:
        return self.losses


class Meter:
    def __init__(self) -> None:
        self.sum, self.values = torch.zeros(2), list[float]()


class Meters(Own):
    """Has an object of the program's own, of which a new one is made in each epoch."""

    def __init__(self, draw: random.Random) -> None:
        self.all = self.epoch = Meter()

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_epoch_begin":
            self.epoch = Meter()
        if event == "on_step_end":
            for each in (self.all, self.epoch):
                each.sum += state.global_step
                each.values.append(state.epoch)

    def result(self) -> Any:
        return self.all.sum, self.all.values, self.epoch.sum, self.epoch.values


class Writes(Own):
    """Has a file and an iterator."""

    def __init__(self, draw: random.Random) -> None:
        self.file: Any = None
        self.places = iter([*range(1000)])
        self.place = -1

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == "on_epoch_begin":
            self.file = open(Path(args.output_dir).parent / f"written{id(self)}", "a")  # noqa: SIM115
        if event == "on_step_end":
            self.file.write("step\n")
            self.place = next(self.places)
        if event == "on_epoch_end":
            self.file.close()

    def result(self) -> Any:
        return self.place


class Adds(Own):
    """Logs a value of its own."""

    def __init__(self, draw: random.Random) -> None:
        self.event = draw.choice(["on_epoch_begin", "on_step_end", "on_epoch_end"])

    def at(self, event: str, args: Any, state: Any, control: Any, more: dict[str, Any]) -> None:
        if event == self.event:
            state.log_history.append({"own": state.global_step, "step": state.global_step})


OWN: list[Any] = [
    Counts,
    Resets,
    Freezes,
    FreezesByEpochs,
    Decays,
    Noise,
    Forgets,
    Average,
    AverageModule,
    Best,
    Clip,
    Flags,
]
OWN += [Patience, Meters, Writes, Adds]


class OwnSampler(Sampler[int]):
    """Has a generator and a counter of its own, and no `set_epoch`."""

    def __init__(self, size: int) -> None:
        self.size, self.passes, self.random = size, 0, numpy.random.default_rng(5)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(each + self.passes) % self.size for each in self.random.permutation(self.size).tolist()])


class Masks:
    """A collator that draws random numbers."""

    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        masked = torch.rand(batch["input_ids"].shape) < 0.15 + 0.1 * random.random()
        return {**batch, "input_ids": batch["input_ids"].masked_fill(masked, 1 + int(numpy.random.randint(5)))}


class Watching(Trainer):  # type: ignore[misc]
    """Is a class of one's own with attributes, and says where it is."""

    place: Any = staticmethod(lambda where: None)
    order = ""

    def training_step(self, *given: Any, **more: Any) -> Any:
        self.place("training_step")
        found = super().training_step(*given, **more)
        self.lengths = [*getattr(self, "lengths", []), float(found.detach())]
        self.place("after training_step")
        return found

    def evaluate(self, *given: Any, **more: Any) -> Any:
        self.evaluations = getattr(self, "evaluations", 0) + 1
        return super().evaluate(*given, **more)

    def log(self, logs: dict[str, float], *given: Any, **more: Any) -> None:
        self.seen = getattr(self, "seen", defaultdict(list))
        self.seen[len(logs)].append(self.state.global_step)
        super().log({**logs, "evaluations": getattr(self, "evaluations", 0)}, *given, **more)

    def _get_train_sampler(self, *given: Any) -> Any:
        size = len(self.train_dataset)
        weights = [1 + each % 3 for each in range(size)]
        if self.order == "weighted":
            return WeightedRandomSampler(weights, size)
        if self.order == "weighted with a generator":
            return WeightedRandomSampler(weights, size, generator=torch.Generator().manual_seed(2))
        return OwnSampler(size) if self.order == "own" else super()._get_train_sampler(*given)


class Stepping(torch.optim.SGD):
    """Says when it has made a step."""

    place: Any = staticmethod(lambda where: None)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        Stepping.place("step begins")
        found = super().step(closure)
        Stepping.place("step ends")
        return found


SCHEDULERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")},
    "cosine_with_restarts": {"num_cycles": 2},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "greedy": {"patience": 1, "factor": 0.5},
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
# Options of which each draws a value, or none. The first of each is what a Trainer has without it.
OPTIONS: dict[str, list[Any]] = {
    "num_train_epochs": [3, 2, 2.5],
    "max_steps": [-1, -1, 7],
    "gradient_accumulation_steps": [1, 2, 3],
    "per_device_train_batch_size": [4, 3],
    "optim": ["adamw_torch", "sgd", "adafactor", "rmsprop", "adagrad", "adamw_torch_fused"],
    "max_grad_norm": [1.0, 0.0, 0.1],
    "weight_decay": [0.0, 0.01],
    "warmup_steps": [0, 3],
    "label_smoothing_factor": [0.0, 0.1],
    "bf16": [False, False, False, True],
    "logging_steps": [2, 1, 3, 0.3],
    "logging_first_step": [False, True],
    "logging_strategy": ["steps", "steps", "epoch", "no"],
    "eval_on_start": [False, True],
    "eval_delay": [0, 1],
    "save_total_limit": [None, 1, 2],
    "save_only_model": [False, True],
    "restore_callback_states_from_checkpoint": [False, True],
    "include_num_input_tokens_seen": ["no", "all", "non_padding"],
    "dataloader_drop_last": [False, False, True],
    "data_seed": [None, 5],
    "accelerator_config": [None, None, {"use_seedable_sampler": False}, {"even_batches": False}],
    "eval_accumulation_steps": [None, 1],
    "torch_empty_cache_steps": [None, 2],
    "prediction_loss_only": [False, False, True],
    "dataloader_num_workers": [0] * 11 + [1],
}


class Program:
    """A program that a number has drawn."""

    def __init__(self, number: int) -> None:
        draw = self.draw = random.Random(number)
        self.model = draw.choice(["mean", "mean", "bert", "llama"])
        self.options = {name: draw.choice(values) for name, values in OPTIONS.items() if draw.random() < 0.5}
        if "label_smoothing_factor" in self.options and self.model == "mean":
            del self.options["label_smoothing_factor"]
        self.options["lr_scheduler_type"] = draw.choice([*SCHEDULERS])
        self.options["lr_scheduler_kwargs"] = SCHEDULERS[self.options["lr_scheduler_type"]]
        self._draw_evaluations(draw)
        self.order = draw.choice(
            ["", "", "sequential", "group_by_length", "weighted", "weighted with a generator", "own"]
        )
        if self.order in ("sequential", "group_by_length"):
            self.options["train_sampling_strategy"] = self.order
        self.seed = draw.choice([None, 7])
        if self.options.get("dataloader_num_workers"):
            self.seed = 7  # the numbers of a loader's processes are a process's own
        self.masks, self.workers = draw.random() < 0.4, draw.choice([1, 1, 2])
        self.callbacks = draw.sample(OWN, draw.randint(1, 4))
        self.own_optimizer = draw.random() < 0.3
        self.library = draw.sample([PrinterCallback, ProgressCallback], draw.randint(0, 1))
        self.choices = draw.random()

    def _draw_evaluations(self, draw: random.Random) -> None:
        given = self.options
        given["eval_strategy"] = draw.choice(["no", "steps", "epoch"])
        self.best = draw.random() < 0.4 or given["lr_scheduler_type"] in BY_METRIC
        if self.best:
            self.model = {"llama": "bert"}.get(self.model, self.model)
            given |= {
                "eval_strategy": draw.choice(["steps", "epoch"]),
                "prediction_loss_only": False,
                "metric_for_best_model": "entropy",
            }
            given |= {"greater_is_better": False, "eval_delay": 0}
        if given.get("eval_on_start") and given["eval_strategy"] == "no":
            given["eval_strategy"] = "epoch"
        given["eval_steps"] = draw.choice([2, 3])
        given["save_strategy"], given["save_steps"] = draw.choice(["no", "steps", "epoch"]), given["eval_steps"]
        self.patience = draw.randint(1, 2) if self.best and draw.random() < 0.6 else 0
        if self.best and draw.random() < 0.7:
            given["save_strategy"] = draw.choice([given["eval_strategy"], "best"])
            given["load_best_model_at_end"] = True

    def make(self, folder: str, place: Place, attempt: int) -> Any:
        draw = random.Random(self.choices)
        texts = self.model == "llama"
        data = {"train_dataset": Tokens(26, texts), "eval_dataset": Tokens(10, texts, seed=8)}
        data |= {"compute_metrics": entropy} if not (self.options.get("prediction_loss_only") or texts) else {}
        data |= {"data_collator": Masks()} if self.masks else {}
        if self.own_optimizer:
            data["optimizer_cls_and_kwargs"] = Stepping, {"lr": 0.05, "momentum": 0.9}
        args = arguments(folder, **{"warmup_steps": 0, "learning_rate": 1e-2, **self.options})
        trainer = Watching(model=make_model(self.model, 0.1), args=args, **data)
        trainer.place, trainer.order = place, self.order
        Stepping.place = staticmethod(place)
        trainer.remove_callback(PrinterCallback)
        own = [kind(draw) for kind in self.callbacks]
        if self.patience:
            own.append(EarlyStoppingCallback(self.patience))
        own += [kind() for kind in self.library] + [Places(place), TensorBoardCallback()]
        draw.shuffle(own)
        for each in own:
            trainer.add_callback(each)
        if self.seed is not None:
            torch.rand(attempt), random.random()  # as in another process
        return trainer

    def run(
        self, folder: str, place: Place = lambda where: None, elastic: bool = True, attempt: int = 1
    ) -> dict[str, Any]:
        trainer = self.make(folder, place, attempt)
        prepare_trainer(trainer, elastic=elastic, seed=self.seed if elastic else None).train()
        return state_of(trainer)


TIMES = ("_runtime", "_per_second", "_time")


def state_of(trainer: Any) -> dict[str, Any]:
    """Return what must be equal."""
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    handler, folder = trainer.callback_handler, Path(trainer.args.output_dir)
    rows = [
        {name: value for name, value in row.items() if not name.endswith(TIMES)} for row in trainer.state.log_history
    ]
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": inner.state_dict(),
        "scheduler": {name: value for name, value in trainer.lr_scheduler.state_dict().items() if "lambda" not in name},
        "history": rows,
        "points": [each for each in points_of(folder) if not each[1].replace("/", "_").endswith(TIMES)],
        "state": {
            name: getattr(trainer.state, name) for name in ("epoch", "global_step", "best_metric", "best_global_step")
        },
        "trained": [each.requires_grad for each in trainer.model.parameters()],
        "callbacks": [(type(each).__name__, each.result()) for each in handler.callbacks if isinstance(each, Own)],
        "patience": [
            each.early_stopping_patience_counter
            for each in handler.callbacks
            if isinstance(each, EarlyStoppingCallback)
        ],
        "class": [getattr(trainer, name, None) for name in ("lengths", "evaluations", "seen")],
        "files": {
            path.name: sorted(each.name for each in path.iterdir()) for path in sorted(folder.glob("checkpoint-*"))
        },
    }


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """List where two results differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [each for key in one for each in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple, deque)) and len(one) == len(other):
        return [
            each for at, pair in enumerate(zip(one, other, strict=True)) for each in differences(*pair, f"{path}/{at}")
        ]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [f"{path}: {float((one.float() - other.float()).abs().max())}"]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{path}: {str(one)[:300]} and {str(other)[:300]}"]
