"""The executor and the worker group, as code that builds on them uses them."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raysgd import train
from raysgd.train import (
    Backend,
    BackendConfig,
    BackendExecutor,
    InactiveWorkerGroupError,
    SGDBackendError,
    TorchConfig,
    TrainingWorkerError,
    WorkerGroup,
)
from raysgd.train.session import TrainingResultType


@pytest.fixture
def starting(ray_cluster: None) -> Iterator[Callable[..., BackendExecutor]]:
    """A function that starts executors. They are shut down at the end of the test."""
    started: list[BackendExecutor] = []

    def start(config: BackendConfig | None = None, **arguments: Any) -> BackendExecutor:
        made = BackendExecutor(config or BackendConfig(), num_workers=2, **arguments)
        started.append(made)
        made.start()
        return made

    yield start
    for made in started:
        made.shutdown()


Start = Callable[..., BackendExecutor]


@pytest.fixture(scope="module")
def executor(ray_cluster: None) -> Iterator[BackendExecutor]:
    made = BackendExecutor(BackendConfig(), num_workers=2)
    made.start()
    yield made
    made.shutdown()


def test_a_run_needs_workers_and_results_need_a_run(ray_cluster: None, tmp_path: Path) -> None:
    made = BackendExecutor(BackendConfig(), num_workers=2)
    assert not made.is_started
    with pytest.raises(InactiveWorkerGroupError):
        made.start_training(lambda: 1, tmp_path)
    made.start()
    assert made.is_started
    assert len(made.worker_group) == 2
    for call in (made.fetch_next_result, made.finish_training):
        with pytest.raises(SGDBackendError, match="before start_training"):
            call()
    with pytest.raises(SGDBackendError, match="started already"):
        made.start()
    made.shutdown()
    with pytest.raises(InactiveWorkerGroupError):
        made.start_training(lambda: 1, tmp_path)


def test_one_run_at_a_time(executor: BackendExecutor, tmp_path: Path) -> None:
    def function() -> int:
        while not (tmp_path / "refused").exists():
            time.sleep(0.01)
        return 4

    executor.start_training(function, tmp_path)
    with pytest.raises(SGDBackendError, match="is running"):
        executor.start_training(lambda: 5, tmp_path)
    with pytest.raises(SGDBackendError, match="is running"):
        executor.worker_group.execute(os.getpid)
    (tmp_path / "refused").touch()
    assert executor.finish_training() == [4, 4]


def test_checkpoint_numbers(executor: BackendExecutor, tmp_path: Path) -> None:
    def function() -> None:
        for epoch in range(2):
            train.save_checkpoint(epoch=epoch)

    executor.start_training(function, tmp_path, latest_checkpoint_id=100)
    executor.finish_training()
    assert executor.latest_checkpoint is not None
    assert executor.latest_checkpoint["epoch"] == 1
    assert executor.latest_checkpoint_id == 102
    assert executor.latest_checkpoint_dir == tmp_path / "checkpoints"
    assert executor.latest_checkpoint_path == tmp_path / "checkpoints" / "checkpoint_000102"
    assert executor.latest_checkpoint_path.exists()


def test_shutting_down_ends_a_run(starting: Start, tmp_path: Path) -> None:
    made = starting()
    made.start_training(lambda: time.sleep(60), tmp_path)
    began = time.monotonic()
    made.shutdown()
    assert time.monotonic() - began < 45


# -- torch --------------------------------------------------------------------------------------------


def process_group() -> tuple[bool, int]:
    import torch.distributed as dist

    return dist.is_initialized(), dist.get_world_size() if dist.is_initialized() else 0


def sum_over_ranks() -> tuple[float, str | None]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(train.world_rank() + 1)])
    dist.all_reduce(total)
    return total.item(), os.environ.get("MASTER_PORT")


@pytest.mark.parametrize("init_method", ["env", pytest.param("tcp", marks=pytest.mark.more)])
def test_the_torch_backend(starting: Start, init_method: Any, tmp_path: Path) -> None:
    config = TorchConfig(backend="gloo", init_method=init_method)
    made = starting(config)
    assert made.worker_group.execute(process_group) == [(True, 2), (True, 2)]
    made.start_training(sum_over_ranks, tmp_path)
    sums = made.finish_training()
    assert [total for total, _ in sums] == [3.0, 3.0]
    assert [port is not None for _, port in sums] == [init_method == "env"] * 2
    config.backend_cls().on_shutdown(made.worker_group, config)
    assert made.worker_group.execute(process_group) == [(False, 0), (False, 0)]
    made.shutdown()


# -- custom backends ----------------------------------------------------------------------------------


class Greeting(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(set_variable, "GREETING", backend_config.text)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(set_variable, "TRAININGS", str(len(worker_group)))

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        Path(backend_config.note).write_text(str(worker_group.execute(get_variable, "GREETING")))

    @staticmethod
    def decode_data(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "decoded": True}


def get_variable(name: str) -> str | None:
    return os.environ.get(name)


def set_variable(name: str, value: str) -> None:
    os.environ[name] = value


@dataclass
class GreetingConfig(BackendConfig):
    note: str
    text: str = "hello"

    def backend_cls(self) -> type[Backend]:  # type: ignore[override]
        return Greeting


def test_on_start_is_called_when_the_executor_starts_again(starting: Start, tmp_path: Path) -> None:
    made = starting(GreetingConfig(str(tmp_path / "note")))
    made.shutdown()
    made.start()
    greetings = made.worker_group.execute(get_variable, "GREETING")
    assert greetings == ["hello", "hello"]


def test_hooks_of_a_custom_backend_are_called_again_after_a_worker_failure(starting: Start, tmp_path: Path) -> None:
    def function() -> Any:
        if train.world_size() == 2:
            if train.world_rank() == 0:
                os._exit(1)
            time.sleep(60)
        train.report(a=1)
        return train.world_rank(), os.environ["GREETING"], os.environ["TRAININGS"]

    made = starting(GreetingConfig(str(tmp_path / "note"), "good day"))
    assert made.worker_group.execute(get_variable, "GREETING") == ["good day", "good day"]
    made.worker_group.execute(set_variable, "GREETING", "overwritten")
    made.start_training(function, tmp_path)
    rows = made.fetch_next_result()
    assert rows is not None and rows[0]["decoded"]
    assert made.finish_training() == [(0, "good day", "1")]
    made.shutdown()
    assert (tmp_path / "note").read_text() == "['good day']"


DECODED: list[tuple[int, dict[str, Any]]] = []  # process, data


class HexBackend(Backend):
    """Sends numbers as text. Decoding notes in which process it runs."""

    @staticmethod
    def encode_data(data: dict[str, Any]) -> dict[str, Any]:
        return {name: float.hex(value) if isinstance(value, float) else value for name, value in data.items()}

    @staticmethod
    def decode_data(data: dict[str, Any]) -> dict[str, Any]:
        DECODED.append((os.getpid(), data))
        return {name: float.fromhex(value) if isinstance(value, str) else value for name, value in data.items()}


class HexConfig(BackendConfig):
    backend_cls = HexBackend  # type: ignore[assignment]


def test_the_driver_decodes_what_a_worker_has_encoded(starting: Start, tmp_path: Path) -> None:
    """Reports and checkpoints: callbacks, files and later functions see what the function gave."""

    def function() -> Any:
        found = train.load_checkpoint()
        train.save_checkpoint(weight=0.1 + train.world_rank())
        own = train.load_checkpoint()
        train.report(loss=0.25, rank=train.world_rank())
        assert own is not None
        return found and found["weight"], own["weight"]

    made = starting(HexConfig())
    DECODED.clear()
    made.start_training(function, tmp_path, {"weight": 7.5})
    rows = made.fetch_next_result()
    assert rows is not None
    assert [(row["loss"], row["rank"]) for row in rows] == [(0.25, 0), (0.25, 1)]
    assert made.finish_training() == [(7.5, 0.1), (7.5, 1.1)]
    assert made.latest_checkpoint is not None and made.latest_checkpoint["weight"] == 0.1
    assert made.best_checkpoint_path is not None
    assert train.Checkpoint(made.best_checkpoint_path).to_dict()["weight"] == 0.1
    sent = [{name: each[name] for name in each if not name.startswith("_")} for _, each in DECODED]
    assert {pid for pid, _ in DECODED} == {os.getpid()}
    assert sorted(map(str, sent)) == sorted(
        [str({"weight": float.hex(0.1)}), *(str({"loss": float.hex(0.25), "rank": rank}) for rank in (0, 1))]
    ), "each report and rank 0's checkpoint are decoded once, and nothing else"


# -- the worker group ---------------------------------------------------------------------------------


def test_a_worker_group_without_a_trainer(ray_cluster: None) -> None:
    group = WorkerGroup(num_workers=2)
    assert len(group) == 2
    with pytest.raises(RuntimeError, match="started already"):
        group.start()
    pids = group.execute(os.getpid)
    assert len(set(pids)) == 2 and os.getpid() not in pids
    assert group.execute(divmod, 7, 2) == [(3, 1)] * 2
    assert group.execute(sorted, [1, 2], reverse=True) == [[2, 1]] * 2
    assert group.execute_single(1, os.getpid) == pids[1]
    with pytest.raises(ZeroDivisionError):
        group.execute(divmod, 1, 0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        group.execute_single(2, os.getpid)
    with pytest.raises(TrainingWorkerError):
        group.execute(os._exit, 1)
    group.shutdown(patience_s=0)
    with pytest.raises(RuntimeError, match="not active"):
        group.execute(os.getpid)


def test_the_executor_has_the_names_of_early_versions(executor: BackendExecutor) -> None:
    def function() -> int:
        train.report(step=1)
        train.save_checkpoint(step=1)
        return train.world_rank()

    assert executor.run(function) == [0, 1]
    assert (executor.get_latest_checkpoint() or {})["step"] == 1
    assert executor.latest_checkpoint_path is None, "without a run_dir, nothing is stored"
    executor.start_training(function)
    results = executor.get_next_results()
    assert results is not None
    assert [(result.type, result.data["step"]) for result in results] == [(TrainingResultType.REPORT, 1)] * 2
    assert executor.get_next_results() is None
    assert executor.finish_training() == [0, 1]


@pytest.mark.parametrize("wrong", [{"num_workers": 0}, {"num_cpus_per_worker": -1}, {"num_gpus_per_worker": -1}])
def test_arguments_of_a_worker_group_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        WorkerGroup(**wrong)
