"""Validations of some batches continue with the rows after those of the last one, whatever fails, joins, leaves or is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import AutoCheckpoint, ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.torch.small import Numbers

ROWS, SIZE, WORKERS = 11, 1, 4  # three steps, of which the last one has no row for one worker
STEPS = (2, 2, 4, 1)  # of the calls
ORDERS = ("rows", "own", "seed")


def loader_of(order: str, workers: int = 1) -> DataLoader[int]:
    """The order of the rows, one of a generator that the loader owns, or one of the trainer's seed."""
    own = torch.Generator().manual_seed(5) if order == "own" else None
    return DataLoader(Numbers(ROWS), SIZE * workers, shuffle=order != "rows", generator=own)


class Counted(TrainingOperator):
    """Measures which rows a call has, and how often: the digits of a sum in base 10."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Linear(1, 1)
        self.model = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))[0]
        self.register_data(train_loader=DataLoader(Numbers(8), 1), validation_loader=loader_of(config["order"]))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.backward(self.model(batch[:, None].float()).mean())
        self.step()
        return {}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.point(f"batch {batch_info['batch_idx']} of call {batch_info.get('call')}")
        if batch_info.get("fails") and self.world_rank == 1:
            raise ZeroDivisionError
        return {"digits": 10.0 ** batch.double().mean()}


def rows_of(result: dict[str, Any]) -> list[int]:
    """Return the rows that a call had."""
    digits = round(result["digits"] * result["num_samples"])
    return [row for row in range(ROWS) for _ in range(digits // 10**row % 10)]


def by_hand(order: str, steps: Sequence[int] = STEPS) -> list[list[int]]:
    """The rows of such calls, one after the other, in a loop over batches of all workers."""
    loader, found = loader_of(order, WORKERS), list[list[int]]()
    batches: Iterator[torch.Tensor] = iter(())
    for count in steps:
        found.append([])
        for _ in range(count):
            batch = next(batches, None)
            if batch is None:
                batches = iter([*loader])
                batch = next(batches)
            found[-1] += batch.tolist()
    return [sorted(each) for each in found]


def validations(
    order: str,
    *faults: Fault,
    between: Callable[[TorchTrainer, int], None] = lambda trainer, number: None,
    **given: Any,
) -> list[list[int]]:
    """Make the calls, and `between` before each of them."""
    with Cluster(faults) as cluster:
        with trainer_of(order, **given) as trainer:
            trainer.train(num_steps=1)
            found = []
            for number, count in enumerate(STEPS):
                between(trainer, number)
                found.append(rows_of(trainer.validate(num_steps=count, info={"call": number})))
        assert not cluster.left
    return found


def trainer_of(order: str, **given: Any) -> TorchTrainer:
    options: dict[str, Any] = {"num_workers": WORKERS, "use_ray": True, "use_gpu": False, "config": {"order": order}}
    options |= {"seed": 3 if order == "seed" else None, "elastic": ElasticConfig(hang_timeout_s=60)}
    return TorchTrainer(training_operator_cls=Counted, **options | given)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """The order of a seed is that of the run that nothing disturbs."""
    return {order: by_hand(order) for order in ("rows", "own")} | {"seed": validations("seed")}


def test_no_worker_needs_a_part_of_each_step(expected: dict[str, list[list[int]]]) -> None:
    assert [validations(order) for order in ORDERS] == [expected[order] for order in ORDERS]
    first = [row for call in expected["seed"] for row in call]
    assert len(first) == sum(len(each) for each in expected["rows"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rank", range(WORKERS))
@pytest.mark.parametrize("at", ["batch 1 of call 0", "batch 0 of call 1", "batch 0 of call 2", "batch 2 of call 2"])
def test_a_kill_within_a_call_changes_no_rows(
    order: str, rank: int, at: str, expected: dict[str, list[list[int]]]
) -> None:
    assert validations(order, Fault("kill", at, rank)) == expected[order]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("victims", [(0,), (1, 3), (0, 1, 2, 3)])
def test_kills_between_calls_change_no_rows(
    order: str, victims: Sequence[int], expected: dict[str, list[list[int]]]
) -> None:
    """If all workers fail, new ones begin with the snapshot of the training before the first call."""

    def kill(trainer: TorchTrainer, number: int) -> None:
        workers = list(Cluster.running.workers)
        for rank in victims if number == 2 else ():
            workers[rank].die("SIGKILL")

    found = validations(order, between=kill)
    if order == "own" and len(victims) == WORKERS:  # this generator's state of validations is lost, too
        assert [len(each) for each in found] == [len(each) for each in expected[order]]
    else:
        assert found == expected[order]


def test_a_call_that_an_error_has_ended_counts_for_none(expected: dict[str, list[list[int]]]) -> None:
    def fail(trainer: TorchTrainer, number: int) -> None:
        with pytest.raises(ZeroDivisionError):
            trainer.validate(num_steps=3, info={"fails": True})

    for order in ORDERS:
        assert validations(order, between=fail) == expected[order]


def test_other_workers_continue(expected: dict[str, list[list[int]]]) -> None:
    def resize(trainer: TorchTrainer, number: int) -> None:
        trainer.resize([4, 2, 3, 1][number])

    for order in ORDERS:
        assert validations(order, between=resize) == expected[order]


def test_a_loaded_state_has_its_place(expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    """Also in another trainer, whose first validation is this one."""
    for order in ("rows", "seed"):
        with Cluster(), trainer_of(order) as trainer:
            for number, count in enumerate(STEPS[:2]):
                assert rows_of(trainer.validate(num_steps=count)) == expected[order][number]
            trainer.save(tmp_path / order)
            for _ in range(2):
                assert rows_of(trainer.validate(num_steps=STEPS[2])) == expected[order][2]
                trainer.load(tmp_path / order)
        with Cluster(), trainer_of(order) as trainer:
            trainer.load(tmp_path / order)
            assert [rows_of(trainer.validate(num_steps=count)) for count in STEPS[2:]] == expected[order][2:]


def test_complete_validations_and_those_of_fit_begin_with_the_first_row() -> None:
    whole, first = [*range(ROWS)], [*range(2 * WORKERS)]
    with Cluster(), trainer_of("rows") as trainer:
        assert rows_of(trainer.validate(num_steps=1)) == [*range(WORKERS)]
        for _ in range(2):
            assert rows_of(trainer.validate()) == whole
            assert rows_of(trainer.validate(num_steps=2)) == first
        history = trainer.fit(3, validation_steps=2, progress=False)
        assert [rows_of(row) for row in history[-5:] if row["kind"] == "validate"] == [first] * 3
        assert rows_of(trainer.validate(num_steps=2)) == first


@pytest.mark.parametrize("order", ["rows", "seed"])
def test_a_script_that_is_started_again_continues(
    order: str, expected: dict[str, list[list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets the results of what the first one had done, and the rows after them."""
    caplog.set_level(logging.ERROR)

    def script(stop: int | None) -> list[list[int]]:
        checkpoints = AutoCheckpoint(path=tmp_path / order, every=1)
        found: list[list[int]] = []
        with Cluster(), trainer_of(order, checkpoints=checkpoints, resume="auto") as trainer:
            for _ in trainer.epochs(1):
                for number, count in enumerate(STEPS):
                    found.append(rows_of(trainer.validate(num_steps=count)))
                    trainer.train(num_steps=1)
                    if number == stop:
                        raise KeyboardInterrupt
        return found

    with pytest.raises(KeyboardInterrupt):
        script(1)
    assert script(None) == expected[order]
