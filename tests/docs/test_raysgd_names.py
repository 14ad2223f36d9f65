"""The table of RaySGD's public names in docs/migrating.md: each name is imported and used, which must go as the table says.

`python -m tests.docs.test_raysgd_names` prints the table.
"""

import contextlib
import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
BEGIN, END = "<!-- names: tests/docs/test_raysgd_names.py prints this table -->\n", "<!-- end of names -->"


@dataclass(frozen=True)
class Row:
    """A name of RaySGD. `use` imports it and uses it; `note` says how it differs, or why it is refused with the error `raises`."""

    module: str
    name: str
    use: Callable[[], Any]
    note: str = ""
    raises: type[BaseException] | None = None
    needs: str = "torch"

    @property
    def outcome(self) -> str:
        return "refused" if self.raises else "differs" if self.note else "works"

    def __str__(self) -> str:
        return f"| `{'.'.join(filter(None, ('ray.util.sgd', self.module)))}` | `{self.name}` | {self.outcome} | {self.note} |"


def got(module: str, name: str) -> Any:
    return getattr(importlib.import_module(".".join(filter(None, ("raysgd", module)))), name)


@contextlib.contextmanager
def torch_trainer(**arguments: Any) -> Iterator[Any]:
    """Yield a trainer with one worker, which runs in this process."""
    from tests.torch.small import inline

    operator = arguments.pop("operator", None)
    with inline(*([operator] if operator else []), **arguments) as trainer:
        yield trainer


def given(**arguments: Any) -> Any:
    with torch_trainer(**arguments) as trainer:
        return trainer.train()["num_samples"]


def called(use: Callable[[Any], Any], **arguments: Any) -> Callable[[], Any]:
    def call() -> Any:
        with torch_trainer(**arguments) as trainer:
            return use(trainer)

    return call


def on_operator(use: Callable[[Any], Any], **arguments: Any) -> Callable[[], Any]:
    return called(lambda trainer: use(trainer.get_local_operator()), **arguments)


