"""Ranks as threads of this process: real replicas, feeds and weights of gradients, with an exchange of gradients in memory.

weights = train(Digits, {"rows": 23, "batch": 4}, [(3, 2), (None, 3)])    three steps of 2 ranks, and the rest of 3
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from raysgd import ElasticConfig, TrainingOptions
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.torch import TrainingOperator
from raysgd.torch.foreign import run_after_backward
from raysgd.torch.replica import TorchReplica, TorchReplicaFactory
from raysgd.torch.settings import TorchSettings
from raysgd.torch.wrapping import Exchange

LIMIT_S = 60


class ThreadGroup:
    """A process group whose ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=LIMIT_S)
        self.brought: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self._joined = 0
        self._order: Any = None

    def join(self) -> int:
        self._joined += 1
        return self._joined - 1

    def agree(self, order: Any, recipe: Any, *, first: bool) -> tuple[Any, None]:
        """Return rank 0's order on all ranks."""
        self._order = order if first else self._order
        self.barrier.wait()
        return self._order, None


class Mean(Exchange):
    """Averages gradients over the ranks when a backward pass ends, as DistributedDataParallel does."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group, self._rank = group, group.join()
        self._arrived = self._held = False

    def prepare(self, models: list[Any], optimizers: list[Any]) -> None:
        self._parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        if not self._arrived and not self._held:
            self._arrived = True
            run_after_backward(self._exchange)

    def hold(self, on: bool) -> None:
        self._held = on

    def _exchange(self) -> None:
        self._arrived = False
        parameters, group = self._parameters, self._group
        group.brought[self._rank] = [p.grad.clone() for p in parameters]
        group.barrier.wait()
        means = [torch.stack(each).mean(0) for each in zip(*group.brought, strict=True)]
        group.barrier.wait()
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad.copy_(mean)


def train(
    operator: type[TrainingOperator],
    config: dict[str, Any],
    schedule: Sequence[tuple[int | None, int]],
    *,
    num_workers: int | None = None,
    options: TrainingOptions | None = None,
    batch: Any = "per_worker",
    look: Callable[[list[TorchReplica], list[Any]], Any] = lambda replicas, results: None,
    **settings: Any,
) -> torch.Tensor:
    """Train one epoch. Each entry of the schedule is a number of steps (None: the rest) and of ranks. Return the weights, which
    must be the same on all ranks. `look` is called with the replicas and their results after each entry."""
    state: Any = None
    elastic = ElasticConfig(batch=batch, lr=settings.pop("lr", None))
    for number, (steps, ranks) in enumerate(schedule):
        group = ThreadGroup(ranks)
        given = TorchSettings(
            distributed=True,
            num_workers=num_workers or schedule[0][1],
            options=options or TrainingOptions(parallel="ddp"),
            wrap_ddp=False,
            exchange=lambda group=group: Mean(group),
            elastic=elastic,
            **{"scheduler_step_freq": "batch", **settings},
        )
        factory = TorchReplicaFactory(operator, config, given)
        replicas = [factory(RankInfo(world_rank=rank, world_size=ranks), Control()) for rank in range(ranks)]
        for replica in replicas if state is not None else []:
            replica.load(state)

        def run(replica: Any, number: int = number, steps: Any = steps, group: ThreadGroup = group) -> Any:
            try:
                return replica.train(number + 1, steps, False, None)
            except BaseException:
                group.barrier.abort()
                raise

        with patch("raysgd.torch.data.sources.agree", group.agree), ThreadPoolExecutor(ranks) as threads:
            futures = [threads.submit(run, replica) for replica in replicas]
        errors = [each.exception() for each in futures]
        own = [each for each in errors if each is not None and not isinstance(each, threading.BrokenBarrierError)]
        if own or any(errors):
            raise (own or [each for each in errors if each])[0]
        look(replicas, [each.result() for each in futures])
        vectors = [weights_of(replica) for replica in replicas]
        assert all(torch.equal(vectors[0], each) for each in vectors)
        state = bytes(replicas[0].state())
    return vectors[0]


def weights_of(replica: Any) -> torch.Tensor:
    return nn.utils.parameters_to_vector(replica.operator._parts.models[0].parameters()).detach().clone()
