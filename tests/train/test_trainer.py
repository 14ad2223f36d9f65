"""Functions on real workers: return values, reports and checkpoints, as the driver receives them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import NotActiveError, train
from raysgd.train import Trainer


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer("none", num_workers=2, logdir=tmp_path_factory.mktemp("logs"), max_retries=0)
    made.start(initialization_hook=lambda: os.environ.update(RAYSGD_HOOK="1"))
    yield made
    made.shutdown()


def test_the_hook_runs_in_every_worker(trainer: Trainer) -> None:
    assert trainer.run(lambda: os.environ["RAYSGD_HOOK"]) == ["1", "1"]
    assert "RAYSGD_HOOK" not in os.environ


def test_config(trainer: Trainer) -> None:
    assert trainer.run(lambda config: config["a"], config={"a": 3}) == [3, 3]
    assert trainer.run(lambda config: config) == [{}, {}]
    assert trainer.run(lambda: 0, config={"a": 3}) == [0, 0], "a function need not accept the config"


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (lambda a, b: None, {}, "takes 2"),
        (lambda: 0, {"checkpoint": "/no/such/file"}, "no checkpoint at /no/such/file"),
        (lambda: 0, {"checkpoint": 5}, "checkpoint must be a dict"),
        (lambda: 0, {"checkpoint_strategy": 5}, "must be a raysgd.train.CheckpointStrategy"),
        (lambda: 0, {"callbacks": [5]}, "TrainingCallback"),
    ],
)
def test_invalid_arguments_are_refused(trainer: Trainer, function: Any, given: dict[str, Any], message: str) -> None:
    before = trainer.latest_run_dir
    with pytest.raises(ValueError, match=message):
        trainer.run(function, **given)
    assert trainer.latest_run_dir == before, "a refused call is not a run"


# -- start and shutdown -------------------------------------------------------------------------------


def test_before_start_and_after_shutdown(ray_cluster: None, tmp_path: Path) -> None:
    made = Trainer("none", logdir=tmp_path)
    assert made.latest_run_dir is None
    assert made.latest_checkpoint is None
    calls = [lambda: made.run(print), lambda: made.run_iterator(print), lambda: made.execute(print)]
    for call in calls:
        with pytest.raises(RuntimeError, match="not active"):
            call()
    made.start()
    made.run(lambda: train.save_checkpoint(a=1))
    made.shutdown()
    made.shutdown()
    for call in calls:
        with pytest.raises(NotActiveError, match="not active"):
            call()
    assert made.latest_checkpoint is not None, "the saved checkpoint is still available"
    made.start()
    assert made.run(lambda: 2) == [2], "a trainer can be started again"
    made.shutdown()


def test_trainers_with_one_logdir_have_runs_of_their_own(ray_cluster: None, tmp_path: Path) -> None:
    """Also those that were made before the other one had a run."""
    trainers = [Trainer("none", logdir=tmp_path) for _ in range(2)]
    for name in ("first", "second"):
        for each in trainers:
            with each:
                each.run(lambda config: train.save_checkpoint(**config), config={"of": f"{name} run of {id(each)}"})
    for number, each in enumerate(trainers):
        assert each.latest_run_dir == tmp_path / f"run_{number + 3:03d}"
        assert each.best_checkpoint["of"] == f"second run of {id(each)}"


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def add(self, times: int = 1) -> int:
        self.value += self.step * times
        return self.value


def test_execute_works_on_objects_in_the_workers(ray_cluster: None, tmp_path: Path) -> None:
    made = Trainer("none", num_workers=2, logdir=tmp_path)
    made.start(None, Counter, 10, step=5)
    assert made.execute(lambda counter: counter.add()) == [15, 15]
    assert made.execute_single(lambda counter, times: counter.add(times), 2) == 25
    assert made.execute(Counter.add, times=0) == [25, 15]
    made.shutdown()


def test_execute_without_objects_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ValueError, match="train_cls"):
        trainer.execute(print)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"backend": 5}, TypeError, "BackendConfig"),
        ({"backend": "none", "num_workers": 0}, ValueError, "num_workers"),
        ({"backend": "none", "max_retries": -2}, ValueError, "max_retries"),
        ({"backend": "none", "use_gpu": 1}, ValueError, "use_gpu"),
        ({"backend": "none", "resources_per_worker": {"GPU": 1}}, ValueError, "use_gpu=True"),
        ({"backend": "none", "use_gpu": True, "resources_per_worker": {"GPU": 0}}, ValueError, "use_gpu is True"),
        ({"backend": "none", "elastic": 5}, ValueError, "ElasticConfig"),
    ],
)
def test_arguments_of_a_trainer_are_checked(
    arguments: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        Trainer(logdir=tmp_path, **arguments)


def test_log_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / "ray_results"
    first, second = Trainer("none").logdir, Trainer("none").logdir
    assert first.parent == second.parent == home
    assert first.name.startswith("sgd_20")
    assert first != second, "two trainers of the same second have different directories"
    assert Trainer("none", logdir="mine").logdir == home / "mine"
    assert Trainer("none", logdir=tmp_path / "there").logdir == tmp_path / "there"
    assert all(path.is_dir() for path in (first, second, home / "mine", tmp_path / "there"))