def saved_and_loaded(trainer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.save(f"{folder}/checkpoint")
        trainer.load(path)


@contextlib.contextmanager
def tf_trainer(**arguments: Any) -> Iterator[Any]:
    from tests.tf.small import data_creator, model_creator

    config = {"fit_config": {"epochs": 1}, "evaluate_config": {"steps": 1}}
    with got("", "TFTrainer")(model_creator, data_creator, config, **arguments) as trainer:
        yield trainer


def on_tf(use: Callable[[Any], Any]) -> Callable[[], Any]:
    def call() -> Any:
        with tf_trainer(num_replicas=1, num_cpus_per_worker=1, use_gpu=False, verbose=False) as trainer:
            return use(trainer)

    return call


def saved_and_restored(trainer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer.restore(trainer.save(f"{folder}/checkpoint"))


def trainable() -> Any:
    operator = got("torch", "TrainingOperator")
    made = got("torch", "TorchTrainer").as_trainable(training_operator_cls=operator, num_workers=2, use_gpu=False)
    assert issubclass(made, got("torch", "BaseTorchTrainable"))
    return made.default_resource_request({})


def lightning_operator() -> Any:
    from tests.lightning.modules import Net

    with torch_trainer(operator=got("torch", "TrainingOperator").from_ptl(Net)) as trainer:
        return trainer.train()["train_loss"]


def creators() -> Any:
    import torch

    operator = got("torch", "TrainingOperator").from_creators(
        lambda config: torch.nn.Linear(1, 1), lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert issubclass(operator, got("torch", "CreatorOperator"))
    with torch_trainer(operator=operator) as trainer:
        return trainer.get_model()


def scheduler(optimizer: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def of(module: str, owner: str, make: Callable[[], Any], expected: dict[str, Any], **more: Any) -> list[Row]:
    """Return a row for each member of what `make` returns. A member has, or returns, the expected value; None stands for any."""

    def row(name: str, value: Any) -> Row:
        def use() -> None:
            found = getattr(make(), name)
            found = found() if value is not None and callable(found) else found
            assert value is None or found == value, f"{name} is {found!r}"

        return Row(module, f"{owner}.{name}", use, **more)

    return [row(*item) for item in expected.items()]


def meter(name: str) -> Any:
    made = got("utils", name)()
    for value, n in ((2.0, 3), (5.0, 1)):
        made.update({"a": value} if "Collection" in name else value, n=n)
    return made


def complete_operator() -> Any:
    import torch

    return got("torch", "TrainingOperator").from_creators(
        lambda config: torch.nn.Linear(1, 1),
        lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss_creator=torch.nn.MSELoss,
        scheduler_creator=lambda optimizer, config: scheduler(optimizer),
    )


def created(name: str, kind: str) -> Callable[[], Any]:
    def use() -> None:
        with torch_trainer(operator=complete_operator(), scheduler_step_freq="manual") as trainer:
            found = getattr(trainer.get_local_operator(), name)
            one = found[0] if name.endswith("s") else found
            assert type(one).__name__ == kind, f"{name} is {found!r}"

    return use


def argument(module: str, owner: str, name: str, note: str = "", needs: str = "torch") -> Row:
    return Row(
        module, f"{owner}({name}=...)", lambda: signature(got(module, owner)).parameters[name], note, needs=needs
    )


def metrics_of(name: str) -> Callable[[], Any]:
    def call() -> None:
        meter = got("utils", name)()
        meter.update(*([{"a": 2.0}] if "Collection" in name else [2.0]), n=3)

    return call


def constants(module: str, names: str) -> list[Row]:
    return [Row(module, name, lambda name=name: got(module, name)) for name in names.split()]  # type: ignore[misc]


def accepted(name: str, value: Any, note: str = "", **more: Any) -> Row:
    return Row("torch", f"TorchTrainer({name}=...)", lambda: given(**{name: value}, **more), note)


def removed(name: str) -> Row:
    note = "removed before the last version of RaySGD, with the same hint"
    return Row("torch", f"TorchTrainer({name}=...)", lambda: given(**{name: 1}), note, DeprecationWarning)


def absent(module: str, name: str, note: str) -> Row:
    return Row(module, name, lambda: exec(f"from raysgd.{module} import {name}"), note, ImportError)


STEP = {"config": {"scheduler": scheduler}, "scheduler_step_freq": "manual"}
ARGUMENTS = [
    Row("torch", "TorchTrainer(training_operator_cls=...)", lambda: given()),
    accepted("initialization_hook", lambda: None, "runs with one worker too"),
    accepted("config", {"lr": 0.1}, "copied; yours is not changed"),
    accepted("num_workers", 1, "one runs in your process; `use_ray=True` for an actor"),
    accepted("num_cpus_per_worker", 1),
    accepted("use_gpu", False),
    accepted("backend", "gloo", "checked when the trainer is made"),
    accepted("wrap_ddp", True, "the default is `None`, with the same effect"),
    accepted("timeout_s", 100, "also with NCCL"),
    accepted("use_fp16", False, "the default is `None`, with the same effect"),
    accepted("use_tqdm", False),
    accepted("add_dist_sampler", True, "divides the data in the order of your own sampler"),
    accepted("scheduler_step_freq", "epoch"),
    accepted("serialize_data_creation", True),
    accepted("use_local", True, "no rank runs in the driver if there are several workers"),
    *map(removed, ["num_replicas", "batch_size", "model_creator", "data_creator", "optimizer_creator"]),
    *map(removed, ["scheduler_creator", "loss_creator", "data_loader_args", "apex_args"]),
]
TRAINER = [
    Row("torch", "TorchTrainer", lambda: given()),
    Row("torch", "TorchTrainer.train", called(lambda t: t.train(1, False, True, 3, {}, None)), "see Results, below"),
    Row("torch", "TorchTrainer.validate", called(lambda t: t.validate(1, False, True, {})), "each row once"),
    Row("torch", "TorchTrainer.apply_all_workers", called(lambda t: t.apply_all_workers(int))),
    Row("torch", "TorchTrainer.apply_all_operators", called(lambda t: t.apply_all_operators(id))),
    Row("torch", "TorchTrainer.update_scheduler", called(lambda t: t.update_scheduler(1), **STEP)),
    Row("torch", "TorchTrainer.get_model", called(lambda t: t.get_model(to_cpu=True)), "returns a copy, in eval mode"),
    Row("torch", "TorchTrainer.get_local_operator", called(lambda t: t.get_local_operator()), "always works"),
    Row("torch", "TorchTrainer.state_dict", called(lambda t: t.state_dict()), "has more entries"),
    Row(
        "torch",
        "TorchTrainer.load_state_dict",
        called(lambda t: t.load_state_dict(t.state_dict(), blocking=False)),
        "always waits, and refuses a state that does not fit",
    ),
    Row("torch", "TorchTrainer.save", called(saved_and_loaded)),
    Row("torch", "TorchTrainer.load", called(saved_and_loaded), "runs no code in the file unless `trusted=True`"),
    Row(
        "torch",
        "TorchTrainer.restore",
        called(lambda t: t.restore("x")),
        "as in RaySGD: use `load`",
        DeprecationWarning,
    ),
    Row("torch", "TorchTrainer.shutdown", called(lambda t: (t.shutdown(), t.shutdown(force=True))), "may be repeated"),
    *(
        Row("torch", f"TorchTrainer.{name}", called(lambda t, name=name: getattr(t, name)))
        for name in ("config", "use_gpu")
    ),
    Row("torch", "TorchTrainer.max_replicas", called(lambda t: 1 / t.max_replicas)),
    Row(
        "torch",
        "TorchTrainer.worker_group",
        called(lambda t: t.worker_group),
        "internal; `trainer.world_size` is the number of workers",
        AttributeError,
    ),
    Row("torch", "TorchTrainer.as_trainable", trainable, needs="pandas"),
]
PROPERTIES = "config world_rank local_rank use_gpu use_fp16 use_fp16_native use_fp16_apex use_tqdm device_ids "
PROPERTIES += "scheduler_step_freq timers global_step"
OPERATOR = [
    Row("torch", "TrainingOperator.setup", on_operator(lambda o: o.setup)),
    *(
        Row("torch", f"TrainingOperator.{name}", on_operator(lambda o, name=name: getattr(o, name)), note)
        for name, note in (
            ("register", ""),
            ("register_data", "keeps your loader's sampler and options"),
            ("train_epoch", "an override may have any of the documented signatures"),
            ("train_batch", ""),
            ("validate", ""),
            ("validate_batch", ""),
            ("state_dict", ""),
            ("load_state_dict", ""),
            ("device", "a device with one worker too, where RaySGD had `None`"),
            *((name, "") for name in PROPERTIES.split()),
        )
    ),
    Row("torch", "TrainingOperator.from_creators", creators),
    Row("torch", "CreatorOperator", creators),
    *(
        Row("torch", f"CreatorOperator.{name}", created(name, kind))
        for kind, names in {
            "Linear": "model models",
            "SGD": "optimizer optimizers",
            "StepLR": "scheduler schedulers",
            "MSELoss": "criterion",
        }.items()
        for name in names.split()
    ),
    Row(
        "torch",
        "TrainingOperator.from_ptl",
        lightning_operator,
        "for Lightning 2: hooks that it has removed are refused by name",
        needs="lightning",
    ),
    Row("torch", "BaseTorchTrainable", trainable, needs="pandas"),
    *of(
        "torch",
        "BaseTorchTrainable",
        lambda: got("torch", "BaseTorchTrainable"),
        dict.fromkeys(
            [
                "setup",
                "step",
                "save_checkpoint",
                "load_checkpoint",
                "cleanup",
                "default_resource_request",
                "trainer",
                "_create_trainer",
            ]
        ),
        needs="pandas",
    ),
    *constants(
        "torch.training_operator", "TrainingOperator CreatorOperator get_test_operator get_test_metrics_operator"
    ),
    *constants("torch.torch_trainer", "TorchTrainer"),
    Row(
        "torch.torch_trainer",
        "BaseTorchTrainable",
        lambda: got("torch.torch_trainer", "BaseTorchTrainable"),
        needs="pandas",
    ),
    *constants("torch.utils", "setup_address setup_process_group"),
    *constants("torch.resnet", "ResNet ResNet18 ResNet34 ResNet50 ResNet101 ResNet152"),
    absent("torch.torch_runner", "TorchRunner", "internal; a worker's process is not reached from outside"),
    absent("torch.distributed_torch_runner", "DistributedTorchRunner", "internal, likewise"),
    absent(
        "torch.worker_group",
        "RemoteWorkerGroup",
        "internal; `trainer.world_size`, `recoveries` and `resize` replace it",
    ),
    absent("torch.worker_group", "LocalWorkerGroup", "internal, likewise"),
    absent("torch.distributed_torch_runner", "LocalDistributedRunner", "internal, likewise"),
    absent("torch.worker_group", "DeactivatedWorkerGroup", "internal, likewise"),
    absent("torch.worker_group", "RESIZE_COOLDOWN_S", "there is no fixed pause between changes of the workers"),
    absent("torch.ptl_operator", "LightningOperator", "`TrainingOperator.from_ptl` returns the operator"),
    absent("torch.torch_dataset", "TorchIterableDataset", "Ray's `MLDataset` is gone; pass a Ray Dataset"),
    absent("torch.torch_dataset", "TorchMLDataset", "Ray's `MLDataset` is gone; pass a Ray Dataset"),
]
REST = [
    *constants("torch.constants", "USE_FP16 NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH"),
    *constants("torch.constants", "SCHEDULER_STEP_MANUAL VALID_SCHEDULER_STEP"),
    Row(
        "torch.constants",
        "NCCL_TIMEOUT_S",
        lambda: got("torch.constants", "NCCL_TIMEOUT_S"),
        "has no effect; `timeout_s` has",
    ),
    *constants("torch.constants", "SGD_PLACEMENT_GROUP_TIMEOUT_S"),
    *constants("utils", "BATCH_COUNT NUM_SAMPLES BATCH_SIZE"),
    Row("utils", "AverageMeter", metrics_of("AverageMeter")),
    Row("utils", "AverageMeterCollection", metrics_of("AverageMeterCollection")),
    *of("utils", "AverageMeter", lambda: meter("AverageMeter"), {"val": 5.0, "avg": 2.75, "sum": 11.0, "count": 4}),
    *of("utils", "AverageMeter", lambda: meter("AverageMeter"), {"update": None, "reset": None}),
    *of(
        "utils",
        "AverageMeterCollection",
        lambda: meter("AverageMeterCollection"),
        {"update": None, "summary": {"batch_count": 2, "num_samples": 4, "a": 2.75, "last_a": 5.0}},
    ),
    absent("utils", "TimerStat", "`with self.timers.record(name):` in an operator measures a block"),
    absent("utils", "TimerCollection", "likewise; an operator has one, `self.timers`"),
    Row("utils", "find_free_port", lambda: got("utils", "find_free_port")()),
    Row("utils", "check_for_failure", lambda: got("utils", "check_for_failure")([])),
    Row("utils", "override", lambda: got("utils", "override")(str)(str.upper)),
    *of(
        "data",
        "Dataset",
        lambda: got("data", "Dataset")([1, 2], batch_size=2, download_func=int, max_concurrency=1, transform=None),
        {"set_num_shards": None, "get_shard": None},
    ),
    Row("data", "Dataset", lambda: got("data", "Dataset")([1]), "applies its `transform`"),
    Row("tf", "TFTrainer", on_tf(lambda t: t.config), "one replica runs in your process", needs="tensorflow"),
    *(
        argument("tf", "TFTrainer", name, needs="tensorflow")
        for name in ["model_creator", "data_creator", "config", "num_cpus_per_worker", "use_gpu", "verbose"]
    ),
    argument("tf", "TFTrainer", "num_replicas", "or `num_workers`", needs="tensorflow"),
    *(
        Row(
            "tf",
            f'TFTrainer(config={{"{name}": ...}})',
            on_tf(lambda t: t.config),
            "[TensorFlow](tensorflow.md) lists the arguments; others are refused by name, except those that Keras ignores, too",
            needs="tensorflow",
        )
        for name in ("fit_config", "evaluate_config")
    ),
    Row("tf", "TFTrainer.train", on_tf(lambda t: t.train()), "has `epoch` and counts too", needs="tensorflow"),
    Row("tf", "TFTrainer.validate", on_tf(lambda t: t.validate()), "has counts too", needs="tensorflow"),
    Row("tf", "TFTrainer.get_model", on_tf(lambda t: t.get_model()), needs="tensorflow"),
    Row("tf", "TFTrainer.save", on_tf(saved_and_restored), needs="tensorflow"),
    Row(
        "tf",
        "TFTrainer.restore",
        on_tf(saved_and_restored),
        "has the optimizer's state too; RaySGD's own files are refused",
        needs="tensorflow",
    ),
    Row("tf", "TFTrainer.shutdown", on_tf(lambda t: t.shutdown()), "may be repeated", needs="tensorflow"),
    Row(
        "tf",
        "TFTrainable",
        lambda: got("tf", "TFTrainable").default_resource_request({}),
        "the trial's values reach the creators",
        needs="pandas",
    ),
    Row("tf.tf_trainer", "TFTrainer", lambda: got("tf.tf_trainer", "TFTrainer"), needs="tensorflow"),
    Row("tf.tf_trainer", "TFTrainable", lambda: got("tf.tf_trainer", "TFTrainable"), needs="tensorflow"),
    absent("tf.tf_runner", "TFRunner", "internal; a worker's process is not reached from outside"),
    absent("tf.tf_dataset", "TFMLDataset", "Ray's `MLDataset` is gone; pass a `tf.data.Dataset`"),
]
TOP = [
    *constants("", "TorchTrainer"),
    Row("", "TFTrainer", lambda: got("", "TFTrainer"), needs="tensorflow"),
    Row(
        "", "PyTorchTrainer", lambda: got("", "PyTorchTrainer"), "as in RaySGD: use `TorchTrainer`", DeprecationWarning
    ),
]
ROWS = [*TOP, *TRAINER, *ARGUMENTS, *OPERATOR, *REST]


def table() -> str:
    head = "| module | name | outcome | how it differs, or why it is refused |\n|---|---|---|---|\n"
    return head + "".join(f"{row}\n" for row in ROWS)


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "python -m tests.docs.test_raysgd_names prints it"


@pytest.fixture(scope="module")
def lightning() -> None:
    """Import it before a test does, because it sets an environment variable."""
    if importlib.util.find_spec("lightning"):
        importlib.import_module("lightning")


def problem(row: Row) -> str:
    """Return what differs from the table when the row is used."""
    if importlib.util.find_spec(row.needs) is None:
        return ""
    try:
        row.use()
    except Exception as error:
        return "" if row.raises and isinstance(error, row.raises) else f"{row.name}: {error!r}"
    return f"{row.name}: {row.raises.__name__} was not raised" if row.raises else ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:serialize_data_creation has no effect:DeprecationWarning")
@pytest.mark.parametrize("module", sorted({row.module for row in ROWS}))
def test_names_do_what_the_table_says(lightning: None, module: str) -> None:
    found = [each for row in ROWS if row.module == module and (each := problem(row))]
    assert not found, "\n".join(found)


if __name__ == "__main__":
    print(table(), end="")
