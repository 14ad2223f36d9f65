"""C to C4: raysgd's workers, and its script, are killed. The weights must be those of a run without failures.

python -m tools.gpu.phase_recovery NAME STEP     # the script that kills itself before this step, and is started again
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, Recovery, TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.callbacks import Callback
from tools.gpu import common
from tools.gpu.notes import Notes, first_line, spread

BATCH, STEPS = 840, 40  # of all workers, which may be 1 to 8
SAMPLES = BATCH * STEPS
BEFORE, FORWARD, BETWEEN = "before the forward pass", "in the forward pass", "between two all-reduces"
BEFORE_STEP, AFTER_STEP, OWN = "before the step", "after the step", "before an own all-reduce"
MOMENTS = (BEFORE, BETWEEN, BEFORE_STEP, AFTER_STEP, OWN)
SLOW_S = 0.5
SAME = 1e-9  # other numbers of workers sum float64 in another order


class Net(TrainingOperator):
    """A small network in float64. The worker with rank 1 kills itself at the moments of config["kills"], which has their
    steps, and leaves a file in config["marks"]."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        norms = [nn.BatchNorm1d(32).double() for _ in range(2 if config.get("norm") else 0)]
        model = nn.Sequential(
            nn.Linear(8, 32), *norms[:1], nn.Tanh(), nn.Linear(32, 32), *norms[1:], nn.Tanh(), nn.Linear(32, 1)
        ).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.die(BEFORE_STEP))
        optimizer.register_step_post_hook(lambda *_: self.die(AFTER_STEP))
        middle = [each for each in model if isinstance(each, nn.Linear)][1]
        middle.register_forward_pre_hook(lambda *_: self.die(FORWARD))  # after the first normalization
        first: Any = model[0].weight
        first.register_hook(lambda _: self.die(BETWEEN))  # its gradient is the last one
        registered = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        self.model, self.optimizer, self.criterion = registered
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2)).double()
        data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        self.register_data(train_loader=DataLoader(data, batch_size=config["batch"], shuffle=False))

    def die(self, moment: str) -> None:
        if self.world_rank == 1 and self.config["kills"].get(moment) == self.now:
            try:
                os.close(os.open(Path(self.config["marks"], moment), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # the batch is repeated
            os.kill(os.getpid(), signal.SIGKILL)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.now = batch_info["global_step"]
        if self.world_size < self.config.get("workers", 0):
            time.sleep(SLOW_S)  # so that a replacement joins in this epoch
        self.die(BEFORE)
        result = super().train_batch(batch, batch_info)
        self.die(OWN)
        if self.config.get("own") and self.world_size > 1:
            dist.all_reduce(result["train_loss"].clone())
        return result


def state(operator: Any) -> torch.Tensor:
    """Return weights and Adam's moments as one tensor on the CPU."""
    moments = [each[name] for each in operator.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = [*operator.unwrapped().parameters(), *moments]
    return torch.cat([each.detach().cpu().flatten() for each in parts])


def undisturbed(epochs: int, operator: type[TrainingOperator] = Net, **config: Any) -> list[torch.Tensor]:
    """Return the states after each epoch of one worker in this process, with the batch of all workers."""
    config = {"kills": {}, "batch": BATCH, **config}
    with TorchTrainer(training_operator_cls=operator, config=config, use_gpu=common.gpus() > 0, seed=3) as trainer:
        found = []
        for _ in range(epochs):
            trainer.train()
            found.append(trainer.apply_all_operators(state)[0])
        return found


def group(arguments: Mapping[str, Any], operator: type[TrainingOperator] = Net, **others: Any) -> TorchTrainer:
    """Return a trainer with several workers. `config` gets each worker's part of the batch."""
    workers = arguments["num_workers"]
    config = {"kills": {}, **others.pop("config", {}), "batch": BATCH // workers, "workers": workers}
    elastic = ElasticConfig(hang_timeout_s=30, **others.pop("elastic", {}))
    given = {"seed": 3, "timeout_s": 60, **arguments, **others}
    return TorchTrainer(training_operator_cls=operator, config=config, elastic=elastic, **given)


def killed(notes: Notes, name: str, arguments: Mapping[str, Any], moments: Sequence[str], **others: Any) -> None:
    """Kill a worker in each epoch, at one of the moments each; note the recoveries, and how the states differ. Fewer workers
    normalize fewer samples together, so with SyncBatchNorm the states only have to be equal among the workers."""
    config = dict(others.pop("config", {}))
    options = others.get("options")
    alone = options is not None and options.sync_batchnorm
    expected = [None] * len(moments) if alone else undisturbed(len(moments), **config)
    kills = {moment: STEPS * epoch + 7 for epoch, moment in enumerate(moments)}
    with tempfile.TemporaryDirectory() as marks:
        config |= {"kills": kills, "marks": marks}
        began = time.monotonic()
        with group(arguments, config=config, **others) as trainer:
            trainer.apply_all_workers(os.getpid)
            differs, among = None, 0.0
            notes.add(
                f"{name}: until {arguments['num_workers']} workers are ready", round(time.monotonic() - began, 2), "s"
            )
            for moment, right in zip(moments, expected, strict=False):
                if notes.left() < 5:
                    notes.add(f"{name}: killed {moment}", "not run", note="no time left")
                    break
                seen = len(trainer.recoveries)
                try:
                    trainer.train()
                except Exception as error:
                    return notes.add(f"{name}: killed {moment}", "an error", note=first_line(error))
                differs, among = difference(trainer, right)
                note_recovery(notes, f"{name}: killed {moment}", trainer.recoveries[seen:], differs)
            text = f"the workers' states {f'differ by {among:.1g}' if among else 'are equal'}"
            notes.add(f"{name}: after all epochs, against no failure", same(differs), note=text)
            note_growth(notes, name, trainer.recoveries, Path(marks))


def difference(trainer: TorchTrainer, right: torch.Tensor | None) -> tuple[float | None, float]:
    """Return how much the workers' states differ from the right one, if there is one, and from each other."""
    found = trainer.apply_all_operators(state)
    from_right = None if right is None else max(float((each - right).abs().max()) for each in found)
    return from_right, max(float((each - found[0]).abs().max()) for each in found)


def same(differs: float | None) -> str:
    if differs is None:
        return "the workers decide the numbers"
    return "same" if differs <= SAME else f"differs by {differs:.2g}"


def note_recovery(notes: Notes, what: str, recoveries: Sequence[Recovery], differs: float | None) -> None:
    deaths = [each for each in recoveries if each.reason not in ("growth", "batch")]
    if not deaths:
        return notes.add(what, "no recovery", note=same(differs))
    (first, *more) = deaths
    place = "in place" if first.in_place else "not in place"
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in first.phases.items())
    text = f"{same(differs)}; {place}, {first.batches_redone} batches redone; {phases}"
    text += f"; then {', '.join(each.reason for each in more)}" if more else ""
    notes.add(what, round(first.seconds, 3), "s", text, reason=first.reason, detail_of=first.detail)


def note_growth(notes: Notes, name: str, recoveries: Sequence[Recovery], marks: Path) -> None:
    """Note how long after the kills there were all workers again, and how long each growth stopped the others."""
    kills = sorted(mark.stat().st_mtime for mark in marks.iterdir())
    growths = [each for each in recoveries if each.reason == "growth"]
    after = [min(later) - kill for kill in kills if (later := [each.time for each in growths if each.time > kill])]
    number = f"{len(after)} of {len(kills)} kills"
    notes.add(f"{name}: from a kill to all workers", spread(after, 2), "s", number)
    notes.add(f"{name}: a growth stops the others for", spread([each.seconds for each in growths], 3), "s")


def moments(notes: Notes) -> None:
    """C: three workers with NCCL; kills at five kinds of moments, and in SyncBatchNorm."""
    spares: dict[str, Any] = {"hot_spares": {0: 2, 1: 4}.get(common.gpus(), 0)}
    buckets = TrainingOptions(ddp_args={"bucket_cap_mb": 0.001})
    killed(notes, "nccl", common.group_arguments(), MOMENTS, config={"own": True}, options=buckets, elastic=spares)
    if notes.small:
        return notes.add("nccl, SyncBatchNorm", "not run", note="torch has none for CPUs")
    options = TrainingOptions(sync_batchnorm=True, ddp_args={"bucket_cap_mb": 0.001})
    config = {"norm": True}
    killed(notes, "nccl, SyncBatchNorm", common.group_arguments(), [FORWARD], config=config, options=options)


def gloo(notes: Notes) -> None:
    """C2: the same with gloo and two workers."""
    killed(notes, "gloo", common.group_arguments(2, "gloo"), [BEFORE, BEFORE_STEP])


# -- the script is killed -----------------------------------------------------------------------------------------


class Killer(Callback):
    """Kills this script when the workers have come to a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_progress(self, now: Any) -> None:
        if now.kind == "train" and now.progress.step >= self.step > 0:
            os.kill(os.getpid(), signal.SIGKILL)


def takeover(notes: Notes) -> None:
    """C4: the script of a trainer with a name is killed, and started again."""
    expected = undisturbed(3)[-1]
    command = [sys.executable, "-m", "tools.gpu.phase_recovery", f"gpu-{os.getpid()}"]
    first = subprocess.run([*command, str(STEPS + 5)], timeout=notes.left(), check=False)
    began = time.monotonic()
    again = subprocess.run([*command, "0"], timeout=notes.left(), check=False, stdout=subprocess.PIPE, text=True)
    lines = again.stdout.splitlines()
    if first.returncode != -signal.SIGKILL or again.returncode or not lines:
        return notes.add("script killed", "an error", note=f"status {first.returncode}, then {again.returncode}")
    found = json.loads(lines[-1])
    differs = float((torch.tensor(found["state"], dtype=torch.float64) - expected).abs().max())
    redone = ", ".join(f"{reason}: {count} batches redone" for reason, count in found["recoveries"])
    notes.add("script killed, started again: until attached", round(found["attached"] - began, 2), "s", redone)
    notes.add("script killed, started again: after 3 epochs", same(differs))


def be_script(name: str, step: int) -> None:
    os.environ.pop("RAY_ADDRESS", None)
    with group(common.group_arguments(), name=name, orphan_s=60, callbacks=[Killer(step)]) as trainer:
        attached = time.monotonic()
        for _ in trainer.epochs(3):
            trainer.train()
        (found, *_) = trainer.apply_all_operators(state)
        recoveries = [(each.reason, each.batches_redone) for each in trainer.recoveries]
    print(json.dumps({"attached": attached, "state": found.tolist(), "recoveries": recoveries}))


if __name__ == "__main__":
    from tools.gpu.phase_recovery import be_script  # so that workers find the operator in a module, not in a script

    be_script(sys.argv[1], int(sys.argv[2]))
