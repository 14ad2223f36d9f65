"""Only one thread at a time can use a trainer. A second one gets an error at once, and the running call is not affected."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raysgd import NotActiveError, TrainerBusyError
from raysgd.callbacks import Callback
from raysgd.torch import TorchTrainer
from raysgd.train import Trainer, report
from tests.faults import until
from tests.peek import set_limits
from tests.torch.small import Line, inline

BATCHES = 40


def hold(folder: Path) -> None:
    """Say that the call has begun, and wait until the test lets it end."""
    (folder / "begun").touch()
    wait_for(folder / "free")


def wait_for(path: Path) -> None:
    for _ in until(path.exists):
        time.sleep(0.01)


@pytest.fixture
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held")


class Slow(Line):
    """Its batches are held, if `info` says so."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if "held" in batch_info:
            hold(batch_info["held"])
        time.sleep(self.config.get("pace", 0.0))
        return super().train_batch(batch, batch_info)


@pytest.fixture(scope="module")
def remote(ray_cluster: None) -> Iterator[TorchTrainer]:
    config = {"rows": 2 * BATCHES, "batch": 1}
    with TorchTrainer(training_operator_cls=Slow, num_workers=2, config=config) as trainer:
        yield trainer


@pytest.fixture(params=["inline", "remote"])
def trainer(request: pytest.FixtureRequest) -> TorchTrainer:
    if request.param == "inline":
        return inline(Slow, config={"rows": 2 * BATCHES, "batch": 2})
    found: TorchTrainer = request.getfixturevalue("remote")
    return found


def elsewhere(held: Path, call: Callable[[], Any]) -> Future[Any]:
    """Run the call in a thread. It has begun when this returns."""
    future = ThreadPoolExecutor(1, thread_name_prefix="the other").submit(call)
    wait_for(held / "begun")
    return future


def second_calls(trainer: TorchTrainer, path: Path) -> dict[str, Callable[[], Any]]:
    return {
        "train()": trainer.train,
        "validate()": trainer.validate,
        "save()": lambda: trainer.save(path / "x.pt"),
        "load()": lambda: trainer.load(path / "y.pt"),
        "state_dict()": trainer.state_dict,
        "load_state_dict()": lambda: trainer.load_state_dict({}),
        "get_model()": trainer.get_model,
        "get_local_operator()": trainer.get_local_operator,
        "apply_all_workers()": lambda: trainer.apply_all_workers(time.time),
        "apply_all_operators()": lambda: trainer.apply_all_operators(lambda operator: None),
        "update_scheduler()": lambda: trainer.update_scheduler(1.0),
        "resize()": lambda: trainer.resize(1),
    }


def test_a_second_thread_gets_an_error_at_once(trainer: TorchTrainer, held: Path, tmp_path: Path) -> None:
    running = elsewhere(held, lambda: trainer.train(info={"held": held}))
    for name, call in second_calls(trainer, tmp_path).items():
        with pytest.raises(TrainerBusyError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"{name} was called in thread 'MainThread'"), text
        assert "train() has been running for" in text and "'the other_0'" in text and "wait until" in text
    # Reading properties is always allowed.
    assert (trainer.world_size, trainer.recoveries) == (trainer.max_replicas, [])
    assert "training" in repr(trainer) and len(trainer.history) >= 0
    (held / "free").touch()
    assert running.result(timeout=60)["num_samples"] == 2 * BATCHES, "the first call is complete"
    assert trainer.train()["num_samples"] == 2 * BATCHES, "and the trainer is free again"
    assert not list(tmp_path.iterdir())


def test_many_threads_at_once_never_share_an_epoch(remote: TorchTrainer) -> None:
    def call() -> Any:
        gate.wait()
        try:
            return remote.train()["num_samples"]
        except TrainerBusyError:
            return None

    gate = threading.Barrier(6)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: call(), range(6)))
    assert {each for each in found if each is not None} == {2 * BATCHES}


class Nested(Callback):
    stops_training = True
    trainer: Any = None
    states: list[Any]

    def on_result(self, result: Any) -> None:
        if self.trainer is not None:
            self.states.append(self.trainer.state_dict()["epoch"])


def test_callbacks_may_use_their_trainer() -> None:
    callback = Nested()
    callback.states = []
    trainer = inline(Slow, callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    trainer.train()
    assert callback.states == [1, 2]


@pytest.mark.parametrize(
    ("use_ray", "stuck"),
    [
        pytest.param(False, False, id="inline, between batches"),
        pytest.param(False, True, id="inline, in a long batch"),
        pytest.param(True, False, id="remote, between batches", marks=pytest.mark.more),
        pytest.param(True, True, id="remote, in a long batch"),
    ],
)
def test_another_thread_may_shut_it_down(
    ray_cluster: None, held: Path, use_ray: bool, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, release_s=0.5 if stuck else 30.0)
    trainer = inline(Slow, config={"rows": 4000, "batch": 2, "pace": 0.05}, use_ray=use_ray)
    running = elsewhere(held, lambda: trainer.train(info={"held": held}))
    if not stuck:
        (held / "free").touch()
    began = time.monotonic()
    trainer.shutdown()
    assert time.monotonic() - began < 30
    (held / "free").touch()
    with pytest.raises(NotActiveError, match=r"shut down in thread 'MainThread' while train\(\) has been running"):
        running.result(timeout=30)
    with pytest.raises(NotActiveError):
        trainer.train()


# -- functions ----------------------------------------------------------------------------------------


def slow_function(config: dict[str, Any]) -> int:
    for number in range(config["rounds"]):
        report(number=number)
        if "held" in config:
            hold(config["held"])
    return int(config["rounds"])


def test_training_functions_and_functions_on_their_workers(ray_cluster: None, held: Path, tmp_path: Path) -> None:
    with Trainer("torch", num_workers=1, logdir=tmp_path) as trainer:
        running = elsewhere(held, lambda: trainer.run(slow_function, {"rounds": 30, "held": held}))
        others: list[Callable[[], Any]] = [
            lambda: trainer.run(slow_function, {"rounds": 1}),
            lambda: trainer.run_iterator(slow_function, {"rounds": 1}),
            lambda: trainer.worker_group.execute(time.time),
        ]
        for call in others:
            with pytest.raises(
                TrainerBusyError, match=r"function 'slow_function' has been running for .*'the other_0'"
            ):
                call()
        assert trainer.recoveries == [] and "running" in repr(trainer)
        (held / "free").touch()
        assert running.result(timeout=60) == [30]
        assert len(trainer.history) == 30, "the first run has all of its rounds, and only its own"
        (held / "begun").unlink()
        (held / "free").unlink()
        group = trainer.worker_group
        running = elsewhere(held, lambda: group.execute(hold, held))
        with pytest.raises(TrainerBusyError, match="has been running for"):
            group.execute(time.time)
        (held / "free").touch()
        assert running.result(timeout=30) == [None]
