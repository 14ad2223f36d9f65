"""Arguments that a trainer refuses: each error names the argument, what is allowed, and what to do."""

import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from raysgd import ConfigError, ElasticConfig, NotActiveError, TrainingOperator
from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.torch.small import Line, inline, operator_of, weights

NUMBER = "num_workers must be a whole number of at least 1"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no workers": ({"num_workers": 0}, f"{NUMBER}, got 0"),
    "fewer than none": ({"num_workers": -3}, f"{NUMBER}, got -3"),
    "half a worker": ({"num_workers": 2.5}, f"{NUMBER}, got 2.5"),
    "workers as text": ({"num_workers": "2"}, f"{NUMBER}, got '2'"),
    "workers as a flag": ({"num_workers": True}, f"{NUMBER}, got True"),
    "workers unsaid": ({"num_workers": None}, f"{NUMBER}, got None"),
    "no class": (
        {"training_operator_cls": "Line"},
        "training_operator_cls must be a subclass of raysgd's TrainingOperator",
    ),
    "no operator": ({"training_operator_cls": dict}, "got <class 'dict'>"),
    "a function": (
        {"training_operator_cls": lambda config: None},
        "must be a subclass of raysgd's TrainingOperator",
    ),
    "an instance": ({"training_operator_cls": Line({})}, "Pass the class itself, not an instance"),
    "a model": ({"training_operator_cls": torch.nn.Linear}, "TrainingOperator"),
    "scheduler_step_freq": (
        {"scheduler_step_freq": "steps"},
        "one of ['batch', 'epoch', 'manual', 'step'] or None, got 'steps'",
    ),
    "backend": ({"backend": "mpi"}, "backend must be 'auto', 'gloo', 'nccl' or 'horovod', got 'mpi'"),
    "hook": ({"initialization_hook": 3}, "initialization_hook must be a function without arguments, got 3"),
    "config": ({"config": [1]}, "config must be a dict, got [1]"),
    "no time": ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
    "time as text": ({"timeout_s": "10"}, "timeout_s must be a number of seconds above 0, got '10'"),
    "use_gpu": ({"use_gpu": "yes"}, "use_gpu must be True, False or 'auto', got 'yes'"),
    "elastic": ({"elastic": {"min_workers": 1}}, "elastic must be a raysgd.ElasticConfig"),
    "cpus": ({"num_cpus_per_worker": -1}, "num_cpus_per_worker must be a number of at least 0, got -1"),
    "resources": (
        {"resources_per_worker": "GPU"},
        "resources_per_worker must be a dict such as {'CPU': 2, 'GPU': 1}",
    ),
    "not without ray": ({"num_workers": 2, "use_ray": False}, "use_ray=False is possible with num_workers=1"),
    "batch below workers": (
        {"config": {BATCH_SIZE: 1}, "num_workers": 2},
        "a whole number of at least num_workers (2), got 1",
    ),
    "batch as text": ({"config": {BATCH_SIZE: "64"}}, "'*batch_size'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused(name: str) -> None:
    given, says = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        TorchTrainer(**{"training_operator_cls": Line, **given})
    assert isinstance(caught.value, ValueError), "v1 raised ValueErrors"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_replicas", "use num_workers"),
        ("batch_size", "config['*batch_size']"),
        ("model_creator", "TrainingOperator.from_creators"),
        ("data_creator", "setup of a TrainingOperator"),
        ("optimizer_creator", "from_creators"),
        ("scheduler_creator", "from_creators"),
        ("loss_creator", "from_creators"),
        ("data_loader_args", "DataLoader you make in setup"),
        ("apex_args", "self.register(apex_args=...)"),
    ],
)
def test_removed_arguments_name_their_replacement(name: str, hint: str) -> None:
    with pytest.raises(DeprecationWarning, match=f"TorchTrainer takes no {name} any more") as caught:
        TorchTrainer(training_operator_cls=Line, **{name: 4})
    assert hint in str(caught.value)
    assert "/migrating.html" in str(caught.value)
    inline(**{name: None}).shutdown()


def test_an_unknown_argument_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="takes no argument 'num_worker': did you mean 'num_workers'"):
        inline(num_worker=2)


def test_an_unknown_argument_without_a_similar_one_gets_the_list() -> None:
    with pytest.raises(TypeError, match=r"takes no argument 'xyz'\. Its arguments are .*num_workers"):
        inline(xyz=2)


def test_serialize_data_creation_only_warns() -> None:
    with pytest.warns(DeprecationWarning, match="from_creators"):
        inline(serialize_data_creation=True).shutdown()


def test_everything_is_a_keyword() -> None:
    with pytest.raises(TypeError):
        TorchTrainer(Line)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="training_operator_cls"):
        TorchTrainer()


def test_creators_as_arguments_say_what_to_do() -> None:
    with pytest.raises(DeprecationWarning, match=r"model_creator.*from_creators"):
        TorchTrainer(model_creator=lambda config: None, num_workers=2)


def test_min_workers_above_num_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_workers is 5, but num_workers is 2"):
        TorchTrainer(training_operator_cls=Line, num_workers=2, elastic=ElasticConfig(min_workers=5))


