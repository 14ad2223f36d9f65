"""What a user sees of a trainer with a name whose script ends at any moment, or whose notebook's kernel does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from raysgd.core.decisions.lease import LEASE_S
from tests.background import Background
from tests.tiers import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]
# The phases of the script's life in which it is killed. In "recovery", a worker has just been killed.
PHASES = ("train", "recovery", "save", "validate", "resize", "between", "start")
# What `raysgd doctor` shows, without its other checks.
LISTED = """
from raysgd.workers.cluster.connecting import join_running
from raysgd.workers.cluster.keeper import trainers
join_running()
print(trainers())
"""
COMMAND = "from raysgd.cli import main; main()"
OPERATOR = textwrap.dedent(
    """
    import json, os, signal, sys, threading, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from raysgd.callbacks import Callback
    from raysgd.torch import TorchTrainer, TrainingOperator

    class Line(TrainingOperator):
        def setup(self, config):
            x = torch.linspace(-1, 1, 480).unsqueeze(1)
            model = nn.Linear(1, config.get("outputs", 1))
            nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=optimizer, criterion=nn.MSELoss()
            )
            data = TensorDataset(x, 2 * x + 5)
            self.register_data(
                train_loader=DataLoader(data, batch_size=8, shuffle=False),
                validation_loader=DataLoader(data, batch_size=8),
            )

        def train_batch(self, batch, info):
            time.sleep(0.01)
            return super().train_batch(batch, info)
    """
)
SCRIPT = OPERATOR + textwrap.dedent(
    """
    name, workers, phase, seconds, config, *ends_by = json.loads(sys.argv[1])

    def enter(this):
        if this == phase:
            threading.Timer(seconds, os.kill, (os.getpid(), *ends_by)).start()

    class Late(Callback):  # kills in the second epoch
        seen = False

        def on_progress(self, now):
            if now.kind == "train" and now.progress.epoch == 2 and phase in ("train", "recovery") and not self.seen:
                self.seen = True
                if phase == "recovery":
                    os.kill(victim, signal.SIGKILL)
                enter(phase)

    enter("start")
    trainer = TorchTrainer(
        training_operator_cls=Line, num_workers=workers, use_gpu=False, config=config, name=name, orphan_s=600,
        callbacks=[Late()],
    )
    victim = trainer.apply_all_workers(os.getpid)[-1]
    for epoch in trainer.epochs(3):
        trainer.train()
        enter("validate")
        trainer.validate()
        enter("save")
        trainer.save("line.pt")
        if epoch == 2 and workers > 2:
            enter("resize")
            trainer.resize(2)
            trainer.resize(3)
        enter("between")
        time.sleep(1.0 if phase == "between" else 0.0)
    model = trainer.get_model()
    rows = [(row["kind"], row["epoch"], row["step"]) for row in trainer.history]
    recoveries = [(each.reason, each.batches_redone) for each in trainer.recoveries]
    trainer.shutdown()
    print(json.dumps([trainer.attached, model.weight.item(), model.bias.item(), rows, recoveries]))
    """
)


def undisturbed(batch: int, epochs: int = 3) -> tuple[float, float]:
    x = torch.linspace(-1, 1, 480).unsqueeze(1)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for part in list(x.split(batch)) * epochs:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(part), 2 * part + 5).backward()
        optimizer.step()
    return model.weight.item(), model.bias.item()


def written(background: Background, script: str = SCRIPT) -> Path:
    folder = background.folder()
    (folder / "script.py").write_text(script, encoding="utf-8")
    return folder


def killed_and_again(background: Background, seed: int) -> tuple[str, float, list[Any]]:
    """Kill the script in a random moment, by SIGKILL or SIGTERM, and run it again."""
    draw, ends_by = random.Random(seed), (signal.SIGKILL, signal.SIGTERM)[seed % 2]
    phase, seconds = PHASES[seed % len(PHASES)], draw.uniform(0.0, 0.6)
    folder, name = written(background), f"line-{seed}"
    given = json.dumps([name, 3, phase, seconds * (8 if phase == "start" else 1), {}, ends_by])
    first = background.run("script.py", given, connected=True, folder=folder)
    if first.returncode == 0:  # it was faster
        return phase, seconds, json.loads(first.stdout.splitlines()[-1])
    assert first.returncode == -ends_by or phase == "start", first.stderr  # Ray makes SIGTERM an exit until then
    again = background.run("script.py", json.dumps([name, 3, "", 0, {}]), connected=True, folder=folder)
    assert again.returncode == 0, again.stderr
    return phase, seconds, json.loads(again.stdout.splitlines()[-1])


@pytest.mark.more
@pytest.mark.parametrize("seed", range(50 if NIGHTLY else 3))
@pytest.mark.script(run=killed_and_again)
def test_a_script_that_is_killed_at_any_moment_continues(outcome: Any, seed: int) -> None:
    phase, seconds, (attached, *weights, rows, recoveries) = outcome()
    print(f"killed {seconds:.2f} s after the beginning of {phase!r}: attached={attached}, {recoveries}")
    assert weights == pytest.approx(undisturbed(24), abs=1e-5)
    assert rows == [[kind, epoch, 20 * epoch] for epoch in (1, 2, 3) for kind in ("train", "validate")]
    assert all(redone == 0 for _, redone in recoveries)
    assert attached or phase == "start"


# -- a cluster of its own -----------------------------------------------------------------------------


@contextlib.contextmanager
def own_place() -> Iterator[dict[str, str]]:
    """Yield an environment in which no cluster is found. Its folder is short, because paths of sockets are limited. It
    keeps Ray from using the tests' own forks, whose environment does not name the folder."""
    folder = tempfile.mkdtemp(prefix="rg-", dir="/tmp")
    try:
        yield {"RAY_ADDRESS": "", "RAY_TMPDIR": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
    finally:
        for process in of(folder):
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder)


