"""Every exception of user code on a worker reaches the script with its own type, rank and traceback. `sys.exit()` becomes
an error that says what to do. Nothing is retried, and the trainer stays usable."""

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from raysgd.torch import TorchTrainer
from raysgd.train import DataParallelTrainer, Result, RunConfig, ScalingConfig, Trainer, WorkerGroup
from tests.faults import until
from tests.peek import set_limits
from tests.torch.small import Line, Numbers, Recording, inline

pytestmark = pytest.mark.elastic


class Own(BaseException):
    """Is not an Exception, and cannot be made from its `args`."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what}, with {code}")
        self.code = code


class WithoutText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("its str")

    __repr__ = __str__


class RuntimeWithoutText(RuntimeError):
    """A RuntimeError, whose text raysgd searches for signs of a broken connection."""

    def __str__(self) -> str:
        raise ZeroDivisionError("its str")

    __repr__ = __str__


class WithoutPickle(Exception):
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt("its reduce")


class ToText(Exception):
    """Becomes an object that cannot be raised when it is unpickled."""

    def __reduce__(self) -> Any:
        return str, ("a text",)


class WithLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class WantsMore(Exception):
    def __new__(cls, one: int, two: int) -> "WantsMore":
        return super().__new__(cls, one, two)

    def __init__(self, one: int, two: int) -> None:
        super().__init__("wants more")


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


ERRORS: dict[str, tuple[Callable[[], BaseException], type[BaseException]]] = {
    "KeyboardInterrupt": (KeyboardInterrupt, KeyboardInterrupt),
    "GeneratorExit": (GeneratorExit, GeneratorExit),
    "CancelledError": (lambda: asyncio.CancelledError("later"), asyncio.CancelledError),
    "StopIteration": (StopIteration, StopIteration),
    "own BaseException": (lambda: Own("own", code=3), Own),
    "no str": (WithoutText, WithoutText),
    "RuntimeError without str": (RuntimeWithoutText, RuntimeWithoutText),
    "no pickle": (WithoutPickle, WithoutPickle),
    "pickles to a str": (ToText, ToText),
    "holds a lock": (WithLock, WithLock),
    "__new__ wants more": (lambda: WantsMore(1, 2), WantsMore),
    "frozen": (lambda: Frozen(7), Frozen),
    "SystemExit": (lambda: SystemExit(3), RuntimeError),
    "SystemExit without a code": (SystemExit, RuntimeError),
    "SystemExit with an object": (lambda: SystemExit(WithoutText()), RuntimeError),
}
ALL = pytest.mark.parametrize(("make", "kind"), ERRORS.values(), ids=ERRORS.keys())


class Raising(Line):
    """Raises an error where `info` says: (rank, place, what)."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("rank") == self.world_rank and batch_info["batch_idx"] == 1:
            raise batch_info["make"]()
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info.get("rank") == self.world_rank:
            raise batch_info["make"]()
        return super().validate_batch(batch, batch_info)


def check_remote(error: BaseException, kind: type[BaseException], rank: int, function: str) -> None:
    assert type(error) is kind
    assert error.raysgd_rank == rank  # type: ignore[attr-defined]
    cause = str(error.__cause__)
    assert f"on rank {rank} (process " in cause and f"in {function}" in cause and Path(__file__).name in cause


def check_exit(error: BaseException, called: str, where: str) -> None:
    text = str(error)
    assert called in text and "sys.exit(" in text and where in text and Path(__file__).name in text
    assert "does not retry" in text and "return from" in text, "it says what to do"


@pytest.fixture(scope="module")
def trainer(ray_cluster: None) -> Iterator[TorchTrainer]:
    config = {"batch": 2, "rows": 400}
    with TorchTrainer(training_operator_cls=Raising, num_workers=2, config=config) as trainer:
        yield trainer
        assert trainer.recoveries == [], "a user's error is never retried"


