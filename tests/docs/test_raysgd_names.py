"""The table of RaySGD's public names in docs/migrating.md: each name is imported and used, which must go as the table says."""

import contextlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch.small import inline

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
ROW = re.compile(
    r"^\| `ray\.util\.sgd\.?([a-z_.]*)(?<!\.)\.?((?:[A-Z]\w+)?)` \| ((?:`[^`]+` )+)\| (\w+) \|(.*)\|$", re.M
)
TABLE = PAGE.read_text(encoding="utf-8").partition("## Every name\n")[2].partition("<!-- end of names -->")[0]


def named(owner: str, name: str) -> str:
    """Return a name with the class that has it, or of which it is an argument."""
    if not owner:
        return name
    return f"{owner}({name}...)" if name.endswith("=") else f"{owner}({name})" if "=" in name else f"{owner}.{name}"


# (module, name, outcome, note)
ROWS: list[tuple[str, str, str, str]] = [
    (module, named(owner, name), outcome, note)
    for module, owner, names, outcome, note in ROW.findall(TABLE)
    for name in re.findall(r"`([^`]+)`", names)
]
# What a refused name raises; the import of another one raises an ImportError that says what to do instead.
RAISED = {"TorchTrainer.restore": DeprecationWarning, "TorchTrainer.worker_group": AttributeError}
NEEDS = {"tf": "tensorflow", "TFTrainer": "tensorflow", "TFTrainable": "pandas", "BaseTorchTrainable": "pandas"}
NEEDS |= {"TorchTrainer.as_trainable": "pandas", "TrainingOperator.from_ptl": "lightning"}


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def got(module: str, name: str) -> Any:
    return getattr(importlib.import_module(".".join(filter(None, ("raysgd", module)))), name)


def creators() -> Any:
    return got("torch", "TrainingOperator").from_creators(
        lambda config: torch.nn.Linear(1, 1),
        lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss_creator=torch.nn.MSELoss,
        scheduler_creator=lambda optimizer, config: scheduler(optimizer),
    )


@contextlib.contextmanager
def created() -> Iterator[Any]:
    with inline(creators(), scheduler_step_freq="manual") as trainer:
        operator = trainer.get_local_operator()
        assert isinstance(operator, got("torch", "CreatorOperator"))
        yield operator


@contextlib.contextmanager
def torch_trainer() -> Iterator[Any]:
    """Yield a trainer with one worker, which runs in this process."""
    with inline(config={"scheduler": scheduler}, scheduler_step_freq="manual") as trainer:
        yield trainer


@contextlib.contextmanager
def own_operator() -> Iterator[Any]:
    with inline() as trainer:
        yield trainer.get_local_operator()


@contextlib.contextmanager
def tf_trainer() -> Iterator[Any]:
    from tests.tf.small import data_creator, model_creator

    config = {"fit_config": {"epochs": 1}, "evaluate_config": {"steps": 1}}
    given = {"num_replicas": 1, "num_cpus_per_worker": 1, "use_gpu": False, "verbose": False}
    with got("", "TFTrainer")(model_creator, data_creator, config, **given) as trainer:
        yield trainer


def meter(name: str) -> Any:
    made = got("utils", name)()
    for value, n in ((2.0, 3), (5.0, 1)):
        made.update({"a": value} if "Collection" in name else value, n=n)
    return made


# An object whose members the table names.
OWNERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "TorchTrainer": torch_trainer,
    "TrainingOperator": own_operator,
    "CreatorOperator": created,
    "TFTrainer": tf_trainer,
    "BaseTorchTrainable": lambda: contextlib.nullcontext(got("torch", "BaseTorchTrainable")),
    "AverageMeter": lambda: contextlib.nullcontext(meter("AverageMeter")),
    "AverageMeterCollection": lambda: contextlib.nullcontext(meter("AverageMeterCollection")),
}