def of(folder: str) -> dict[psutil.Process, str]:
    """Return the processes that use this folder, with their commands."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline()[:3])
    return found


def left(folder: str, within_s: float) -> list[str]:
    """Return what is left there of processes, and of files that are not Ray's or torch's own."""
    until = time.monotonic() + within_s
    while True:
        files = [each for each in os.listdir(folder) if each != "ray" and not each.startswith("torchinductor")]
        processes = list(of(folder).values())
        if not (files or processes) or time.monotonic() > until:
            return files + processes
        time.sleep(0.2)


ABANDONED = OPERATOR + textwrap.dedent(
    """
    for number in range(int(sys.argv[1])):
        trainer = TorchTrainer(
            training_operator_cls=Line, num_workers=1, num_cpus_per_worker=0.05, use_gpu=False, name=f"line{number}", orphan_s=5
        )
        trainer.train(num_steps=2)
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


def abandon(background: Background, environment: dict[str, str]) -> None:
    count = str(20 if NIGHTLY else 2)
    ended = background.run("script.py", count, folder=written(background, ABANDONED), **environment)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert any("WorkerActor" in each for each in left(environment["RAY_TMPDIR"], 0.0))


def own_clusters(background: Background) -> dict[str, Any]:
    """Let the workers of two clusters wait for their scripts in vain, one of them without Ray's control service, while others are
    attached to in a third one."""
    with own_place() as alone, own_place() as lost, own_place() as environment:
        for each in (alone, lost):
            abandon(background, each)
        next(each for each, command in of(lost["RAY_TMPDIR"]).items() if "gcs_server" in command).kill()
        place, folder = environment["RAY_TMPDIR"], written(background)
        killed, again = (json.dumps(["line", 2, phase, 0.1, {}, signal.SIGKILL]) for phase in ("train", ""))
        first = background.run("script.py", killed, folder=folder, **environment)
        listed = background.run("-c", LISTED, folder=folder, **environment)
        second = background.run("script.py", again, folder=folder, **environment)
        left_after = left(place, 120.0)
        third = background.run("script.py", killed, folder=folder, **environment)
        ended = background.run("-c", COMMAND, "end", "line", folder=folder, **environment)
        left_last = [left(each["RAY_TMPDIR"], 120.0) for each in (environment, alone, lost)]
    return locals()


@pytest.mark.more
@pytest.mark.script(run=own_clusters)
def test_a_cluster_that_raysgd_starts_outlives_the_script_and_nothing_else(outcome: Any) -> None:
    seen = outcome()
    assert seen["first"].returncode == -signal.SIGKILL
    assert "which ends when no script uses it" in seen["first"].stderr
    assert seen["listed"].stdout.startswith("{'line': "), seen["listed"].stderr
    assert "attached to the 2 workers of the trainer 'line'" in seen["second"].stderr, seen["second"].stderr
    attached, *weights, _, recoveries = json.loads(seen["second"].stdout.splitlines()[-1])
    assert attached and weights == pytest.approx(undisturbed(16), abs=1e-6)
    assert recoveries == [["takeover", 0]]
    assert seen["left_after"] == []
    assert seen["ended"].stdout == "ended 2 workers of the trainer line\n", seen["ended"].stderr
    assert seen["left_last"] == [[], [], []]


