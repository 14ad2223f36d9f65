"""One epoch with several numbers of workers.

weights = train(Digits, {"rows": 23, "batch": 4}, [(3, 2), (None, 3)])    three steps of 2 ranks, and the rest of 3
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster

__all__ = ["train", "weights_of"]


def train(
    operator: type[TrainingOperator],
    config: dict[str, Any],
    schedule: Sequence[tuple[int | None, int]],
    *,
    num_workers: int | None = None,
    options: TrainingOptions | None = None,
    batch: Any = "per_worker",
    rows: Any = None,
    look: Callable[[TorchTrainer, list[Any]], Any] = lambda trainer, results: None,
    **arguments: Any,
) -> torch.Tensor:
    """Train one epoch. Each entry of the schedule is a number of steps (None: the rest) and of ranks. Return the weights, which
    must be the same on all ranks. `look` is called with each rank's results after each entry; `rows` replaces the readers of
    Ray Datasets."""
    with Cluster() as cluster:
        if rows is not None:
            cluster.replace(
                {
                    "raysgd.torch.setup.SharedRowReaders": lambda key: rows,
                    "raysgd.torch.setup.local_row_reader": rows,
                }
            )
        with TorchTrainer(
            training_operator_cls=operator,
            config=config,
            num_workers=num_workers or schedule[0][1],
            options=options,
            use_gpu=False,
            elastic=ElasticConfig(batch=batch, grow=False),
            **{"scheduler_step_freq": "batch", **arguments},
        ) as trainer:
            for steps, ranks in schedule:
                if trainer.world_size != ranks:
                    trainer.resize(ranks)
                look(trainer, trainer.train(num_steps=steps, reduce_results=False))
            return weights_of(trainer)


def weights_of(trainer: TorchTrainer) -> torch.Tensor:
    """Return the weights, which must be the same on all ranks."""
    every = trainer.apply_all_operators(
        lambda operator: nn.utils.parameters_to_vector(operator._registered.models[0].parameters()).detach()
    )
    assert all(torch.equal(every[0], each) for each in every)
    return every[0]
