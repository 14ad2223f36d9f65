"""The resources of workers are free when the call that ends them returns. Environment variables are checked."""

import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from raysgd import ConfigError, ElasticConfig, TorchTrainer
from raysgd.data import RayData
from raysgd.train import Trainer, WorkerGroup
from tests.peek import set_limits
from tests.tiers import NIGHTLY
from tests.torch.small import Line

ROUNDS = 10 if NIGHTLY else 1

pytestmark = pytest.mark.usefixtures("ray_cluster")


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0))


def small(workers: int = 2, **arguments: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=Line, num_workers=workers, use_gpu=False, **arguments)


def idle() -> float:
    """Return the number of CPUs when everything that earlier tests started has ended."""
    import ray

    every, until = float(ray.cluster_resources()["CPU"]), time.monotonic() + 90  # a test's tasks sleep for 60 s
    while free_cpus() < every and time.monotonic() < until:
        time.sleep(0.1)
    assert free_cpus() == every
    return every


@pytest.mark.parametrize("force", [False, pytest.param(True, marks=pytest.mark.more)])
def test_after_shrinking_and_after_shutdown_the_cpus_are_free(force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, freed_times=15)  # on a busy machine, Ray may need more than two seconds
    every = idle()
    for _ in range(ROUNDS):
        trainer = small(3)
        trainer.resize(2)
        assert free_cpus() == every - 2
        trainer.shutdown(force=force)
        assert free_cpus() == every


def test_after_a_function_trainers_shutdown_the_cpus_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, freed_times=15)
    every = idle()
    trainer = Trainer(backend="none", num_workers=3)
    trainer.start()
    trainer.shutdown()
    assert free_cpus() == every
    group = WorkerGroup(num_workers=2)
    group.shutdown(patience_s=0)
    assert free_cpus() == every


@pytest.mark.more
def test_a_shutdown_does_not_wait_for_cpus_that_other_tasks_take(tmp_path: Path) -> None:
    """Tasks that wait for these CPUs get them before they are ever reported as free."""
    import ray

    every = int(idle())
    trainer = small(2, elastic=ElasticConfig(grow=False))

    @ray.remote(num_cpus=1)
    def sleep() -> None:
        time.sleep(60)

    tasks = [sleep.remote() for _ in range(every + 2)]
    try:
        time.sleep(1)
        began = time.monotonic()
        trainer.shutdown()
        assert time.monotonic() - began < 30
    finally:
        for task in tasks:
            ray.cancel(task, force=True)
        idle()


# -- secrets ------------------------------------------------------------------------------------------


def test_no_token_is_in_a_name_an_environment_a_command_line_or_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others in the cluster can list the names of actors, and others on the machine can read command lines. The first
    eight digits count as well."""
    import ray

    made: list[str] = []

    def recording(plain: Callable[[int], Any]) -> Callable[[int], Any]:
        def make(count: int = 32) -> Any:
            token = plain(count)
            made.append(token if isinstance(token, str) else token.hex())
            return token

        return make

    monkeypatch.setattr(secrets, "token_hex", recording(secrets.token_hex))
    monkeypatch.setattr(secrets, "token_bytes", recording(secrets.token_bytes))
    caplog.set_level(logging.DEBUG)
    rows = ray.data.from_items([{"x": [i / 10, 1.0], "y": [i / 10 + 1]} for i in range(12)])
    with small() as trainer:
        trainer.train(dataset=RayData(rows, batch_size=4, features=["x"], target="y"))
        workers = trainer.apply_all_workers(os.getpid)
        trainer.save(tmp_path / "saved.pt")
        os.kill(workers[1], signal.SIGKILL)
        trainer.train()
        trainer.resize(2)
        names = [str(actor) for actor in ray.util.list_named_actors(all_namespaces=True)]
        processes = [psutil.Process(pid) for pid in trainer.apply_all_workers(os.getpid)]
        shown = [text for process in processes for text in (*process.cmdline(), *process.environ().values())]
        inside = trainer.apply_all_workers(lambda: list(os.environ.values()))
    assert made, "no token was made: this test sees nothing"
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    written = [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    everything = "\n".join([*names, *shown, *[value for each in inside for value in each], *written, caplog.text])
    # A longer hexadecimal number may have the same eight digits by chance.
    assert [token for token in made if re.search(f"(?<![0-9a-f]{{4}}){token[:8]}", everything)] == []


# -- the environment ----------------------------------------------------------------------------------


def function_trainer() -> Any:
    return Trainer(backend="none", num_workers=1).start()


@pytest.mark.parametrize("make", [small, function_trainer, WorkerGroup])
def test_an_invalid_limit_is_named(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    for text in ("abc", "0", "nan", "1e3", "١٢", "9" * 400):
        monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", text)
        with pytest.raises(ConfigError, match=r"SGD_PLACEMENT_GROUP_TIMEOUT_S is .* above 0.*unset it for .* 100"):
            make()


def test_an_invalid_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
    monkeypatch.setenv(name, "maybe")
    with Trainer(backend="none", num_workers=1) as trainer:
        with pytest.raises(ConfigError, match=f"{name} is 'maybe'; it must be 0 or 1"):
            trainer.run(lambda: None)
        for text in ("", "0", "1", "true"):
            monkeypatch.setenv(name, text)
            assert trainer.run(lambda: 7) == [7]


def test_an_invalid_ray_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for text in ("abc", "host:port", ":6379", "127.0.0.1:99999", "ray://127.0.0.1:1"):
        monkeypatch.setenv("RAY_ADDRESS", text)
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS is '.*'.*(ray job submit|HOST:PORT)"):
            small()