def saved_and_loaded(trainer: Any, load: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        getattr(trainer, load)(trainer.save(f"{folder}/checkpoint"))


def trainable(_: Any) -> None:
    operator = got("torch", "TrainingOperator")
    made = got("torch", "TorchTrainer").as_trainable(training_operator_cls=operator, num_workers=2, use_gpu=False)
    assert issubclass(made, got("torch", "BaseTorchTrainable"))
    made.default_resource_request({})


def from_lightning(_: Any) -> None:
    from tests.torch.lightning.modules import Net

    with inline(got("torch", "TrainingOperator").from_ptl(Net)) as trainer:
        assert "train_loss" in trainer.train()


# How older scripts call a member of an owner, with the arguments in their old order.
CALLS: dict[str, Callable[[Any], Any]] = {
    "TorchTrainer.train": lambda trainer: trainer.train(1, False, True, 3, {}, None),
    "TorchTrainer.validate": lambda trainer: trainer.validate(1, False, True, {}),
    "TorchTrainer.apply_all_workers": lambda trainer: trainer.apply_all_workers(int),
    "TorchTrainer.apply_all_operators": lambda trainer: trainer.apply_all_operators(id),
    "TorchTrainer.update_scheduler": lambda trainer: trainer.update_scheduler(1),
    "TorchTrainer.get_model": lambda trainer: trainer.get_model(to_cpu=True),
    "TorchTrainer.load_state_dict": lambda trainer: trainer.load_state_dict(trainer.state_dict(), blocking=False),
    "TorchTrainer.save": lambda trainer: saved_and_loaded(trainer, "load"),
    "TorchTrainer.load": lambda trainer: saved_and_loaded(trainer, "load"),
    "TorchTrainer.restore": lambda trainer: trainer.restore("x"),
    "TorchTrainer.shutdown": lambda trainer: (trainer.shutdown(), trainer.shutdown(force=True)),
    "TorchTrainer.max_replicas": lambda trainer: 1 / trainer.max_replicas,
    "TorchTrainer.as_trainable": trainable,
    "TrainingOperator.from_ptl": from_lightning,
    "TFTrainer.train": lambda trainer: trainer.train(),
    "TFTrainer.validate": lambda trainer: trainer.validate(),
    "TFTrainer.get_model": lambda trainer: trainer.get_model(),
    "TFTrainer.save": lambda trainer: saved_and_loaded(trainer, "restore"),
    "TFTrainer.restore": lambda trainer: saved_and_loaded(trainer, "restore"),
}
# What a member has, or the name of its type.
VALUES: dict[str, Any] = {
    **{"AverageMeter.val": 5.0, "AverageMeter.avg": 2.75, "AverageMeter.sum": 11.0, "AverageMeter.count": 4},
    "AverageMeterCollection.summary": {"batch_count": 2, "num_samples": 4, "a": 2.75, "last_a": 5.0},
    **{"CreatorOperator.model": "Linear", "CreatorOperator.optimizer": "SGD"},
    **{"CreatorOperator.scheduler": "StepLR", "CreatorOperator.criterion": "MSELoss"},
}
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "TFTrainable": lambda: got("tf", "TFTrainable").default_resource_request({}),
    "find_free_port": lambda: got("utils", "find_free_port")(),
    "check_for_failure": lambda: got("utils", "check_for_failure")([]),
    "override": lambda: got("utils", "override")(str)(str.upper),
}
# Values of TorchTrainer's arguments.
ARGUMENTS: dict[str, Any] = {
    **{"initialization_hook": lambda: None, "config": {"lr": 0.1}, "num_workers": 1, "num_cpus_per_worker": 1},
    **{"use_gpu": False, "backend": "gloo", "wrap_ddp": True, "timeout_s": 100, "use_fp16": False, "use_tqdm": False},
    **{"add_dist_sampler": True, "scheduler_step_freq": "epoch", "serialize_data_creation": True, "use_local": True},
}


def use(module: str, name: str) -> None:
    owner, _, argument = name.removesuffix(")").partition("(")
    if owner == "TorchTrainer" and argument:
        argument = argument.removesuffix("=...")
        with inline(**({} if argument == "training_operator_cls" else {argument: ARGUMENTS.get(argument, 1)})) as made:
            made.train()
    elif argument:
        assert argument.partition("=")[0] in signature(got(module, owner)).parameters
    elif "." in name:
        owner, member = name.split(".")
        with OWNERS[owner]() as made:
            CALLS.get(name, lambda made: getattr(made, member))(made)
            if name in VALUES:
                found = getattr(made, member)() if member == "summary" else getattr(made, member)
                assert VALUES[name] in (found, type(found).__name__), found
    else:
        FUNCTIONS.get(name, lambda: got(module, name))()


def problem(module: str, name: str, outcome: str) -> str:
    """Return what differs from the table when the name is used."""
    owner = re.split(r"[.(]", name)[0]
    needed = NEEDS.get(name) or NEEDS.get(owner) or NEEDS.get(module.partition(".")[0])
    if needed and importlib.util.find_spec(needed) is None:
        return ""
    raised = RAISED.get(name, DeprecationWarning if "(" in name else ImportError)
    try:
        if outcome == "refused" and raised is ImportError:
            exec(f"from {f'raysgd.{module}'.rstrip('.')} import {name}")
        use(module, name)
    except Exception as error:
        explained = raised is not ImportError or str(error).startswith(f"raysgd has no {name}: ")
        return "" if outcome == "refused" and isinstance(error, raised) and explained else f"{name}: {error!r}"
    return f"{name}: {raised.__name__} was not raised" if outcome == "refused" else ""


@pytest.fixture(scope="module")
def lightning() -> None:
    """Import it before a test does, because it sets an environment variable."""
    if importlib.util.find_spec("lightning"):
        importlib.import_module("lightning")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.* has no effect:DeprecationWarning")
@pytest.mark.parametrize("module", sorted({row[0] for row in ROWS}))
def test_names_do_what_the_table_says(lightning: None, module: str) -> None:
    found = [each for row in ROWS if row[0] == module and (each := problem(*row[:3]))]
    assert not found, "\n".join(found)


def test_every_row_is_read_and_says_how_it_differs() -> None:
    assert len(ROW.findall(TABLE)) == TABLE.count("\n| `ray")
    assert len(set(row[:2] for row in ROWS)) == len(ROWS) > 150
    assert {outcome for _, _, outcome, _ in ROWS} == {"works", "differs", "refused"}
    assert not [row for row in ROWS if (row[2] == "works") == bool(row[3].strip())]
