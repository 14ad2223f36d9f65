"""Training functions survive the faults that operators survive. `LedgerOperator`'s epoch, written as a function, keeps a record with its
weights of the samples that they have seen. Functions of the simulation have no weights; tests/local has operators."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, train
from raysgd.train import Trainer
from tests.faults import Fault, Numbered, once, until

pytestmark = pytest.mark.elastic

WORKERS, SAMPLES = 3, 240
CHECKPOINT_EVERY = 6
ELASTIC = ElasticConfig(hang_timeout_s=10, grow=True)


@dataclass(frozen=True)
class Scenario:
    """The faults of an epoch, and what follows. `along` are ranks that are killed together with the first one."""

    faults: tuple[Fault, ...]
    failed: int = 1
    along: tuple[int, ...] = ()
    reason: str = "worker death"
    in_place: bool = True


SCENARIOS = {
    "killed before a step": Scenario((Fault(1, 5),)),
    "killed in a step": Scenario((Fault(0, 6, where="backward"),)),
    "killed after a step": Scenario((Fault(2, 7, where="after"),)),
    "two killed at once": Scenario((Fault(0, 8),), failed=2, along=(2,)),
    "two killed one after the other": Scenario((Fault(2, 4), Fault(0, 9)), failed=2),
    "killed while a recovery runs": Scenario((Fault(2, 4), Fault(1, 0, where="resized")), failed=2),
    "stopped": Scenario((Fault(1, 5, "stop"),), reason="hang"),
    "all killed": Scenario((Fault(0, 9),), failed=3, along=(1, 2), in_place=False),
}


class Run:
    """A trainer whose function survivors continue with `train.elastic`, and new workers, if no worker survives, from a checkpoint."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks / "marks"
        self.marks.mkdir(parents=True)
        self.trainer = Trainer("torch", num_workers=WORKERS, logdir=marks / "logs", elastic=ELASTIC)
        self.trainer.start()
        self.epochs = 0

    def begin(self) -> list[int]:
        """Complete the group. Return the process ids by rank."""
        if len(self.trainer.worker_group) < WORKERS:
            self.trainer.run(until_complete)
        return self.trainer.worker_group.execute(os.getpid)

    def epoch(self, *faults: Fault, checkpoint: Any = None) -> list[list[int]]:
        """Train to the end of the epoch. Return the samples that each rank's weights have seen."""
        self.epochs += 1
        config = {"faults": [replace(each, tag=f"-{self.epochs}") for each in faults], "marks": str(self.marks)}
        return self.trainer.run(one_epoch, config, checkpoint=checkpoint)


def until_complete() -> None:
    """Wait until all workers have joined, and let new ones join meanwhile."""
    state = train.elastic({"looks": 0})
    while train.world_size() < WORKERS:
        state["looks"] += 1
        assert state["looks"] < 2400, "no worker joined within two minutes"
        time.sleep(0.05)
        state.commit()


def beginning() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Numbered(SAMPLES), batch_size=4, shuffle=True, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "loader": train.torch.elastic_data_loader(loader)}


def one_epoch(config: dict[str, Any]) -> list[int]:
    """`LedgerOperator`'s epoch, written as a function."""
    found = train.load_checkpoint() or {"ledger": [], "steps": 0}
    parts = beginning()
    for name in parts.keys() & found.keys():
        parts[name].load_state_dict(found[name])
    state = train.elastic({**parts, "ledger": found["ledger"], "steps": found["steps"]})

    def fault(where: str) -> None:
        for each in config["faults"]:
            if (each.where, each.rank) == (where, train.world_rank()) and each.step <= state["steps"] + 1:
                each.fire(config["marks"])

    if train.world_size() < WORKERS:
        fault("resized")
    prepared, optimizer = train.torch.prepare_model(parts["model"]), parts["optimizer"]
    for index, x, y in parts["loader"]:
        fault("before")
        everybody: list[Any] = [None] * train.world_size()
        dist.all_gather_object(everybody, index.tolist())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(prepared(x.double()), y.double())
        fault("backward")
        loss.backward()
        optimizer.step()
        fault("after")
        state["ledger"] = [*state["ledger"], *sorted({each for part in everybody for each in part})]
        state["steps"] += 1
        state.commit()
        if state["steps"] % CHECKPOINT_EVERY == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            train.save_checkpoint(**states, ledger=state["ledger"], steps=state["steps"])
    ledger: list[int] = state["ledger"]
    return ledger


