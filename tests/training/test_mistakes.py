"""Typical mistakes: none is silent, and each message says what was passed, what is allowed and what to do."""

import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raysgd
from raysgd import AutoCheckpoint, ElasticConfig, TrainingOptions
from raysgd.callbacks import Callback, EarlyStopping
from raysgd.errors import ConfigError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.replica import TorchReplica
from raysgd.train import Trainer
from tests.local.group import Cluster
from tests.replicas import send_to_workers
from tests.torch.small import Line, inline, operator_of, rows

HOME = Path(raysgd.__file__).parent
Case = tuple[Callable[[], Any], list[str]]


class Own(Callback):
    """Has an argument."""

    def __init__(self, lowest: float = 0.0) -> None:
        self.lowest = lowest


def made(**arguments: Any) -> Callable[[], Any]:
    """Return what creates a trainer."""
    return lambda: inline(**arguments).shutdown()


def called(method: str, operator: Any = Line, options: Any = None, **arguments: Any) -> Callable[[], Any]:
    """Return what creates a trainer and calls one method."""

    def call() -> None:
        with inline(operator, options=options) as trainer:
            getattr(trainer, method)(**arguments)

    return call


def own(**methods: Any) -> type[Line]:
    return type("Own", (Line,), methods)


def registering(**changes: Any) -> type[Line]:
    """Return an operator that registers other parts; a function gets the model and the optimizer."""

    def setup(self: Any, config: dict[str, Any]) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts: dict[str, Any] = {"models": model, "optimizers": optimizer, "criterion": nn.MSELoss()}
        for name, value in changes.items():
            parts[name] = value(model, optimizer) if type(value) is type(lambda: 0) else value
        self.model, self.optimizer, self.criterion, *_ = self.register(**parts)
        self.register_data(train_loader=DataLoader(TensorDataset(*rows()), batch_size=4))

    return own(setup=setup)


def loading(train: Any = None, **named: Any) -> type[Line]:
    return own(loaders=lambda self, config: named or {"train_loader": train})


def returning(value: Any) -> type[Line]:
    return own(train_batch=lambda self, batch, batch_info: value)


def other_parameters(model: Any, optimizer: Any) -> Any:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def two_optimizers(model: Any, optimizer: Any) -> Any:
    return [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]