# -- another script with this name --------------------------------------------------------------------

LOOP = """
trainer = TorchTrainer(
    training_operator_cls=Line, num_workers=2, use_gpu=False, config={CONFIG}, name={NAME!r}, orphan_s=600, callbacks=[Killer()],
    {MORE}
)
for epoch in {EPOCHS}:
    trainer.train()
    trainer.validate()
rows = [(row["kind"], row["epoch"], row["step"], row.get("version")) for row in trainer.history]
recoveries = [(each.reason, each.batches_redone) for each in trainer.recoveries]
weight = trainer.get_model().weight.item()
trainer.shutdown()
print(json.dumps([trainer.attached, weight, rows, recoveries]))
"""
KILLER = """
class Killer(Callback):
    def on_progress(self, now):
        if now.progress.step >= {STEP} and now.kind == "train" and {ENDS}:
            os.kill(os.getpid(), signal.SIGKILL)
"""
EDITED = """
class Line(Line):
    def validate(self, iterator, info):
        return {**super().validate(iterator, info), "version": 2}
"""


def cells(
    name: str,
    *,
    ends: bool,
    config: str = "{}",
    epochs: str = "trainer.epochs(3)",
    edited: str = "",
    operator: str = OPERATOR,
    more: str = "",
    step: int = 45,
) -> list[str]:
    killer = KILLER.format(ENDS=ends, STEP=step)
    return [operator + edited, killer, LOOP.format(CONFIG=config, NAME=name, EPOCHS=epochs, MORE=more)]


def others(background: Background) -> dict[str, Any]:
    """Kill a script, and run others with the name of its trainer."""

    def run(**given: Any) -> subprocess.CompletedProcess[str]:
        folder = written(background, "\n".join(cells("others", **given)))
        return background.run("script.py", connected=True, folder=folder)

    killed = run(ends=True)
    learning = run(ends=False, config="{'lr': 1}")
    broken = run(ends=False, edited=EDITED.replace("return", "return raised +").replace("class", "unknown\nclass"))
    shaped = run(ends=False, edited=EDITED + "    def setup(self, config):\n        super().setup({'outputs': 2})\n")
    in_setup = run(ends=False, edited=EDITED + "    def setup(self, config):\n        raise OSError('no data')\n")
    unpicklable = run(ends=False, more="initialization_hook=lambda lock=threading.Lock(): None")
    plain = run(ends=False, edited=EDITED, epochs="range(2)")
    return locals()


@pytest.mark.more
@pytest.mark.script(run=others)
def test_another_script_with_this_name_must_fit_and_its_code_is_taken(outcome: Any) -> None:
    seen = outcome()
    assert seen["killed"].returncode == -signal.SIGKILL
    assert "this script has config['lr']=1, but the workers of the trainer 'others'" in seen["learning"].stderr
    assert "NameError" in seen["broken"].stderr
    assert "model 0: weight has shape (2, 1) here and (1, 1)" in seen["shaped"].stderr
    assert "no data" in seen["in_setup"].stderr
    assert re.search(
        r"keep its state, their CPUs and their GPUs for 600 s \(until \d\d:\d\d:\d\d\)", seen["in_setup"].stderr
    )
    assert "cannot pickle" in seen["unpicklable"].stderr
    assert "calls train() outside of a loop over trainer.epochs(n)" in seen["plain"].stderr
    attached, _, rows, recoveries = json.loads(seen["plain"].stdout.splitlines()[-1])
    assert attached and recoveries == [["takeover", 0]]
    assert [row[:3] for row in rows] == [
        ["train", 1, 30],
        ["validate", 1, 30],
        *([k, e, 30 * e] for e in (2, 3) for k in ("train", "validate")),
    ]
    assert [row[3] for row in rows if row[0] == "validate"] == [None, 2, 2]


FAILING_KEEPER = """
import contextlib, ray

class Killer(Killer):
    keeper = None
    def on_progress(self, now):
        if now.progress.step >= 20 and self.keeper is None:
            self.keeper = ray.get_actor("raysgd:keeper", namespace="raysgd")
            ray.kill(self.keeper)
            with contextlib.suppress(ray.exceptions.RayActorError):
                while True:  # until it has ended
                    ray.get(self.keeper.workers.remote())
        super().on_progress(now)
"""


