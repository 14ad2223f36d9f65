"""Run a program of `examples/programs` while its workers are killed, or so that a killed script continues. Note when it steps.

    python -m tests.programs.killing gpt FOLDER {}     makes checkpoints there, and continues from them

The trainer that a program makes is a subclass here: the programs do not know of it. On the workers, hooks that PyTorch and
Keras offer end the process at a given step.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from raysgd import AutoCheckpoint
from raysgd.callbacks import Callback
from raysgd.callbacks.base import Run
from tests.programs import by_hand

__all__ = ["Kills", "Program", "flat", "note_steps", "steps", "with_hook"]

LATER = 3  # steps, or calls of modules or Keras' callbacks in a validation, until a worker obeys
NEEDS = {"text_classifier": "transformers", "keras_convnet": "tensorflow"}
RETURNED = "returned.pt"
TIME = struct.Struct("d")
Results = tuple[
    list[dict[str, Any]], list[Any]
]  # of each call of train and validate; the state or the weights of each model


class Program:
    """A program with small sizes, on two workers. Owns how it is run: by raysgd in this process, as a script, and by hand."""

    def __init__(self, name: str, folder: Path, **sizes: Any) -> None:
        self.name, self.folder, self.module = name, folder, import_module(f"examples.programs.{name}")
        self.given: dict[str, Any] = {"workers": 2, "rows": 210, "batch": 32}
        if name != "keras_convnet":
            test = import_module(f"tests.programs.test_{name}")
            self._loop = test.loop
            self.given = {**(test.CONFIG if hasattr(test, "CONFIG") else test.SMALL), "workers": 2}
        self.given |= sizes

    @property
    def trainer(self) -> str:
        """Return the name of the trainer in the program."""
        return "TFTrainer" if self.name == "keras_convnet" else "TorchTrainer"

    @property
    def arguments(self) -> list[str]:
        option = {"dcgan": "pictures", "resnet": "checkpoints"}.get(self.name)
        return by_hand.arguments({**self.given, **({option: self.folder / "files"} if option else {})})

    def run(self, *, trainer: Any = None) -> Results:
        """Run it here, with this class as its trainer."""
        with patch.object(self.module, self.trainer, trainer or getattr(self.module, self.trainer)):
            history, model = self.module.main(self.arguments)
        if self.name == "keras_convnet":
            history = [{"epoch": number, **figures} for number, figures in enumerate(history, 1)]
        models = model if isinstance(model, list | tuple) else [model]
        return history, [each.get_weights() if hasattr(each, "get_weights") else each.state_dict() for each in models]

    def run_with(self, kills: Kills) -> Results:
        return self.run(trainer=with_kills(getattr(self.module, self.trainer), kills))

    def run_killed(self, environment: Mapping[str, str], *, after: int) -> Results:
        """Run it as a script, kill its process group in the epoch after this one, and run it again."""
        settings = json.dumps(self.given)
        command = [sys.executable, "-m", "tests.programs.killing", self.name, str(self.folder), settings]
        for last in (False, True):
            variables = {**environment, "PYTHONUNBUFFERED": "1"}
            script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables, start_new_session=True)
            assert script.stdout is not None
            with script, script.stdout as lines:
                for line in lines:
                    if f"epoch {after} " in line and not last:
                        os.killpg(script.pid, signal.SIGKILL)
            assert script.returncode == (0 if last else -signal.SIGKILL), f"{self.name}: status {script.returncode}"
            assert last or not (self.folder / RETURNED).exists(), "it was killed too late"
        return returned(self.folder)

    def run_by_hand(self, before: Callable[[], None] | None = None) -> Results:
        """Run the same program by hand, on processes of its own."""
        rows, weights = by_hand.run(partial(prepared, before, self._loop), self.folder, self._of_loop())
        return rows, weights if isinstance(weights, list) else [weights]

    def run_under_torchrun(self) -> Results:
        """Run the same program by hand, started by torchrun."""
        how = ["--standalone", "--nproc-per-node", str(self.given["workers"])]
        script = ["-m", "tests.programs.killing", self.name, str(self.folder), json.dumps(self.given)]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *how, *script], stdout=sys.stderr, check=True)
        return returned(self.folder)

    def be_a_rank(self) -> None:
        """Run the loop in this process, which torchrun has started. Note its steps."""
        torch.set_num_threads(1)
        note_steps(self.folder, "torch")
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        rows, weights = self._loop(rank, **self._of_loop())
        if rank == 0:
            torch.save((rows, weights if isinstance(weights, list) else [weights]), self.folder / RETURNED)
        gc.collect()  # see by_hand.py
        dist.destroy_process_group()

    def _of_loop(self) -> dict[str, Any]:
        return {**self.given, **({"folder": self.folder} if self.name == "dcgan" else {})}


def prepared(before: Callable[[], None] | None, loop: Any, rank: int, **settings: Any) -> Any:
    if before is not None:
        before()
    return loop(rank, **settings)


def flat(weights: Sequence[Any]) -> list[Any]:
    """Return all weights as arrays."""
    return [np.asarray(value) for each in weights for value in (each.values() if isinstance(each, dict) else each)]


class Kills:
    """Owns when which rank is killed, by epoch: in a "step", "between" the training and what follows it, or in a "validation".
    And what has been killed, and what the trainer said at its end."""

    def __init__(self, folder: Path, plan: Mapping[int, tuple[str, int]]) -> None:
        self.folder, self.plan = folder, dict(plan)
        self.killed: list[int] = []
        self.recoveries: list[Any] = []
        self.world_size, self.batch_mode = 0, ""


def with_kills(base: Any, kills: Kills) -> Any:
    """Return a subclass of this trainer whose workers are killed. Each epoch begins with replacements, as in a longer run."""
    framework = "keras" if base.__name__ == "TFTrainer" else "torch"

    class Noting(Callback):
        def on_start(self, run: Run) -> None:
            self.run = run

    class Disturbed(base):  # type: ignore[misc]
        number = 0

        def __init__(self, *creators: Any, **given: Any) -> None:
            self._noting, hook = Noting(), partial(obey, str(kills.folder), framework)
            callbacks = [*given.get("callbacks", ()), self._noting]
            super().__init__(*creators, **{**given, "initialization_hook": hook, "callbacks": callbacks})
            self._wanted = self.world_size

        def train(self, *arguments: Any, **named: Any) -> Any:
            self.number += 1
            self.resize(self._wanted)
            self._kill("step")
            result = super().train(*arguments, **named)
            self._kill("between")
            return result

        def validate(self, *arguments: Any, **named: Any) -> Any:
            self._kill("validation")
            return super().validate(*arguments, **named)

        def _kill(self, point: str) -> None:
            planned, rank = kills.plan.get(self.number, ("", 0))
            if planned == point:
                victim = self._noting.run.processes()[rank][1]
                del kills.plan[self.number]
                kills.killed.append(victim)
                if point == "between":
                    os.kill(victim, signal.SIGKILL)
                else:
                    (kills.folder / f"{victim}.{point}").write_text(str(LATER))

        def shutdown(self, *arguments: Any, **named: Any) -> None:
            kills.recoveries, kills.world_size = list(self.recoveries), self.world_size
            kills.batch_mode = self.batch_mode or ""
            super().shutdown(*arguments, **named)

    return Disturbed


def obey(folder: str, framework: str) -> None:
    """Let this worker end itself when it is asked to."""

    def look(point: str) -> None:
        path = Path(folder, f"{os.getpid()}.{point}")
        with suppress(FileNotFoundError):
            left = int(path.read_text())
            if not left:
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            path.write_text(str(left - 1))

    call_at("step", framework, partial(look, "step"))
    call_at("validation", framework, partial(look, "validation"))


def call_at(point: str, framework: str, function: Callable[[], object]) -> None:
    """Call this in each step of this process, or at each module or batch of its validations."""
    if framework == "keras":
        from keras.callbacks import CallbackList

        name = {"step": "on_train_batch_end", "validation": "on_test_batch_begin"}[point]
        setattr(CallbackList, name, followed(getattr(CallbackList, name), function))
    elif point == "step":
        register_optimizer_step_post_hook(lambda *_: function())
    else:
        register_module_forward_hook(lambda *_: None if torch.is_grad_enabled() else function())


def followed(function: Callable[..., Any], then: Callable[[], object]) -> Callable[..., Any]:
    def both(*arguments: Any, **named: Any) -> None:
        function(*arguments, **named)
        then()

    return both


def with_hook(base: Any, hook: Callable[[], None]) -> Any:
    """Return a subclass of this trainer whose workers call this first."""

    class Hooked(base):  # type: ignore[misc]
        def __init__(self, *creators: Any, **given: Any) -> None:
            super().__init__(*creators, **{**given, "initialization_hook": hook})

    return Hooked


def note_steps(folder: Path, framework: str) -> None:
    """Append the time of each step of this process to a file of its own."""
    file = os.open(folder / f"{os.getpid()}.steps", os.O_CREAT | os.O_WRONLY)
    call_at("step", framework, lambda: os.write(file, TIME.pack(time.monotonic())))


def steps(folder: Path) -> list[float]:
    """Return when one of the processes made its steps."""
    return [moment for (moment,) in TIME.iter_unpack(min(folder.glob("*.steps")).read_bytes())]


# -- scripts ------------------------------------------------------------------------------------------


def continued(base: Any, folder: Path) -> Any:
    """Return a subclass of this trainer that makes checkpoints and continues from them, if the program does not say how."""

    class Continued(base):  # type: ignore[misc]
        def __init__(self, *creators: Any, **given: Any) -> None:
            usual = {"checkpoints": AutoCheckpoint(path=folder / "checkpoints"), "resume": "auto"}
            super().__init__(*creators, **{**usual, **given})

    return Continued


def main(name: str, folder: Path, settings: str) -> None:
    program = Program(name, folder, **json.loads(settings))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        program.be_a_rank()
        return
    results = program.run(trainer=continued(getattr(program.module, program.trainer), folder))
    torch.save(results, folder / RETURNED)


def returned(folder: Path) -> Results:
    found: Results = torch.load(folder / RETURNED, weights_only=False)
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
