"""Trainers that cannot start raise a clear error soon, and leave nothing behind."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from raysgd import ResourceError, WorkerStartError
from raysgd.torch import TorchTrainer
from tests.torch.on_workers.operators import Classes, OwnError
from tests.workers.test_resource_release import free_cpus


@pytest.fixture(autouse=True)
def nothing_left_behind(ray_cluster: None) -> Iterator[None]:
    """Check that the workers of a trainer that failed to start end soon."""
    import ray

    yield
    deadline = time.monotonic() + 60
    while free_cpus() < ray.cluster_resources()["CPU"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free_cpus() == ray.cluster_resources()["CPU"]


def two(operator: Any = Classes, **arguments: Any) -> TorchTrainer:
    return TorchTrainer(training_operator_cls=operator, num_workers=2, use_gpu=False, **arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_workers": 2, "num_cpus_per_worker": 5}, ["of 2 workers", " CPU (", "1 such worker"]),
        ({"num_workers": 1, "resources_per_worker": {"unobtainium": 1}}, ["unobtainium", "0 such worker"]),
    ],
)
def test_more_workers_than_the_cluster_can_ever_have(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], says: list[str]
) -> None:
    monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "1")
    started = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        TorchTrainer(training_operator_cls=Classes, use_gpu=False, **arguments)
    assert time.monotonic() - started < 20
    text = str(caught.value)
    for part in [*says, "within 1 s", "num_cpus_per_worker, resources_per_worker"]:
        assert part in text, text
    assert isinstance(caught.value, TimeoutError)


def raised(kind: type[BaseException], make: Callable[[], TorchTrainer]) -> BaseException:
    with pytest.raises(kind) as caught:
        make()
    return caught.value


class OneWaits(Classes):
    """Rank 1 raises while rank 0 waits for it."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.world_rank == 1:
            raise OwnError("setup", code=1)
        torch.distributed.all_reduce(torch.ones(1))


def test_an_error_in_setup_on_one_rank_ends_a_peer_that_waits_in_setup() -> None:
    started = time.monotonic()
    error = raised(OwnError, lambda: two(OneWaits))
    assert str(error) == "setup failed with 1"
    assert "on rank 1 (process " in str(error.__cause__) and "in setup" in str(error.__cause__)
    assert time.monotonic() - started < 100, "it does not wait for the limit of the set-up or of a collective"


def test_an_error_in_the_hook_on_one_worker(tmp_path: Any) -> None:
    def hook() -> None:
        try:
            os.mkdir(tmp_path / "first")
        except FileExistsError:
            raise OwnError("hook", code=2) from None

    error = raised(OwnError, lambda: two(initialization_hook=hook))
    assert str(error) == "hook failed with 2"
    assert "in hook" in str(error.__cause__)


def test_a_config_that_cannot_be_pickled_leaves_no_thread_and_no_port() -> None:
    before = [thread for thread in threading.enumerate() if thread.name == "raysgd-control"]
    error = raised(TypeError, lambda: two(config={"lock": threading.Lock()}))
    assert "cannot be sent to the workers" in str(error)
    assert "inside `setup`" in str(error)
    assert [thread for thread in threading.enumerate() if thread.name == "raysgd-control"] == before


def test_an_operator_that_ends_its_process_in_setup() -> None:
    class Dies(Classes):
        def setup(self, config: dict[str, Any]) -> None:
            os._exit(7)

    error = raised(WorkerStartError, lambda: two(Dies))
    assert "during start-up" in str(error)
