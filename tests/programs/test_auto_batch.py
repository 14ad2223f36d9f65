"""With all defaults, workers that fail and are not replaced change nothing of what the programs learn; or the log says that they do, as
for the DCGAN and a LightningModule, which use each sample once."""

from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.constants import BATCH_SIZE
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault

SIZES = {"length": 16, "width": 16, "heads": 2, "layers": 1, "windows": 18 * 8, "validated": 41, "lr": 0.003}
# module, class, config, and arguments of the trainer: small ones, in single precision.
PROGRAMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt": (
        "Writer",
        {"epochs": 2, BATCH_SIZE: 18, **SIZES},
        {"options": TrainingOptions(accumulate=2, clip_norm=1.0), "scheduler_step_freq": "step"},
    ),
    "resnet": (
        "Stripes",
        {"epochs": 2, BATCH_SIZE: 18, "train": 120, "held_out": 60, "side": 12, "width": 4, "lr": 0.05},
        {"scheduler_step_freq": "epoch"},
    ),
    "text_classifier": (
        "Topics",
        {"epochs": 2, "rows": 120, "batch": 6},
        {"scheduler_step_freq": "batch", "options": TrainingOptions(clip_norm=1.0)},
    ),
}


def trained(name: str, *, kills: int) -> tuple[Any, list[dict[str, Any]], str | None]:
    """Kill a worker in the first epoch, another one between it and its validation, and another one in the next validation: rank 0
    each time, whose running statistics of BatchNorm the others have."""
    operator, config, given = PROGRAMS[name]
    named: Any = getattr(import_module(f"examples.programs.{name}"), operator)

    class Operator(named):  # type: ignore[misc]
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            Cluster.running.point("validate")
            return super().validate_batch(batch, batch_info)

    with (
        Cluster([Fault("kill", "forward", rank=0, step=3)][:kills]) as cluster,
        TorchTrainer(
            training_operator_cls=Operator,
            config=config,
            num_workers=4,
            use_gpu=False,
            elastic=ElasticConfig(grow=False),
            seed=0,
            **given,
        ) as trainer,
    ):
        results = []
        for epoch in range(config["epochs"]):
            results.append(trainer.train())
            if kills == 3 and epoch == 0:
                cluster.workers[0].die("SIGKILL")
            elif kills == 3:
                cluster.faults(Fault("kill", "validate", rank=0))
            results.append(trainer.validate())
        assert not cluster.left and trainer.world_size == 4 - kills
        return trainer.apply_all_operators(left)[0], results, trainer.batch_mode


def left(operator: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and buffers, and the learning rates."""
    (model,), (optimizer,) = operator._registered.models, operator._registered.optimizers
    return dict(model.state_dict()), [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", PROGRAMS)
def test_workers_that_are_not_replaced_change_nothing(name: str) -> None:
    if name == "text_classifier":
        pytest.importorskip("transformers")
    (weights, rates), results, mode = trained(name, kills=3)
    (expected, planned), others, _ = trained(name, kills=0)
    assert mode == "parts" and rates == planned
    for part, value in expected.items():
        torch.testing.assert_close(weights[part], value, rtol=1e-3, atol=2e-5, msg=part)
    # The mean loss of a training in which a worker fails lacks what that worker has measured last.
    for mine, theirs in zip(results[1:], others[1:], strict=True):
        numbers = {key: value for key, value in theirs.items() if isinstance(value, float) and "last_" not in key}
        assert {key: mine[key] for key in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


class Ledger:
    """Adds to an operator the samples that its weights have seen, by their content, of all ranks."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)  # type: ignore[misc]
        self.seen: list[bytes] = []
        self.rows: list[bytes] = []
        for optimizer in self._registered.optimizers:  # type: ignore[attr-defined]
            optimizer.register_step_post_hook(self.note)

    def note(self, *_: Any) -> None:
        """Note the samples of a batch at its first step. Each program makes two."""
        self.seen, self.rows = self.seen + self.rows, []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        rows = [row.numpy().tobytes() for row in (batch[0] if isinstance(batch, list | tuple) else batch)]
        self.rows = list(chain.from_iterable(Cluster.running.together(rows)))
        return super().train_batch(batch, batch_info)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {**(super().state_dict() or {}), "seen": self.seen}  # type: ignore[misc]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "seen"})  # type: ignore[misc]
        self.seen = list(state["seen"])


def rings(folder: Path) -> tuple[Any, dict[str, Any]]:
    from examples.programs.dcgan import Rings

    return Rings, {BATCH_SIZE: 16, "rings": 120, "noise": 8, "width": 4, "lr": 0.002, "pictures": str(folder)}


def net(folder: Path) -> tuple[Any, dict[str, Any]]:
    pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")
    from tests.torch.lightning.modules import Net

    return TrainingOperator.from_ptl(Net), {"count": 120, "batch_size": 4}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (rings, "a backward pass after a step, as in a GAN"),
        (net, "a LightningModule makes its steps itself"),
    ],
)
def test_a_program_that_is_per_worker_uses_each_sample_once_and_the_log_says_so(
    program: Callable[[Path], tuple[Any, dict[str, Any]]],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Lightning sets
    operator, config = program(tmp_path)
    with (
        Cluster([Fault("kill", "applied", rank=1, step=3)]) as cluster,
        TorchTrainer(
            training_operator_cls=type("Noting", (Ledger, operator), {}),
            config=config,
            num_workers=4,
            use_gpu=False,
            elastic=ElasticConfig(grow=False),
        ) as trainer,
    ):
        for epoch in (1, 2, 3):
            assert trainer.train()["num_samples"] == 120
            if epoch == 1:
                cluster.workers[0].die("SIGKILL")
                cluster.faults(Fault("kill", "forward", rank=0, step=5))
        assert not cluster.left and trainer.world_size == 1 and trainer.batch_mode == "per_worker"
        (seen,) = trainer.apply_all_operators(lambda operator: operator.seen)
    assert [len(set(seen[first : first + 120])) for first in range(0, len(seen), 120)] == [120] * 3
    (line,) = [each for each in caplog.messages if "cannot be divided into parts" in each]
    assert reason in line