# The other rows are in `make more`: tests/simulation has them, too.
FIRST = ("killed before a step", "killed while a recovery runs", "stopped", "all killed")


@pytest.fixture(scope="module")
def shared(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("functions"))
    yield run
    run.trainer.shutdown()


def assert_exact(ledgers: list[list[int]]) -> None:
    assert ledgers and all(ledger == ledgers[0] for ledger in ledgers), "every rank holds the same"
    assert Counter(ledgers[0]) == Counter(range(SAMPLES)), "the weights have seen each sample exactly once"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.more) for name in SCENARIOS]
)
def test_a_fault_in_an_epoch(shared: Run, name: str) -> None:
    scenario = SCENARIOS[name]
    processes = shared.begin()
    first, *more = scenario.faults
    first = replace(first, others=tuple(processes[rank] for rank in scenario.along))
    before = len(shared.trainer.recoveries)

    assert_exact(shared.epoch(first, *more))
    # Replacements may have joined before the epoch ended; that is not a failure.
    failures = [each for each in shared.trainer.recoveries[before:] if each.reason != "growth"]
    assert {failure.reason for failure in failures} == {scenario.reason}
    assert sum(len(failure.removed_ranks) for failure in failures) == scenario.failed
    assert all(failure.in_place for failure in failures) == scenario.in_place
    assert failures[0].world_size_before == WORKERS
    if scenario.failed == 1:
        assert failures[0].removed_ranks == (first.rank,)


def test_a_user_error(shared: Run) -> None:
    """It reaches the user with its rank, no worker fails, and training can continue from a checkpoint."""
    shared.begin()
    before = len(shared.trainer.recoveries)
    with pytest.raises(ZeroDivisionError, match="planned in raise") as caught:
        shared.epoch(Fault(1, 9, "raise", "backward"))
    assert caught.value.raysgd_rank == 1  # type: ignore[attr-defined]
    assert "rank 1" in str(caught.value.__cause__) and ".py" in str(caught.value.__cause__)
    assert len(shared.trainer.recoveries) == before
    assert_exact(shared.epoch(checkpoint=shared.trainer.latest_checkpoint))


def nine_steps(config: dict[str, Any]) -> list[tuple[int, ...]]:
    """Commit each step, and save step 5. A first worker `leaves` at step 3, and one is killed at step 7. Return where each
    attempt began: the loaded step, and that of the commit."""
    loaded = (train.load_checkpoint() or {"step": 0})["step"]
    state = train.elastic({"step": loaded})
    marks = Path(config["marks"])
    if train.world_rank() == 0:
        with open(marks / "begun", "a", encoding="utf-8") as begun:
            begun.write(f"{loaded} {state['step']}\n")
    while state["step"] < 9:
        state["step"] += 1
        state.commit()
        if state["step"] == 3 and config["leaves"] and once(marks / "left"):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in until(lambda: False):
                state.commit()  # until a new worker is ready
        if state["step"] == 5:
            train.save_checkpoint(step=5)
        if state["step"] == 7 and not (marks / "killed").exists():
            (marks / str(train.world_rank())).touch()
            for _ in until(lambda: train.world_rank() == train.world_size() - 1 and (marks / "0").exists()):
                time.sleep(0.1)  # rank 0 of two is stopped here
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return [tuple(map(int, line.split())) for line in (marks / "begun").read_text(encoding="utf-8").splitlines()]


@pytest.mark.more
@pytest.mark.parametrize(("workers", "leaves", "begun"), [(2, False, (5, 7)), (1, True, (5, 5))], ids=["one", "all"])
def test_a_commit_serves_survivors_and_a_newer_checkpoint_those_who_have_none(
    ray_cluster: None, tmp_path: Path, workers: int, leaves: bool, begun: tuple[int, int]
) -> None:
    """A worker that has left has given its commit to the next one. That is not newer than what this saves later."""
    elastic = replace(ELASTIC, grow=leaves)
    with Trainer("none", num_workers=workers, logdir=tmp_path / "logs", elastic=elastic) as trainer:
        found = trainer.run(nine_steps, {"marks": str(tmp_path), "leaves": leaves})[0]
        assert found[0] == (0, 0) and found[-1] == begun, found
        if leaves:
            assert [each.reason for each in trainer.recoveries] == ["preemption", "worker death"]
            assert found[1] == (0, 3)
