"""The class API as Tune trials. Both.

Trainable = TorchTrainer.as_trainable(training_operator_cls=Digits, num_workers=2, use_gpu=False)
tune.Tuner(Trainable, param_space={"lr": tune.grid_search([0.1, 0.01])}).fit()
"""

from __future__ import annotations

import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune

from raysgd.errors import ConfigError
from raysgd.train.run.trials import make_placement

CHECKPOINT = "trainer.checkpoint"
TUNED = "tuned.json"  # the numbers in the config of the trial that saved
Step = Callable[[Any, dict[str, Any]], dict[str, Any]]


class BaseTorchTrainable(tune.Trainable):
    """One trial: creates its trainer from the trial's config, and trains and validates once in each
    step.

    A worker failure fails the trial (`max_retries=0`), which Tune then restarts from its last
    checkpoint.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._trainer = self._create_trainer(config)

    @abstractmethod
    def _create_trainer(self, tune_config: dict[str, Any]) -> Any:
        """Create the trial's trainer, whose operator's config has the trial's values."""

    @property
    def trainer(self) -> Any:
        return self._trainer

    def step(self) -> dict[str, Any]:
        train = self.trainer.train(max_retries=0, profile=True)
        validation = self.trainer.validate(profile=True)
        profile = {**train.pop("profile", {}), **validation.pop("profile", {})}
        return {**train, **validation, "profile": profile}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self.trainer.save(os.path.join(checkpoint_dir, CHECKPOINT))
        Path(checkpoint_dir, TUNED).write_text(json.dumps(_select_numbers(self.config)), encoding="utf-8")

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Load a checkpoint, which may be another trial's. Then its optimizers have that trial's
        hyperparameters: restore those that this trial's config sets."""
        file = Path(checkpoint_dir, TUNED)
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        now = _select_numbers(self.config)
        changed = {name: (before[name], now[name]) for name in before if before[name] != now.get(name, before[name])}
        chosen: list[Any] = []
        if changed:
            from raysgd.torch.state import hyperparameters

            wanted = {name: new for name, (_, new) in changed.items()}
            chosen = self.trainer.apply_all_operators(partial(hyperparameters.options, values=wanted))[0]
        # This experiment wrote the file, so the operator's state may have objects of any type.
        self.trainer.load(os.path.join(checkpoint_dir, CHECKPOINT), trusted=True)
        if chosen:
            self.trainer.apply_all_operators(partial(hyperparameters.retune, chosen=chosen, changed=changed))

    def cleanup(self) -> None:
        self.trainer.shutdown()


def torch_trainable(
    trainer_cls: type, *, override_tune_step: Step | None = None, **arguments: Any
) -> type[BaseTorchTrainable]:
    """Make a Trainable class for `trainer_cls(**arguments)`; see `TorchTrainer.as_trainable`."""
    if override_tune_step is not None and len(inspect.signature(override_tune_step).parameters) != 2:
        raise ConfigError(
            "override_tune_step must be a function of two arguments, (trainer, info); info['iteration'] is the step's number"
        )

    class TorchTrainable(BaseTorchTrainable):
        """A trial of this trainer."""

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            return _request_resources({**arguments, **{name: config[name] for name in RESOURCES if name in config}})

        def step(self) -> dict[str, Any]:
            if override_tune_step is None:
                return super().step()
            return override_tune_step(self.trainer, {"iteration": self.training_iteration})

        def _create_trainer(self, tune_config: dict[str, Any]) -> Any:
            values = dict(tune_config)
            chosen = {name: values.pop(name) for name in RESOURCES if name in values}
            settings = {**arguments, **chosen, "config": {**(arguments.get("config") or {}), **values}}
            settings.pop("use_local", None)
            return trainer_cls(**settings)

    return TorchTrainable


class TFTrainable(tune.Trainable):
    """One trial of a `TFTrainer`. The trial's config has its arguments: model_creator,
    data_creator, num_replicas, num_cpus_per_worker, use_gpu, trainer_config. The creators get all
    other values, added to trainer_config."""

    ARGUMENTS = ("model_creator", "data_creator", "num_replicas", "num_cpus_per_worker", "use_gpu")

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        return _request_resources(
            {
                "num_workers": config.get("num_replicas", 1),
                "num_cpus_per_worker": config.get("num_cpus_per_worker", 1),
                "use_gpu": bool(config.get("use_gpu", False)),
                "use_local": True,  # the trial itself needs no CPU while its replicas train
            }
        )

    def setup(self, config: dict[str, Any]) -> None:
        values = dict(config)
        arguments = {name: values.pop(name) for name in self.ARGUMENTS if name in values}
        settings = {**(values.pop("trainer_config", None) or {}), **values}
        from raysgd.tf.trainer import TFTrainer

        self._trainer = TFTrainer(**arguments, config=settings)

    def step(self) -> dict[str, Any]:
        return {**self._trainer.train(), **self._trainer.validate()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._trainer.save(os.path.join(checkpoint_dir, CHECKPOINT))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        self._trainer.restore(os.path.join(checkpoint_dir, CHECKPOINT))

    def cleanup(self) -> None:
        self._trainer.shutdown()


def _select_numbers(config: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in config.items() if isinstance(value, (int, float))}


RESOURCES = ("num_workers", "num_cpus_per_worker", "use_gpu", "use_local", "resources_per_worker")


def _request_resources(arguments: Mapping[str, Any]) -> Any:
    """Return a trial's placement group: one CPU for the trial itself, and a bundle for each worker.
    With `use_local`, the trial asks for no CPU, because in RaySGD it was one of the workers."""
    use_gpu = arguments.get("use_gpu", "auto")
    if use_gpu == "auto":
        from raysgd.torch.setup import wants_gpu

        use_gpu = wants_gpu(use_gpu)
    worker = {
        "CPU": arguments.get("num_cpus_per_worker", 1),
        "GPU": int(use_gpu),
        **(arguments.get("resources_per_worker") or {}),
    }
    count = arguments.get("num_workers", 1)
    inline = count == 1 and not arguments.get("use_ray") and worker.keys() == {"CPU", "GPU"}
    trial = {} if arguments.get("use_local") else {"CPU": 1.0}
    bundles = [{"CPU": 1.0, **worker}] if inline else [trial, *[worker] * count]
    return make_placement(bundles)
