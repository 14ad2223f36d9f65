"""Callbacks whose work the workers do: averaged weights, learning rates, gradient norms,
throughput. Driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.errors import ConfigError


@dataclass(frozen=True)
class Averaging:
    """Average the weights with this decay."""

    decay: float


@dataclass(frozen=True)
class Measure:
    """Add a metric to the results of `train`."""

    what: Literal["lr", "grad_norm", "seconds"]


class ForOperators(Callback):
    """Refuses trainers of functions, whose optimizer is not known; there users do `instead`."""

    stops_training: ClassVar[bool] = True  # its only errors are mistakes of the user
    instead: ClassVar[str]

    def on_start(self, run: Run) -> None:
        if run.functions:
            raise ConfigError(
                f"{type(self).__name__} is for operators, because raysgd does not see the model and the optimizer of a "
                f"training function: {self.instead}"
            )


class EMA(ForOperators):
    """Averages the weights over the optimizer's steps, with the factor `decay`, on each worker of a
    `TorchTrainer`:

        average = decay * average + (1 - decay) * weights

    `validate()` and `predict()` use the averages, and training continues with the weights. The
    averages begin as a copy of the weights after the first step. Checkpoints and snapshots contain
    them, and `trainer.get_model(averaged=True)` returns a model with them. Buffers, such as the
    statistics of BatchNorm, are not averaged.
    """

    instead = "use torch.optim.swa_utils.AveragedModel, and commit its state_dict() with the model's"

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"decay must be a number of at least 0 and below 1, such as 0.999, got {decay!r}")
        self.on_workers = Averaging(float(decay))


class LearningRateMonitor(ForOperators):
    """Adds `lr` to the results of `train`: the mean over the steps, and `last_lr`. With several
    parameter groups or optimizers there are `lr_0`, `lr_1` and so on, in their order."""

    instead = "report it yourself, raysgd.train.report(lr=scheduler.get_last_lr()[0])"
    on_workers = Measure("lr")


class GradientNormMonitor(ForOperators):
    """Adds `grad_norm` to the results of `train`: the norm of all gradients of the optimizer
    together, averaged over the workers and before clipping, as its mean over the steps and as
    `last_grad_norm`. With several optimizers there are `grad_norm_0`, `grad_norm_1` and so on."""

    instead = "report what torch.nn.utils.clip_grad_norm_ or torch.nn.utils.get_total_norm returns"
    on_workers = Measure("grad_norm")


class Throughput(Callback):
    """Adds to the results of `train`:

        samples_per_second     of all workers together, in the whole call
        data_seconds           in which a worker waited for batches
        communication_seconds  in which it waited for the other workers' gradients, which the backward pass did not hide; as
                               DDP measures it, from some steps on a GPU, and not with other strategies
        compute_seconds        all other seconds of the workers' loop

    The seconds are means over the workers. A round of a training function has only
    `samples_per_second`, if each worker reports as `num_samples` how many it has trained on since
    its last report.
    """

    on_workers = Measure("seconds")

    def extra_metrics(self, result: CallResult) -> Mapping[str, Any]:
        samples = [row.get("num_samples") for row in result.by_worker] if result.kind == "report" else []
        samples = samples or [result.metrics.get("num_samples")]
        counted = [each for each in samples if isinstance(each, (int, float))]
        if result.kind in ("validate", "test") or not counted or len(counted) < len(samples) or not result.seconds:
            return {}
        return {"samples_per_second": sum(counted) / result.seconds}


def averaging_in(on_workers: Iterable[Any]) -> float | None:
    """Find the decay of the weights' average that callbacks want, None if none does."""
    decays = [each.decay for each in on_workers if isinstance(each, Averaging)]
    if len(decays) > 1:
        raise ConfigError(f"callbacks can have one EMA, got {len(decays)}, with decay={' and '.join(map(str, decays))}")
    return decays[0] if decays else None


def measures_in(on_workers: Iterable[Any]) -> frozenset[str]:
    """Collect what the workers measure for callbacks."""
    return frozenset(each.what for each in on_workers if isinstance(each, Measure))