@pytest.mark.parametrize(
    ("method", "given", "says"),
    [
        ("train", {"num_steps": -1}, "num_steps must be a whole number of at least 0, or None"),
        ("train", {"num_steps": 2.0}, "num_steps must be a whole number"),
        ("train", {"num_steps": True}, "num_steps must be a whole number"),
        ("train", {"max_retries": -2}, "-1 for any number; got -2"),
        ("train", {"max_retries": None}, "max_retries must be a whole number"),
        ("train", {"info": "x"}, "info must be a dict, got 'x'"),
        ("validate", {"num_steps": "3"}, "num_steps must be a whole number"),
        ("validate", {"info": [1]}, "info must be a dict"),
        ("apply_all_workers", {"fn": 3}, "fn must be a function, got 3"),
        ("apply_all_operators", {"fn": None}, "fn must be a function"),
        ("resize", {"num_workers": 0}, NUMBER),
        ("resize", {"num_workers": 2}, "create it with num_workers=2 or more"),
    ],
)
def test_calls_refuse_invalid_arguments(method: str, given: dict[str, Any], says: str) -> None:
    with inline() as trainer:
        with pytest.raises(ConfigError, match=re.escape(says)):
            getattr(trainer, method)(**given)
        assert trainer.train()["num_samples"] == 12, "a refused call does not change the trainer"


@pytest.mark.parametrize("force", [False, True])
def test_calls_after_shutdown_raise_an_error(force: bool) -> None:
    trainer = inline()
    trainer.shutdown(force=force)
    trainer.shutdown()
    trainer.shutdown(force=True)
    calls: list[Any] = [
        trainer.train,
        trainer.validate,
        trainer.get_model,
        trainer.state_dict,
        trainer.get_local_operator,
        lambda: trainer.save("never.pt"),
        lambda: trainer.apply_all_workers(int),
        lambda: trainer.update_scheduler(1.0),
        lambda: trainer.resize(1),
    ]
    for call in calls:
        with pytest.raises(NotActiveError, match="was shut down: to continue, create a new one") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)


def test_a_with_block_ends_the_trainer_also_after_an_error() -> None:
    with pytest.raises(KeyError), inline() as trainer:
        raise KeyError("own")
    with pytest.raises(NotActiveError):
        trainer.train()


def raising(where: str) -> type[TrainingOperator]:
    class Raises(Line):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            if where == "setup":
                raise LookupError("in setup")

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            raise LookupError("in validate_batch")

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info.get("fail"):
                raise LookupError("in train_batch")
            return super().train_batch(batch, batch_info)

    return Raises


def test_an_error_in_setup_is_the_users_own() -> None:
    with pytest.raises(LookupError, match="in setup"):
        inline(raising("setup"))


def test_an_error_in_the_hook_is_the_users_own() -> None:
    def hook() -> None:
        raise LookupError("in the hook")

    with pytest.raises(LookupError, match="in the hook"):
        inline(initialization_hook=hook)


def test_a_trainer_stays_usable_after_an_error_in_a_batch() -> None:
    with inline(raising("later")) as trainer:
        for _ in range(2):
            with pytest.raises(LookupError, match="in train_batch"):
                trainer.train(info={"fail": True})
            with pytest.raises(LookupError, match="in validate_batch"):
                trainer.validate()
        assert trainer.train()["num_samples"] == 12
        assert trainer.recoveries == []


def test_the_hook_runs_before_setup_even_with_one_worker() -> None:
    order: list[str] = []

    class Noting(Line):
        def setup(self, config: dict[str, Any]) -> None:
            order.append("setup")
            super().setup(config)

    inline(Noting, initialization_hook=lambda: order.append("hook")).shutdown()
    assert order == ["hook", "setup"]


@pytest.mark.parametrize(("total", "workers", "shown", "each", "warns"), [(64, 1, 64, 64, 0), (7, 1, 7, 7, 0)])
def test_a_global_batch_size(total: int, workers: int, shown: int, each: int, warns: int) -> None:
    own = {BATCH_SIZE: total, "more": 1}
    with warnings.catch_warnings(record=True) as caught, inline(config=own, num_workers=workers) as trainer:
        warnings.simplefilter("always")
        assert trainer.config == {BATCH_SIZE: shown, "more": 1}
        assert operator_of(trainer).config[BATCH_SIZE] == each
    assert len(caught) == warns
    assert own == {BATCH_SIZE: total, "more": 1}


def test_an_open_file_in_the_config_is_refused() -> None:
    with (
        open(__file__, encoding="utf-8") as file,
        pytest.raises(ConfigError, match=r"config\['words'\] is an open file, .*its path"),
    ):
        inline(config={"words": file})


def test_the_callers_config_is_not_changed() -> None:
    class Changing(Line):
        def setup(self, config: dict[str, Any]) -> None:
            config["changed"] = True
            super().setup(config)

    own: dict[str, Any] = {}
    with inline(Changing, config=own) as trainer:
        assert operator_of(trainer).config["changed"]
    assert own == {}


def test_use_local_with_one_worker_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with inline(use_local=True, elastic=ElasticConfig()) as trainer:
            trainer.train()
            assert torch.equal(trainer.get_local_operator().model.weight.flatten(), weights(trainer)[:2])


SCRIPT = """
import sys
import torch
from raysgd.torch import TorchTrainer
from tests.torch.small import Line
with TorchTrainer(training_operator_cls=Line, use_gpu=False) as trainer:
    print(trainer.train()["num_samples"], trainer.validate()["num_samples"])
    trainer.load(trainer.save(sys.argv[1]))
print([name for name in ("ray", "tensorflow", "horovod") if name in sys.modules])
"""


def test_one_worker_needs_no_ray(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "a.pt")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["12 12", "[]"], done.stderr
