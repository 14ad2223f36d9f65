"""Workers with shards of a model whose driver ends: replicas of the next one's code continue with them. Without Ray and an engine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from raysgd.core.outcomes import Failed, Interrupted, Left, Ok, Outcome
from raysgd.core.protocols import Call
from raysgd.core.ranks import assign_ranks
from raysgd.core.shard_copies import agreed, newest_complete
from raysgd.torch import TrainingOptions
from raysgd.torch.process_group import TorchBackend
from raysgd.torch.replica import TorchReplica
from raysgd.workers.calls import with_value
from tests.forked_workers import fresh_processes
from tests.peek import models_of, parts_of
from tests.replicas import hosted, sharded_factory, torch_rank, train_call
from tests.speed.test_fsdp import Layers, same

pytestmark = pytest.mark.more

LIMIT_S = 200.0


class Edited(Layers):
    """The next script's operator, which can raise an error when it takes the state."""

    def load_state_dict(self, state: Any) -> None:
        if self.config.get("fails"):
            raise ValueError("an error in the new code")


# -- a worker's process -------------------------------------------------------------------------------


def serve(backend: TorchBackend, orders: Connection) -> None:
    torch.set_num_threads(1)
    host = hosted(backend)
    with suppress(EOFError):
        while True:
            verb, arguments = orders.recv()
            if verb == "begin again":
                host.perform("close", {})
                host = hosted(backend)
            orders.send(Ok() if verb == "begin again" else with_value(host.perform(verb, arguments)))


class Worker:
    def __init__(self, backend: TorchBackend) -> None:
        context = fresh_processes()
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(backend, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, verb: str, **arguments: Any) -> None:
        self._orders.send((verb, arguments))

    def end(self) -> Outcome | None:
        """Return the outcome, None if the process has ended."""
        assert self._orders.poll(LIMIT_S), "the worker has not answered"
        try:
            outcome: Outcome = self._orders.recv()
        except EOFError:
            return None
        return outcome

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._orders.close()


class Workers:
    """Four workers with two copies of two shards, and what their drivers ask of them."""

    def __init__(self) -> None:
        self.backend = TorchBackend("gloo", join_s=120.0, collective_s=LIMIT_S, replicas=2)
        self.all: list[Worker] = []

    def begin(self) -> None:
        """Start again, also with the processes that are left."""
        self.all += [Worker(self.backend) for _ in range(4 - len(self.all))]
        self._generation = 0
        self.values("begin again")
        self.join()
        factory = sharded_factory(Layers, {"batch": 3}, 4)
        infos = assign_ranks(["node"] * 4, generation=self._generation)
        for worker, rank_info in zip(self.all, infos, strict=True):
            worker.begin("build", factory=factory, rank_info=rank_info)
        assert all(isinstance(worker.end(), Ok) for worker in self.all)

    def ask(self, workers: Sequence[Worker], verb: str, **arguments: Any) -> list[Outcome | None]:
        for worker in workers:
            worker.begin(verb, **arguments)
        return [worker.end() for worker in workers]

    def values(self, verb: str, **arguments: Any) -> list[Any]:
        outcomes = self.ask(self.all, verb, **arguments)
        assert all(isinstance(each, Ok) for each in outcomes), outcomes
        return [each.value for each in outcomes if isinstance(each, Ok)]

    def run(self, call: Call) -> list[Any]:
        return self.values("run", call=call)

    def join(self) -> list[Outcome | None]:
        self._generation += 1
        infos = assign_ranks(["node"] * len(self.all), generation=self._generation)
        for worker, rank_info, settings in zip(self.all, infos, self.backend.plan(infos), strict=True):
            worker.begin("join", rank_info=rank_info, settings=settings)
        return [worker.end() for worker in self.all]

    def attach(self, operator: type[Layers] = Edited, **config: Any) -> list[Left]:
        """Become the next driver of these workers."""
        return self.values("attach", factory=sharded_factory(operator, {"batch": 3, **config}, 4))

    def fail(self, *ranks: int) -> None:
        for rank in ranks:
            self.all[rank].kill()
        self.all = [each for rank, each in enumerate(self.all) if rank not in ranks]

    def weights(self) -> torch.Tensor:
        found: torch.Tensor = self.run(Call(weights))[0]
        return found


@pytest.fixture(scope="module")
def processes() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.fail(*range(len(made.all)))


@pytest.fixture
def workers(processes: Workers) -> Iterator[Workers]:
    processes.begin()
    yield processes
    processes.backend.plan([])


# -- calls of a replica -------------------------------------------------------------------------------


def weights(replica: TorchReplica) -> torch.Tensor | None:
    (state,) = replica.full_state()["models"]
    return torch.cat([each.flatten().float() for each in state.values()]) if replica.rank == 0 else None


def fail_after_agreement(replica: TorchReplica) -> None:
    """Let rank 2 fail in the next step, when all ranks have agreed on it, so that only the others make it."""

    def fail(*_: Any) -> None:
        raise torch.distributed.DistBackendError("a peer failed")

    if replica.rank == 2:
        replica.operator.optimizer.register_step_pre_hook(fail)