def without_its_keeper(background: Background) -> list[Any]:
    for step in (45, 75):  # the second one has taken the workers over
        operator, killer, loop = cells("keeper", ends=True, step=step)
        folder = written(background, "\n".join([operator, killer, FAILING_KEEPER, loop]))
        ended = background.run("script.py", connected=True, folder=folder)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert "the process that keeps the lease of the trainer 'keeper' has failed: starting another" in ended.stderr
    again = background.run(
        "script.py", connected=True, folder=written(background, "\n".join(cells("keeper", ends=False)))
    )
    assert again.returncode == 0, again.stderr
    found: list[Any] = json.loads(again.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.script(run=without_its_keeper)
def test_a_keeper_that_fails_is_replaced(outcome: Any) -> None:
    attached, weight, _, recoveries = outcome()
    assert attached and recoveries == [["takeover", 0]] * 2
    assert weight == pytest.approx(undisturbed(16)[0], abs=1e-6)


# With the same names, so that the rest of the script is the same.
IN_TENSORFLOW = """
import json, os, signal, sys, time
import numpy as np
import tensorflow as tf
from raysgd.callbacks import Callback
from raysgd.tf import TFTrainer, TrainingOperator

class Line(TrainingOperator):
    def setup(self, config):
        x = np.linspace(-1, 1, 480, dtype="float32")[:, None]
        dense = tf.keras.layers.Dense(1, kernel_initializer="zeros")
        self.model, self.optimizer, self.criterion = self.register(
            models=tf.keras.Sequential([tf.keras.Input((1,)), dense]),
            optimizers=tf.keras.optimizers.SGD(0.05),
            criterion=tf.keras.losses.MeanSquaredError(),
        )[:3]
        data = tf.data.Dataset.from_tensor_slices((x, 2 * x + 5)).batch(16)
        self.register_data(train_dataset=data, validation_dataset=data)

class Model:
    def __init__(self, model):
        self.weight = model.get_weights()[0]

def TorchTrainer(**given):
    class Trainer(TFTrainer):
        def get_model(self):
            return Model(super().get_model())
    return Trainer(**given)
"""
OTHERS = {"horovod": {"more": "backend='horovod'"}, "tensorflow": {"operator": IN_TENSORFLOW}}


def with_another(background: Background, framework: str, step: int) -> list[Any]:
    for ends in (True, False):
        script = "\n".join(cells(f"{framework}{step}", ends=ends, step=step, **OTHERS[framework]))
        done = background.run("script.py", connected=True, folder=written(background, script))
        assert done.returncode == (-signal.SIGKILL if ends else 0), done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.parametrize("framework", [pytest.param("horovod", marks=pytest.mark.horovod), "tensorflow"])
@pytest.mark.parametrize("step", [45, *((2, 30, 60, 80) if NIGHTLY else ())])
@pytest.mark.script(run=with_another)
def test_horovod_and_tensorflow_continue_too(outcome: Any, framework: str, step: int) -> None:
    attached, weight, rows, (first, *more) = outcome()
    assert attached and first == ["takeover", 0]
    assert all(each == ["growth", 0] for each in more), "on a busy machine, a new process can join late"
    assert weight == pytest.approx(undisturbed(16)[0], abs=1e-5)
    assert [row[:3] for row in rows] == [
        [kind, epoch, 30 * epoch] for epoch in (1, 2, 3) for kind in ("train", "validate")
    ]


# Stop a script for longer than its lease, and let it continue, after another one has taken over or not.
STOPPED = """
import json, os, signal, subprocess, sys, time

first = subprocess.Popen([sys.executable, "stopped.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
while os.waitpid(first.pid, os.WNOHANG | os.WUNTRACED)[0] == 0:
    time.sleep(0.1)
time.sleep(35)
again = subprocess.run([sys.executable, "again.py"], capture_output=True, text=True) if sys.argv[1] == "True" else None
os.kill(first.pid, signal.SIGCONT)
out, err = first.communicate()
print(json.dumps([again and [again.stdout, again.stderr], [out, err]]))
"""


def stopped(background: Background, taken_over: bool) -> list[Any]:
    name = f"stopped-{taken_over}"
    operator, killer, loop = cells(name, ends=True)
    folder = written(background, STOPPED)
    stopper = killer.replace("os.kill(os.getpid(), signal.SIGKILL)", "self.stop()") + STOP
    (folder / "stopped.py").write_text("\n".join([operator, stopper, loop]), encoding="utf-8")
    (folder / "again.py").write_text("\n".join(cells(name, ends=False)), encoding="utf-8")
    done = background.run("script.py", str(taken_over), connected=True, folder=folder)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


STOP = """
    stopped = False

    def stop(self):
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.script(run=stopped)
def test_a_script_that_was_stopped_for_longer_than_its_lease(outcome: Any, taken_over: bool) -> None:
    """It continues, unless another script has taken its workers over: then its calls raise an error."""
    again, (printed, logged) = outcome()
    if taken_over:
        assert "SupersededError" in logged, logged
        printed, logged = again
    attached, weight, rows, recoveries = json.loads(printed.splitlines()[-1])
    assert attached is taken_over, logged
    assert weight == pytest.approx(undisturbed(16)[0], abs=1e-6)
    assert [row[:3] for row in rows] == [
        [kind, epoch, 30 * epoch] for epoch in (1, 2, 3) for kind in ("train", "validate")
    ]
    assert all(redone == 0 for _, redone in recoveries), recoveries


# Take the lease of a script that computes something of its own, as if it had been suspended until this moment. Its workers
# would hear of it for ever if it did not end their connections.
IDLE = """
from tests.peek import greet

trainer = TorchTrainer(training_operator_cls=Line, num_workers=2, use_gpu=False, name="idle", orphan_s=600)
for epoch in trainer.epochs(1):
    trainer.train(num_steps=10)
    if sys.argv[1:]:
        open("trained", "w").close()
        while not os.path.exists("taken over"):
            greet(trainer)
            time.sleep(0.1)
    trainer.train()
weight = trainer.get_model().weight.item()
trainer.shutdown()
print(json.dumps([trainer.attached, weight, *([each.reason, each.seconds] for each in trainer.recoveries)]))
"""
TAKEN = """
import json, os, subprocess, sys, time
import ray

first = subprocess.Popen([sys.executable, "idle.py", "waits"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
try:
    while not os.path.exists("trained") and first.poll() is None:
        time.sleep(0.1)
    ray.init(log_to_driver=False)
    keeper = ray.get_actor("raysgd:idle", namespace="raysgd")
    while not ray.get([keeper.perform.remote("__setattr__", "until"), keeper.perform.remote("take")])[1].term:
        time.sleep(0.1)
    again = subprocess.run([sys.executable, "idle.py"], capture_output=True, text=True)
    open("taken over", "w").close()
    print(json.dumps([again.stdout, again.stderr, first.communicate()[0]]))
finally:
    first.kill()
"""


def idle(background: Background) -> list[str]:
    folder = written(background, TAKEN)
    (folder / "idle.py").write_text(OPERATOR + IDLE, encoding="utf-8")
    done = background.run("script.py", connected=True, folder=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.more
@pytest.mark.script(run=idle)
def test_a_script_that_has_lost_its_trainer_keeps_no_worker_until_its_next_call(outcome: Any) -> None:
    printed, logged, first = outcome()
    attached, weight, (reason, seconds) = json.loads(printed.splitlines()[-1])
    assert (attached, reason) == (True, "takeover") and seconds < LEASE_S, logged
    assert weight == pytest.approx(undisturbed(16, epochs=1)[0], abs=1e-6)
    assert "SupersededError" in first


TWICE = """
from raysgd import AutoCheckpoint

class Ends(Callback):
    count = 0

    def on_end(self, *args, **kwargs):
        Ends.count += 1

def make():
    kept = dict(name="twice", orphan_s=600, checkpoints=AutoCheckpoint(path="run"), resume="auto")
    return TorchTrainer(training_operator_cls=Line, num_workers=2, use_gpu=False, callbacks=[Ends()], **kept)

old = make()
for _ in old.epochs(1):
    old.train(num_steps=10)
    break
trainer = make()
for _ in trainer.epochs(1):
    trainer.train()
weight = trainer.get_model().weight.item()
try:
    old.validate()
except RuntimeError as error:
    found = [type(error).__name__, Ends.count]
    print(json.dumps([trainer.attached, weight, *found, trainer.history.rows[-1]["step"]]))
trainer.shutdown()
"""


def twice(background: Background) -> list[Any]:
    done = background.run("script.py", connected=True, folder=written(background, OPERATOR + TWICE))
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.script(run=twice)
def test_a_cell_that_creates_the_trainer_can_be_run_again_in_the_same_kernel(outcome: Any) -> None:
    """The first trainer ends whole: its callbacks have had their last call, and its folder is free."""
    assert outcome() == [True, pytest.approx(undisturbed(16, epochs=1)[0], abs=1e-6), "NotActiveError", 1, 30]


NOTEBOOK = """
import json, sys
import nbclient, nbformat

def run(cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return json.loads(notebook.cells[-1].outputs[-1].text.splitlines()[-1])

first, again = json.load(sys.stdin)
try:
    run(first)
except nbclient.exceptions.DeadKernelError:
    print(json.dumps(run(again)))
"""


def notebook(background: Background) -> list[Any]:
    both = json.dumps([cells("notebook", ends=True), cells("notebook", ends=False, edited=EDITED)])
    script = NOTEBOOK.replace("json.load(sys.stdin)", f"json.loads({both!r})")
    done = background.run("script.py", connected=True, folder=written(background, script))
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.script(run=notebook)
def test_cells_that_are_run_again_after_the_kernel_was_killed_continue(outcome: Any) -> None:
    pytest.importorskip("nbclient")
    attached, weight, rows, recoveries = outcome()
    assert attached and recoveries == [["takeover", 0]]
    assert weight == pytest.approx(undisturbed(16)[0], abs=1e-6)
    assert [row[:3] for row in rows] == [
        [kind, epoch, 30 * epoch] for epoch in (1, 2, 3) for kind in ("train", "validate")
    ]
    assert [row[3] for row in rows if row[0] == "validate"] == [None, 2, 2]


CHANGING = OPERATOR + textwrap.dedent(
    """
    name, ends_in = json.loads(sys.argv[1])
    driver = os.getpid()

    class Scheduled(Line):
        def setup(self, config):
            model = nn.Linear(1, 1)
            nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
            self.model, self.optimizer, self.criterion, _ = self.register(
                models=model, optimizers=optimizer, schedulers=plateau, criterion=nn.MSELoss()
            )
            x = torch.linspace(-1, 1, 480).unsqueeze(1)
            self.register_data(train_loader=DataLoader(TensorDataset(x, 2 * x + 5), batch_size=8, shuffle=False))

    def halve(operator, ends):
        operator.optimizer.param_groups[0]["lr"] *= 0.5
        if ends and operator.world_rank == 0:
            os.kill(driver, signal.SIGKILL)
        return operator.optimizer.param_groups[0]["lr"]

    class Killer(Callback):
        def on_progress(self, now):
            if ends_in == "train" and now.progress.epoch == 2 and now.progress.batches > 1:
                os.kill(driver, signal.SIGKILL)

    trainer = TorchTrainer(
        training_operator_cls=Scheduled, num_workers=2, use_gpu=False, name=name, scheduler_step_freq="manual",
        callbacks=[Killer()],
    )
    for epoch in trainer.epochs(2):
        rates = trainer.apply_all_operators(lambda operator: halve(operator, ends_in == "change" and epoch == 2))
        trainer.update_scheduler(1.0)
        trainer.train()
    rate = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
    model = trainer.get_model()
    print(json.dumps([trainer.attached, rates, rate, model.weight.item(), model.bias.item()]))
    trainer.shutdown()
    """
)


def changes(background: Background) -> dict[str, Any]:
    """Kill a script in a change of its body, and in the call after it, and run it again."""
    found = {}
    for ends_in in ("", "change", "train"):
        folder, given = written(background, CHANGING), f"changes-{ends_in}"
        ended = background.run("script.py", json.dumps([given, ends_in]), connected=True, folder=folder)
        assert ended.returncode == (-signal.SIGKILL if ends_in else 0), ended.stderr
        if ends_in:
            ended = background.run("script.py", json.dumps([given, ""]), connected=True, folder=folder)
            assert ended.returncode == 0, ended.stderr
        found[ends_in] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.script(run=changes)
def test_changes_in_a_body_are_made_once(outcome: Any) -> None:
    found = outcome()
    attached, rates, *expected = found[""]
    assert not attached and expected[0] == [pytest.approx(0.05 * 0.5 * 0.5 * 0.1)] * 2
    assert found["train"] == [True, rates, *expected]
    assert found["change"] == [True, [None, None], *expected], "its values died with the script"