@ALL
def test_unusual_errors_in_a_batch(trainer: TorchTrainer, make: Any, kind: type[BaseException]) -> None:
    with pytest.raises(kind) as caught:
        trainer.train(info={"rank": 1, "make": make})
    check_remote(caught.value, kind, 1, "train_batch")
    if kind is RuntimeError:
        check_exit(caught.value, "the operator's method Raising.train_batch", "on rank 1")
    assert trainer.train(num_steps=1)["batch_count"] == 1


def test_unusual_errors_in_a_validation_and_in_functions_for_operators(trainer: TorchTrainer) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.validate(info={"rank": 0, "make": KeyboardInterrupt})
    check_remote(caught.value, KeyboardInterrupt, 0, "validate_batch")

    def leave(operator: Any) -> None:
        if operator.world_rank == 1:
            sys.exit("enough")

    with pytest.raises(RuntimeError) as exited:
        trainer.apply_all_operators(leave)
    check_remote(exited.value, RuntimeError, 1, "leave")
    check_exit(exited.value, "the function leave called sys.exit('enough')", "on rank 1")
    assert trainer.validate()["num_samples"] == 400


def test_ctrl_c_has_no_rank(trainer: TorchTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, ctrl_c_s=60.0)  # on a busy machine, workers that answer later would be killed
    begun, pressed = tmp_path / "begun", tmp_path / "pressed"

    def work(operator: Any) -> None:
        begun.touch()
        for _ in until(pressed.exists):
            time.sleep(0.05)

    def press() -> None:
        for _ in until(begun.exists):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        pressed.touch()

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.apply_all_operators(work)
    assert not hasattr(caught.value, "raysgd_rank")
    assert trainer.train(num_steps=1)["batch_count"] == 1


@ALL
def test_unusual_errors_in_the_drivers_process(make: Any, kind: type[BaseException]) -> None:
    trainer = inline(Raising)
    with pytest.raises(kind) as caught:
        trainer.train(info={"rank": 0, "make": make})
    assert type(caught.value) is kind
    places = [entry.path.name for entry in caught.traceback]
    assert Path(__file__).name in places and caught.traceback[-1].name == "train_batch", "a debugger stops there"
    if kind is RuntimeError:
        check_exit(caught.value, "the operator's method Raising.train_batch", "on rank 0")
        assert isinstance(caught.value.__cause__, SystemExit)
    if kind is not KeyboardInterrupt:  # in this process, it can also come from Ctrl-C
        assert caught.value.raysgd_rank == 0  # type: ignore[attr-defined]
    assert trainer.train(num_steps=1)["batch_count"] == 1


# -- in data sets -------------------------------------------------------------------------------------


class Failing(Numbers):
    """Loading one item raises an error, once."""

    def __init__(self, mark: Path, make: Callable[[], BaseException]) -> None:
        super().__init__(24)
        self.mark, self.make = mark, make

    def __getitem__(self, index: int) -> int:
        if index == 17 and not self.mark.exists():
            self.mark.touch()
            raise self.make()
        return super().__getitem__(index)


def failing(mark: Path, make: Callable[[], BaseException], processes: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Failing(mark, make), batch_size=2, num_workers=processes, **options)


ALONE = [
    (StopIteration, RuntimeError, "raised StopIteration, as next"),
    (lambda: SystemExit(3), RuntimeError, r"Failing.__getitem__ called sys.exit\(3\) on rank 0"),
    (WithoutText, WithoutText, ""),
]
IN_PROCESSES = [
    (StopIteration, RuntimeError, "raised StopIteration, as next"),
    (lambda: SystemExit(3), RuntimeError, r"loader process \d+ ended with exit code 3\. Code that it ran"),
    (SystemExit, RuntimeError, r"loader process \d+ ended with exit code 0\. Code that it ran"),
    (KeyboardInterrupt, RuntimeError, r"loader process \d+ ended with exit code 0\. Code that it ran"),
    (lambda: Own("own", code=3), RuntimeError, r"loader process \d+ ended with exit code 1\. Code that it ran"),
    (WithoutText, WithoutText, ""),
]


