"""Arguments that a trainer refuses: each error names the argument, what is allowed, and what to do."""

import re
import subprocess
import sys
from typing import Any

import pytest

from raysgd import ConfigError, ElasticConfig, NotActiveError
from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.torch import small
from tests.torch.small import Line, inline, operator_of

NUMBER = "num_workers must be a whole number of at least 1"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no workers": ({"num_workers": 0}, f"{NUMBER}, got 0"),
    "half a worker": ({"num_workers": 2.5}, f"{NUMBER}, got 2.5"),
    "workers as a flag": ({"num_workers": True}, f"{NUMBER}, got True"),
    "an instance": ({"training_operator_cls": Line({})}, "Pass the class itself, not an instance"),
    "scheduler_step_freq": (
        {"scheduler_step_freq": "steps"},
        "scheduler_step_freq must be 'batch', 'step', 'epoch', 'manual' or None, got 'steps'",
    ),
    "backend": ({"backend": "mpi"}, "backend must be 'auto', 'gloo', 'nccl' or 'horovod', got 'mpi'"),
    "hook": ({"initialization_hook": 3}, "initialization_hook must be a function without arguments, got 3"),
    "config": ({"config": [1]}, "config must be a dict, got [1]"),
    "no time": ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
    "use_gpu": ({"use_gpu": "yes"}, "use_gpu must be True, False or 'auto', got 'yes'"),
    "elastic": ({"elastic": {"min_workers": 1}}, "elastic must be a raysgd.ElasticConfig"),
    "cpus": ({"num_cpus_per_worker": -1}, "num_cpus_per_worker must be a number of at least 0, got -1"),
    "resources": ({"resources_per_worker": "GPU"}, "resources_per_worker must be a dict such as {'CPU': 2, 'GPU': 1}"),
    "not without ray": ({"num_workers": 2, "use_ray": False}, "use_ray=False is possible with num_workers=1"),
    "batch below workers": (
        {"config": {BATCH_SIZE: 1}, "num_workers": 2},
        "a whole number of at least num_workers (2), got 1",
    ),
    "min_workers": (
        {"num_workers": 2, "elastic": ElasticConfig(min_workers=5)},
        "min_workers is 5, but num_workers is 2",
    ),
    "batch as text": ({"config": {BATCH_SIZE: "64"}}, "'*batch_size'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused(name: str) -> None:
    given, says = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        TorchTrainer(**{"training_operator_cls": Line, **given})
    assert isinstance(caught.value, ValueError), "v1 raised ValueErrors"


def test_removed_arguments_name_their_replacement() -> None:
    hints = {
        "num_replicas": "use num_workers",
        "batch_size": "config['*batch_size']",
        "model_creator": "TrainingOperator.from_creators",
        "data_creator": "setup of a TrainingOperator",
        "optimizer_creator": "from_creators",
        "scheduler_creator": "from_creators",
        "loss_creator": "from_creators",
        "data_loader_args": "DataLoader you make in setup",
        "apex_args": "self.register(apex_args=...)",
    }
    for name, hint in hints.items():
        with pytest.raises(DeprecationWarning, match=f"TorchTrainer takes no {name} any more") as caught:
            TorchTrainer(training_operator_cls=Line, **{name: 4})
        assert hint in str(caught.value) and "/migrating.html" in str(caught.value)
    inline(**dict.fromkeys(hints)).shutdown()


def test_an_unknown_argument_without_a_similar_one_gets_the_list() -> None:
    with pytest.raises(TypeError, match=r"takes no argument 'xyz'\. Its arguments are .*num_workers"):
        inline(xyz=2)


@pytest.mark.parametrize(
    ("name", "hint"), [("serialize_data_creation", "from_creators"), ("use_local", "of several none does")]
)
def test_an_argument_without_effect_only_warns(name: str, hint: str) -> None:
    inline(**{name: False}).shutdown()
    with pytest.warns(DeprecationWarning, match=f"{name} has no effect: .*{hint}") as caught:
        inline(**{name: True}).shutdown()
    assert caught[0].filename == small.__file__


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("train", {"num_steps": -1}, "num_steps must be a whole number of at least 0, or None"),
    ("train", {"num_steps": 2.0}, "num_steps must be a whole number"),
    ("train", {"max_retries": -2}, "-1 for any number; got -2"),
    ("train", {"info": "x"}, "info must be a dict, got 'x'"),
    ("validate", {"num_steps": "3"}, "num_steps must be a whole number"),
    ("validate", {"info": [1]}, "info must be a dict"),
    ("apply_all_workers", {"fn": 3}, "fn must be a function, got 3"),
    ("apply_all_operators", {"fn": None}, "fn must be a function"),
    ("resize", {"num_workers": 0}, NUMBER),
    ("resize", {"num_workers": 2}, "create it with num_workers=2 or more"),
]


def test_calls_refuse_invalid_arguments() -> None:
    with inline() as trainer:
        for method, given, says in CALLS:
            with pytest.raises(ConfigError, match=re.escape(says)):
                getattr(trainer, method)(**given)
        assert trainer.train()["num_samples"] == 12, "a refused call does not change the trainer"


def test_calls_after_shutdown_raise_an_error() -> None:
    trainer = inline()
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


def test_the_hook_runs_before_setup_even_with_one_worker() -> None:
    order: list[str] = []

    class Noting(Line):
        def setup(self, config: dict[str, Any]) -> None:
            order.append("setup")
            super().setup(config)

    inline(Noting, initialization_hook=lambda: order.append("hook")).shutdown()
    assert order == ["hook", "setup"]


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

    own: dict[str, Any] = {BATCH_SIZE: 7}
    with inline(Changing, config=own) as trainer:
        assert operator_of(trainer).config == {BATCH_SIZE: 7, "changed": True}
    assert own == {BATCH_SIZE: 7}


SCRIPT = """
import sys
import torch
from raysgd.torch import TorchTrainer
from tests.torch import small
from tests.torch.small import Line
with TorchTrainer(training_operator_cls=Line, use_gpu=False) as trainer:
    print(trainer.train()["num_samples"], trainer.validate()["num_samples"])
    trainer.load(trainer.save(sys.argv[1]))
print([name for name in ("ray", "tensorflow", "horovod") if name in sys.modules])
"""


def test_one_worker_needs_no_ray(tmp_path: Any) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == ["12 12", "[]"], done.stderr