def other_schedule(model: Any, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(other_parameters(model, optimizer), 1)


def one_schedule(model: Any, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def plateau(model: Any, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def scheduled(kind: type[Line], step: str | None) -> Callable[[], Any]:
    def call() -> None:
        with inline(kind, scheduler_step_freq=step) as trainer:
            trainer.train()

    return call


def setting(name: str, value: Any) -> type[Line]:
    """Return an operator whose setup sets an attribute."""

    def setup(self: Any, config: dict[str, Any]) -> None:
        Line.setup(self, config)
        setattr(self, name, value)

    return own(setup=setup)


def step_with_a_closure(self: Any, batch: Any, batch_info: Any) -> Any:
    return {"stepped": self.step(lambda: torch.tensor(0.0))}


class Sparse(Line):
    """Has embeddings with sparse gradients."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True), nn.Linear(2, 1))

    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": [(torch.ones(4, 3, dtype=torch.long), torch.ones(4, 1))]}


def setup_in_another_order(self: Any, config: dict[str, Any]) -> None:
    Line.setup(self, config)
    self.criterion, self.optimizer = self.optimizer, self.criterion


def without_super(self: Any, *args: Any, **kwargs: Any) -> None:
    """Forgets the base class."""


ARGUMENTS: dict[str, Case] = {
    "a class of options": (
        made(options=TrainingOptions),
        ["options must be a raysgd.TrainingOptions, got <class", "TrainingOptions(...)"],
    ),
    "options as a dict": (made(elastic={"min_workers": 1}), ["elastic must be a raysgd.Elas", "ElasticConfig(...)"]),
    "a class of checkpoints": (made(checkpoints=AutoCheckpoint), ["checkpoints must be", "AutoCheckpoint(...)"]),
    "a number as logdir": (made(logdir=5), ["logdir must be a path", "got 5"]),
    "a hook with an argument": (
        made(initialization_hook=lambda config: None),
        ["initialization_hook must be a function without arguments, got <function"],
    ),
    "use_tqdm as text": (made(use_tqdm="yes"), ["use_tqdm must be True or False", "got 'yes'"]),
    "a callback that is a function": (made(callbacks=[print]), ["raysgd.callbacks.Callback objects", "print"]),
    "a callback that is a class": (made(callbacks=[Callback]), ["got the class Callback", "pass Callback()"]),
}
OPTIONS: dict[str, Case] = {
    "a name for a training function": (
        lambda: Trainer("torch", name="digits"),  # type: ignore[call-arg]
        ["Trainer takes no argument 'name'", "end with the script", "resume from the newest one"],
    ),
    "an operator as the training function": (
        lambda: raysgd.train.TorchTrainer(Line),
        ["the training function must be a function", "An operator class is for raysgd.TorchTrainer"],
    ),
    "an argument of the other TorchTrainer": (
        lambda: TorchTrainer(train_loop_per_worker=print),  # type: ignore[call-arg]
        ["takes no argument 'train_loop_per_worker'", "trains an operator class", "The trainers of raysgd.train"],
    ),
    "a number of workers of a training function": (
        lambda: raysgd.train.TorchTrainer(print, num_workers=2),
        ["takes no argument 'num_workers'", "scaling_config=ScalingConfig(num_workers="],
    ),
    "a dict as a report's checkpoint": (
        lambda: raysgd.train.report({"loss": 1}, checkpoint={"epoch": 1}),
        ["checkpoint must be a Checkpoint, got {'epoch': 1}", "Checkpoint.from_dict"],
    ),
    "a loss in the place of its creator": (
        lambda: TrainingOperator.from_creators(print, print, loss_creator=nn.MSELoss()),
        ["loss_creator must be a function", "got MSELoss()"],
    ),
    "a misspelled option": (lambda: TrainingOptions(clip_nrom=1), ["TrainingOptions", "did you mean 'clip_norm'"]),  # type: ignore[call-arg]
    "a clip that is a flag": (lambda: TrainingOptions(clip_value=True), ["above 0, or None", "got True"]),
    "a misspelled elastic field": (lambda: ElasticConfig(min_worker=1), ["did you mean 'min_workers'"]),  # type: ignore[call-arg]
    "a positional checkpoint path": (
        lambda: AutoCheckpoint("runs"),  # type: ignore[call-arg]
        ["AutoCheckpoint takes no positional arguments", "AutoCheckpoint(path=...)"],
    ),
    "another library's name of an option": (lambda: TrainingOptions(max_grad_norm=1), ["did you mean 'clip_norm'"]),  # type: ignore[call-arg]
    "a folder as a path": (lambda: AutoCheckpoint(folder="runs"), ["did you mean 'path'"]),  # type: ignore[call-arg]
    "a positional patience": (
        lambda: EarlyStopping("val_loss", 3),  # type: ignore[call-arg]
        ["EarlyStopping takes only metric as positional arguments", "EarlyStopping(patience=...)"],
    ),
    "a misspelled argument of the user's callback": (
        lambda: Own(lowst=1),  # type: ignore[call-arg]
        ["Own takes no argument 'lowst'", "did you mean 'lowest'"],
    ),
    "clipping without autocast": (
        called("train", returning({}), options=TrainingOptions(precision="apex")),
        ["precision='apex' needs", "use precision='fp16'"],
    ),
}
OPERATORS: dict[str, Case] = {
    "a positional class": (
        lambda: TorchTrainer(Line),  # type: ignore[call-arg]
        ["TorchTrainer takes no positional arguments", "TorchTrainer(training_operator_cls=...)"],
    ),
    "no class": (lambda: TorchTrainer(), ["training_operator_cls must be a subclass", "got None"]),
    "a training function as the operator": (
        made(operator=lambda config: None),
        ["subclass of raysgd's TrainingOperator", "For a training function, use raysgd.train.TorchTrainer"],
    ),
    "a model as the operator": (made(operator=nn.Linear), ["subclass of raysgd's TrainingOperator", "Linear"]),
    "setup without config": (
        made(operator=own(setup=lambda self: None)),
        ["Own.setup must take (self, config)", "setup(self)"],
    ),
    "train_batch without info": (
        made(operator=own(train_batch=lambda self, batch: {})),
        ["Own.train_batch must take (self, batch, batch_info)", "change its arguments"],
    ),
    "an __init__ of its own": (
        made(operator=own(__init__=lambda self: None)),
        ["Own.__init__ must take", "got __init__(self)", "setup(self, config)"],
    ),
    "an __init__ without super": (
        made(operator=own(__init__=without_super)),
        ["did not call super().__init__(*args, **kwargs)", "setup(self, config)"],
    ),
    "no setup": (made(operator=type("Own", (TrainingOperator,), {})), ["no method setup(self, config)", "define it"]),
    "setup registers nothing": (made(operator=own(setup=lambda self, config: None)), ["did not call self.register"]),
}
PARTS: dict[str, Case] = {
    "a model that is a class": (made(operator=registering(models=nn.Linear)), ["models must be a torch.nn.Module"]),
    "an optimizer of another model": (
        made(operator=registering(optimizers=other_parameters)),
        ["SGD holds 2 parameters, none of which belongs to a registered model", "register(models=...)"],
    ),
    "an optimizer's class": (
        made(operator=registering(optimizers=torch.optim.SGD)),
        ["optimizers must be", "pass an object"],
    ),
    "a loss's class": (made(operator=registering(criterion=nn.MSELoss)), ["criterion must be", "nn.MSELoss()"]),
    "a schedule without its frequency": (
        made(operator=registering(schedulers=lambda model, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))),
        ["register got schedulers", "scheduler_step_freq='batch', 'step', 'epoch' or 'manual'"],
    ),
    "a schedule of another optimizer": (
        scheduled(registering(schedulers=other_schedule), "epoch"),
        ["StepLR changes an optimizer that is not registered", "register(optimizers=...)"],
    ),
    "a schedule's class": (
        scheduled(registering(schedulers=torch.optim.lr_scheduler.StepLR), "epoch"),
        ["schedulers must be", "pass an object"],
    ),
    "a plateau that the default loop would step": (
        made(operator=registering(schedulers=plateau), scheduler_step_freq="epoch"),
        ["ReduceLROnPlateau.step needs an argument", "scheduler_step_freq='epoch'", "trainer.update_scheduler(metric)"],
    ),
    "a scheduler as the optimizer": (
        scheduled(registering(optimizers=one_schedule, schedulers=one_schedule), "epoch"),
        ["optimizers got StepLR", "one of the schedulers", "pass it as schedulers=..."],
    ),
    "an optimizer as the scheduler": (
        scheduled(registering(schedulers=lambda model, optimizer: optimizer), "epoch"),
        ["schedulers got SGD", "one of the optimizers", "pass it as optimizers=..."],
    ),
    "parts in another order": (
        made(operator=own(setup=setup_in_another_order)),
        ["setup sets self.criterion to an optimizer, SGD", "in this order"],
    ),
    "no optimizers": (made(operator=registering(optimizers=None)), ["optimizers must not be None", "pass []"]),
    "a method's name": (
        made(operator=setting("step", 0)),
        ["setup sets self.step to 0", "step is a method of TrainingOperator", "another name"],
    ),
    "a misspelled part": (
        made(operator=registering(model=1)),
        ["register takes no argument 'model'", "did you mean 'models'"],
    ),
}
DATA: dict[str, Case] = {
    "a data set instead of a loader": (
        made(operator=loading(TensorDataset(*rows()))),
        ["train_loader must be a DataLoader", "got the data set", "DataLoader(data_set, batch_size=...)"],
    ),
    "a loader's class": (made(operator=loading(DataLoader)), ["train_loader must be", "DataLoader"]),
    "no training data": (called("train", loading(None)), ["train() needs data", "register_data(train_loader=...)"]),
    "batches that are dicts": (
        called("train", loading([{"x": 1}])),
        ["(*features, target)", "got a dict", "override train_batch"],
    ),
    "batches that are tensors": (
        called("train", loading([torch.ones(4, 2)])),
        ["got a Tensor without a target", "return (features, target)", "override train_batch"],
    ),
    "a sampler without a length": (
        called("train", loading(DataLoader(TensorDataset(*rows()), batch_size=4, sampler=iter(range(12))))),
        ["the sampler range_iterator has no length", "give it a __len__"],
    ),
    "a list as a call's data": (
        called("train", dataset=[1, 2]),
        ["dataset must be a Ray Dataset", "got [1, 2]", "register_data"],
    ),
}
RESULTS: dict[str, Case] = {
    **{
        f"a metric named {name}": (
            called("train", returning({name: 7})),
            [f"Own.train_batch returned a metric named '{name}'", "epoch, profile, skipped_steps", f"'my_{name}'"],
        )
        for name in ("epoch", "skipped_steps")
    },
    "a batch count that is not a number": (
        called("train", own(train_epoch=lambda self, iterator, info=None: {"batch_count": torch.ones(2)})),
        ["Own.train_epoch returned a metric named 'batch_count'"],
    ),
    "a validation's metric named epoch": (
        called("validate", own(validate_batch=lambda self, batch, batch_info: {"epoch": 7})),
        ["Own.validate_batch returned a metric named 'epoch'", "'my_epoch'"],
    ),
}
CALLS: dict[str, Case] = {
    "a misspelled argument of train": (
        called("train", num_step=3),
        ["train takes no argument", "did you mean 'num_steps'"],
    ),
    "fit without a number": (called("fit"), ["fit", "'epochs'"]),
    "a closure as the optimizer": (
        called("train", own(train_batch=step_with_a_closure)),
        ["self.step() takes an optimizer, got <function", "passes no closure on", "Call the step(closure)"],
    ),
    "two optimizers in the default train_batch": (
        called("train", registering(optimizers=two_optimizers)),
        [
            "steps one optimizer, and self.optimizer is a list of 2",
            "override train_batch, and call self.step(optimizer)",
        ],
    ),
    "LBFGS in the default train_batch": (
        called("train", registering(optimizers=lambda model, optimizer: torch.optim.LBFGS(model.parameters()))),
        ["LBFGS.step needs one: override train_batch, and call self.optimizer.step(closure)"],
    ),
    "sparse gradients that are clipped": (
        called("train", Sparse, options=TrainingOptions(clip_norm=1.0)),
        ["clip_norm=1.0 cannot clip", "sparse=False"],
    ),
    "a misspelled argument of predict": (called("predict", data=[1], batchsize=2), ["mean 'batch_size'"]),
    "profile as text": (called("validate", profile="yes"), ["profile must be True or False", "got 'yes'"]),
    "load a state as a file": (
        called("load", checkpoint={"models": [1] * 1000}),
        ["must be a path", "(3012 characters)", "load_state_dict() takes a dictionary"],
    ),
    "load another state": (called("load_state_dict", state_dict={"a": 1}), ["not a checkpoint of raysgd", "['a']"]),
    "a lock in the config": (
        lambda: send_to_workers(Line, {"path": "x", "guard": threading.Lock()}),
        ["config['guard'] is <unlocked", "inside `setup`"],
    ),
}
CASES: dict[str, Case] = ARGUMENTS | OPTIONS | OPERATORS | PARTS | DATA | RESULTS | CALLS


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSGD_FULL_TRACEBACKS", "1")  # to see which code raised the error
    make, parts = CASES[name]
    with pytest.raises((raysgd.RaysgdError, TypeError, ValueError, NotImplementedError, ImportError)) as caught:
        make()
    for part in parts:
        assert part in str(caught.value), caught.value
    *_, (frame, _) = traceback.walk_tb(caught.value.__traceback__)
    assert HOME in Path(frame.f_code.co_filename).resolve().parents, "the error comes from another library"


def reading(name: str, *, in_setup: bool = False) -> type[Line]:
    """Return an operator that reads an attribute which it does not have."""

    def setup(self: Any, config: dict[str, Any]) -> None:
        Line.setup(self, config)
        assert not in_setup or getattr(self, name)

    return own(setup=setup, train_batch=lambda self, batch, batch_info: getattr(self, name))


def read(name: str) -> Callable[[], Any]:
    def call() -> None:
        with inline() as trainer:
            assert pickle.dumps(trainer.config) and not hasattr(trainer, "__deepcopy__")
            getattr(trainer, name)

    return call


class Broken(TorchTrainer):
    @property
    def model(self) -> Any:
        return self.config.modle  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (called("train", reading("rank")), "no attribute 'rank': did you mean 'world_rank'?"),
        (made(operator=reading("rank", in_setup=True)), "no attribute 'rank': did you mean 'world_rank'?"),
        (called("train", reading("modle")), "no attribute 'modle': did you mean 'model'?"),
        (called("train", reading("log")), "no attribute 'log': return metrics from train_batch"),
        (called("train", reading("_train_loader")), "no attribute '_train_loader': keep the loader in an attribute"),
        (called("train", reading("quite_another")), "no attribute 'quite_another'"),
        (read("model"), "no attribute 'model': did you mean 'get_model'?"),
        (read("bestcheckpoint"), "did you mean 'best_checkpoint'?"),
        (read("quite_another"), "object has no attribute 'quite_another'"),
    ],
)
def test_a_missing_attribute_says_which_was_meant(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(AttributeError) as caught:
        call()
    text = str(caught.value)
    assert said in text and ("did you" in text) == ("did you" in said)


def test_an_error_within_a_trainers_property_is_that_of_its_code() -> None:
    with Broken(training_operator_cls=Line, use_gpu=False) as trainer, pytest.raises(AttributeError, match="'modle'"):
        _ = trainer.model


def test_a_state_that_nothing_restores_is_noticed() -> None:
    with pytest.warns(UserWarning, match="Own.state_dict returns what is saved, and nothing restores it"):
        inline(own(state_dict=lambda self: {"a": 1})).shutdown()


def test_a_count_in_the_place_of_the_optimizer_is_refused() -> None:
    def train_batch(self: Any, batch: Any, batch_info: Any) -> dict[str, Any]:
        self.backward(self.criterion(self.model(batch[0]), batch[1]), 5)
        return {}

    with (
        inline(own(train_batch=train_batch)) as trainer,
        pytest.raises(raysgd.ConfigError, match=r"got 5 .*pass count=\.\.\."),
    ):
        trainer.train()


def test_counts_in_the_place_of_a_mean_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    counting = {each: lambda self, *_: {"accuracy": (3, 4)} for each in ("train_batch", "validate_batch")}
    message = "with the number of samples second: accuracy. raysgd reads a pair as (mean, weight)"
    for call in ("train", "validate"):
        caplog.clear()
        with inline(own(**counting)) as trainer:
            getattr(trainer, call)()
            getattr(trainer, call)()
        assert len([each for each in caplog.messages if message in each]) == 1, caplog.messages


def test_a_number_of_samples_that_is_not_that_of_the_batch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients weigh by samples, or by what `backward` got as a count."""

    def trained(count: int | None) -> type[Line]:
        def train_batch(self: Any, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            loss = self.criterion(self.model(batch[0]), batch[1])
            self.zero_grad()
            self.backward(loss, count=count)
            self.step()
            return {"train_loss": loss.detach(), "num_samples": 7}

        return own(train_batch=train_batch)

    named = (
        "Own.train_batch returned num_samples=7 for a batch of 4 samples. Means weigh it by the first number, gradients"
    )
    for count, workers, said in ((None, 2, 1), (7, 2, 0), (None, 1, 0)):
        caplog.clear()
        with Cluster(), inline(trained(count), num_workers=workers, use_ray=True) as trainer:
            trainer.train()
            trainer.train()
        assert len([each for each in caplog.messages if named in each]) == said, caplog.messages


@pytest.mark.parametrize("value", [(3, 7), (1, 4), (3.0, 4), (torch.tensor(0.5), 4), (3, 4)])
def test_metrics_that_are_as_they_should_be_are_not_named(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with inline(own(validate_batch=lambda self, *_: {"metric": value, "num_samples": 4})) as trainer:
        trainer.validate()
    assert not caplog.messages


def test_a_collective_call_on_one_worker_says_what_to_write() -> None:
    gather = own(train_batch=lambda self, batch, batch_info: torch.distributed.all_reduce(torch.ones(1)))
    with inline(gather) as trainer, pytest.raises(ValueError, match="Default process group") as caught:
        trainer.train()
    notes = getattr(caught.value, "__notes__", [])
    assert "Guard yours with `if self.world_size > 1`" in "".join(notes) or not hasattr(caught.value, "add_note")


class Keeping(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.decay = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


def test_a_scheduler_that_is_not_registered_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with inline(Keeping) as trainer:
        trainer.train()
        trainer.train()
    (message,) = caplog.messages
    assert "setup sets self.decay to a StepLR that is not registered" in message


def test_a_scheduler_inside_of_registered_ones_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def setup(self: Any, config: dict[str, Any]) -> None:
        registering(schedulers=chained).setup(self, config)
        self.warmup = inner[0]

    def chained(model: Any, optimizer: Any) -> Any:
        inner[:] = [torch.optim.lr_scheduler.ConstantLR(optimizer), one_schedule(model, optimizer)]
        sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])
        return torch.optim.lr_scheduler.ChainedScheduler([sequence])

    inner: list[Any] = []
    with inline(own(setup=setup), scheduler_step_freq="batch") as trainer:
        trainer.train()
    assert not caplog.messages


def test_batchnorm_with_one_row_says_how_to_avoid_it() -> None:
    alone = own(train_batch=lambda self, batch, batch_info: nn.BatchNorm1d(1)(torch.ones(1, 1)))
    with inline(alone) as trainer, pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        trainer.train()
    notes = getattr(caught.value, "__notes__", [])
    assert "pass drop_last=True" in "".join(notes) or not hasattr(caught.value, "add_note")


def test_forgotten_num_samples_are_counted_from_the_batch() -> None:
    with inline(returning({"loss": 1.0})) as trainer:
        result = trainer.train()
    assert (result["num_samples"], result["batch_count"]) == (12, 3)


def test_an_optimizer_that_holds_some_registered_parameters_is_accepted() -> None:
    def partly(model: Any, optimizer: Any) -> Any:
        return torch.optim.SGD([model.weight, nn.Parameter(torch.zeros(1))], lr=0.1)

    made(operator=registering(optimizers=partly))()


class Tuned(Line):
    """Has the settings of `config`, and a schedule of its number of steps; halves its rate when asked to."""

    def setup(self, config: dict[str, Any]) -> None:
        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["steps"])

        super().setup({**config, **({"scheduler": schedule} if "steps" in config else {})})

    def make_optimizer(self, model: nn.Module, lr: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=self.config.get("decay", 0.0))


IGNORED = [
    ({"lr": 0.1}, {"lr": 0.05}, "lr of optimizers[0] (SGD) is 0.1 (here: 0.05)"),
    ({"lr": 0.1, "steps": 6}, {"lr": 0.05, "steps": 6}, "lr of optimizers[0] (SGD) is 0.1 (here: 0.05)"),
    ({"decay": 0.1}, {"decay": 0.2}, "weight_decay of optimizers[0] (SGD) is 0.1 (here: 0.2)"),
    ({"lr": 0.1, "steps": 6}, {"lr": 0.1, "steps": 6}, None),
    ({"lr": 0.1}, {"lr": 0.1}, None),
]


@pytest.mark.parametrize(("before", "now", "said"), IGNORED)
def test_settings_that_a_loaded_state_replaces_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, now: Any, said: str | None
) -> None:
    """Neither a schedule nor the script's own changes are other settings."""

    def begun(config: Any) -> TorchTrainer:
        freq = "batch" if "steps" in config else None
        checkpoints = AutoCheckpoint(path=tmp_path / "run")
        return inline(Tuned, config=config, checkpoints=checkpoints, resume="auto", scheduler_step_freq=freq)

    for config, epochs in (
        (before, 1),
        (before, 2),
        (now, 2),
    ):  # the second has resumed, and its checkpoint says the same
        with begun(config) as trainer:
            for _ in trainer.epochs(epochs):
                trainer.train()
                trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(momentum=0.1))
            settings = operator_of(trainer).optimizer.param_groups[0]
            assert settings.get("initial_lr", settings["lr"]) == before.get("lr", 0.1)
    warnings = [message for message in caplog.messages if "Training continues with the loaded ones" in message]
    assert [said in warning for warning in warnings] == ([True] if said else []), caplog.messages
    assert all(warning.count("(here: ") == 1 for warning in warnings)


def test_a_config_that_the_workers_have_got_cannot_be_changed() -> None:
    with inline(config={"lr": 0.1}) as trainer:
        changes: list[Callable[[dict[str, Any]], Any]] = [
            lambda config: config.__setitem__("lr", 0.5),
            lambda config: config.update(lr=0.5),
            lambda config: config.pop("lr"),
            lambda config: config.setdefault("rate", 0.5),
        ]
        for change in changes:
            with pytest.raises(ConfigError, match=r"trainer.config cannot be changed.*apply_all_operators"):
                change(trainer.config)
        assert pickle.loads(pickle.dumps(trainer.config)) == trainer.config == {"lr": 0.1}


def test_workers_make_tensors_of_the_scripts_default_type() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with inline() as trainer:
            settings = trainer._factory.settings
        torch.set_default_dtype(before)
        TorchReplica.prepare_process(settings)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