@pytest.mark.parametrize(
    ("processes", "make", "kind", "says"), [*((0, *case) for case in ALONE), *((2, *case) for case in IN_PROCESSES)]
)
def test_unusual_errors_in_a_data_set(processes: int, make: Any, kind: Any, says: str, tmp_path: Path) -> None:
    loader = failing(tmp_path / "mark", make, processes, persistent_workers=processes > 0)
    with inline(Recording, config={"loader": lambda: loader}) as trainer:
        with pytest.raises(kind) as caught:
            trainer.train()
        assert type(caught.value) is kind and (not says or re.search(says, str(caught.value)))
        assert trainer.train()["epoch"] == 1, "the next call trains the rest of the epoch"
        (seen,) = trainer.apply_all_operators(
            lambda operator: sorted(item for batch in operator.seen for item in batch)
        )
        assert seen == list(range(24)) and trainer.recoveries == []


# -- while workers start ------------------------------------------------------------------------------


class RaisingInSetup(Line):
    def setup(self, config: dict[str, Any]) -> None:
        raise config["make"]()


def leave_at_once() -> None:
    sys.exit(4)


@pytest.mark.parametrize("use_ray", [False, True], ids=["in this process", "on a worker"])
def test_unusual_errors_in_setup(ray_cluster: None, use_ray: bool) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        inline(RaisingInSetup, config={"make": KeyboardInterrupt}, use_ray=use_ray)
    if use_ray:
        check_remote(caught.value, KeyboardInterrupt, 0, "setup")
    with pytest.raises(RuntimeError) as exited:
        inline(RaisingInSetup, config={"make": SystemExit}, use_ray=use_ray)
    check_exit(exited.value, "the set-up RaisingInSetup.setup called sys.exit()", "on rank 0")


@pytest.mark.parametrize("use_ray", [False, True], ids=["in this process", "on a worker"])
def test_unusual_errors_in_the_initialization_hook(ray_cluster: None, use_ray: bool) -> None:
    with pytest.raises(RuntimeError) as exited:
        inline(initialization_hook=leave_at_once, use_ray=use_ray)
    check_exit(exited.value, "the initialization hook leave_at_once called sys.exit(4)", "on rank 0")


# -- in functions -------------------------------------------------------------------------------------


def raising(config: dict[str, Any]) -> str:
    if "make" in config:
        raise config["make"]()
    return "done"


@pytest.fixture(scope="module")
def functions(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer("torch", num_workers=1, logdir=tmp_path_factory.mktemp("functions")) as functions:
        yield functions
        assert functions.recoveries == []


@pytest.mark.parametrize("name", ["StopIteration", "own BaseException", "no pickle", "SystemExit"])
def test_unusual_errors_in_a_training_function(functions: Trainer, name: str) -> None:
    make, kind = ERRORS[name]
    expected = RuntimeError if kind is StopIteration else kind  # as Python does for iterators
    with pytest.raises(expected) as caught:
        functions.run(raising, {"make": make})
    error = caught.value.__cause__ if kind is StopIteration else caught.value
    assert error is not None
    check_remote(error, kind, 0, "raising")
    if kind is RuntimeError:
        check_exit(error, "the training function raising", "on rank 0")
    assert functions.run(raising, {}) == ["done"]


def test_unusual_errors_in_functions_on_a_worker_group(ray_cluster: None) -> None:
    group = WorkerGroup(num_workers=1)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            group.execute(raising, {"make": KeyboardInterrupt})
        check_remote(caught.value, KeyboardInterrupt, 0, "raising")
        assert group.execute(raising, {}) == ["done"], "the process is still there"
    finally:
        group.shutdown()


@pytest.mark.more
def test_a_failed_fit_is_recorded(ray_cluster: None, tmp_path: Path) -> None:
    config = RunConfig(name="run", storage_path=str(tmp_path))
    fit = DataParallelTrainer(
        raising, train_loop_config={"make": WithoutText}, scaling_config=ScalingConfig(num_workers=1), run_config=config
    )
    with pytest.raises(WithoutText):
        fit.fit()
    assert "WithoutText" in str(Result.from_path(tmp_path / "run").error)