def end_when_sharded(replica: TorchReplica) -> None:
    """Let rank 2 end when the next generation has new shards, and its ranks use them for the first time."""
    shards = parts_of(replica.operator).shards
    assert shards is not None
    if replica.rank == 2:
        shards.full_parameters = lambda: os._exit(1)  # type: ignore[method-assign]


# -- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    """Return the weights of a worker alone after an epoch."""
    alone = torch_rank(Layers, {"batch": 12}, options=TrainingOptions(clip_norm=0.5))
    alone.train(1)
    (model,) = models_of(alone.operator)
    return torch.cat([each.flatten().float() for each in model.state_dict().values()])


def continue_to_the_end(workers: Workers, undisturbed: torch.Tensor, *, call: int = 2) -> None:
    assert all(isinstance(each, Ok) for each in workers.join())
    workers.run(train_call(call))
    assert same(workers.weights(), undisturbed)
    assert workers.run(Call(name_of_operator)) == ["Edited"] * len(workers.all)


def name_of_operator(replica: TorchReplica) -> str:
    return type(replica.operator).__name__


@pytest.mark.parametrize("lost", [(), (1,), (0, 3)], ids=["none", "one", "two with different shards"])
def test_training_continues_with_the_shards(lost: tuple[int, ...], workers: Workers, undisturbed: torch.Tensor) -> None:
    workers.run(train_call(1, num_steps=2))
    workers.fail(*lost)
    found = workers.attach()
    held = [each.holding.copies for each in found if each.holding]
    agreement = agreed(held)
    assert agreement is not None and sorted(agreement.holders) == list(range(4 - len(lost)))
    assert [left.generations for left in found] == [[1]] * len(found)
    continue_to_the_end(workers, undisturbed)


def test_the_random_numbers_continue(workers: Workers) -> None:
    workers.run(Call(random_numbers))
    workers.attach()
    workers.join()
    drawn = workers.run(Call(random_numbers))
    workers.begin()
    assert [workers.run(Call(random_numbers)), workers.run(Call(random_numbers))][1] == drawn


def random_numbers(*_: Any) -> list[float]:
    return list(torch.rand(3).tolist())


def test_a_step_that_one_rank_has_not_made(workers: Workers, undisturbed: torch.Tensor) -> None:
    """It makes it with its gradients, which its replica takes with it."""
    workers.run(train_call(1, num_steps=1))
    workers.run(Call(fail_after_agreement))
    outcomes = workers.ask(workers.all, "run", call=train_call(2))
    assert all(isinstance(each, Interrupted) for each in outcomes)
    copies = [each.holding.copies[0] for each in workers.attach() if each.holding]
    assert [(each.applied, each.ready) for each in copies] == [(2, False), (2, False), (1, True), (2, False)]
    continue_to_the_end(workers, undisturbed)


def test_drivers_that_end_before_they_have_formed_a_generation(workers: Workers, undisturbed: torch.Tensor) -> None:
    """The first one ends at once, the second by an error of its code when the workers have their shards again."""
    workers.run(train_call(1, num_steps=2))
    workers.attach()
    workers.attach(fails=True)
    assert all(isinstance(each, Failed) for each in workers.join())
    workers.attach()
    continue_to_the_end(workers, undisturbed)


def test_a_snapshot_that_neighbours_keep(workers: Workers, undisturbed: torch.Tensor) -> None:
    """Both workers with the second shard fail. Others keep it as it was when the call before had ended."""
    workers.run(train_call(1, num_steps=1))
    workers.run(train_call(2, num_steps=1))
    workers.fail(1, 3)
    held = [each.holding for each in workers.attach() if each.holding]
    assert agreed([each.copies for each in held]) is None
    newest = newest_complete(each for holding in held for each in holding.snapshots)
    assert newest is not None and newest.progress.step == 2
    workers.run(Call(TorchReplica.restore_snapshot, {"held": newest.held}))
    continue_to_the_end(workers, undisturbed, call=3)


def test_the_shapes_of_parameters_must_be_the_same(workers: Workers, undisturbed: torch.Tensor) -> None:
    workers.run(train_call(1, num_steps=2))
    outcomes = workers.ask(workers.all, "attach", factory=sharded_factory(Wider, {"batch": 3}, 4))
    texts = [str(each.error) for each in outcomes if isinstance(each, Failed)]
    assert len(texts) == 4 and all("model 0: 0.0.weight has shape (7, 4) here and (7, 3)" in each for each in texts)
    workers.attach()
    continue_to_the_end(workers, undisturbed)


class Wider(Layers):
    def register(self, *, models: Any, **given: Any) -> Any:
        models[0][0] = torch.nn.Linear(4, 7)
        optimizer = torch.optim.Adam([each for each in models.parameters() if each.requires_grad])
        return super().register(models=models, **{**given, "optimizers": optimizer})


def test_a_worker_that_fails_when_the_others_have_their_new_shards(workers: Workers, undisturbed: torch.Tensor) -> None:
    """They continue with those of the generation before."""
    workers.run(train_call(1, num_steps=2))
    workers.run(Call(end_when_sharded))
    workers.fail(1)
    outcomes = workers.join()
    assert [type(each) for each in outcomes] == [Interrupted, type(None), Interrupted]
    workers.fail(1)
    workers.join()
    workers.run(train_call(2))
    assert same(workers.weights(), undisturbed)
