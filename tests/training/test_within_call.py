"""When the ranks make checkpoints in the middle of a call, which stay, and what a checkpoint has of its call."""

import json
import math
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raysgd import AutoCheckpoint, ConfigError
from raysgd.core.measures.metrics import Measured, WeightedMean, merge_measured
from raysgd.core.measures.progress import Progress
from raysgd.replica.steps.asking import Asking, Question, Reply
from raysgd.replica.writing import save
from raysgd.trainer.auto_checkpoint import measured_in, numbers_of
from raysgd.trainer.within_call import Contents, Schedule, WithinCall
from tests.peek import delay_saves, finish_saves, leave_no_checkpoint_out, saves_within_again
from tests.torch.small import Line, inline, weights

STEPS = 6


class Rank(SimpleNamespace):
    """A rank whose driver wants a checkpoint, and has ended when it begins."""

    def __init__(self, *, together: bool, error: Exception) -> None:
        def gone(*_: Any) -> None:
            raise ConnectionRefusedError("nothing listens there")

        def writer(later: bool) -> Any:
            if not isinstance(error, ConnectionError):
                raise error
            return lambda file: None

        control = SimpleNamespace(
            ask=lambda *_: Reply(4, {"draft": None, "transfers": [""], "later": True}), giving=gone
        )
        super().__init__(control=control, rank=0, progress=Progress(step=2), saves_together=together)
        self.checkpoint_writer, self.share = writer, lambda: None

    def partial(self) -> Measured:
        return Measured({}, 0)


def test_a_driver_that_ends_while_a_checkpoint_begins_ends_no_call() -> None:
    asking = Asking(Rank(together=False, error=ConnectionError()), save, transfer="", step=2)
    asking.ask()
    assert asking.step == math.inf


@pytest.mark.parametrize(("together", "error"), [(True, ConnectionError()), (False, OSError("of a state_dict"))])
def test_other_errors_of_a_checkpoint_end_the_call(together: bool, error: Exception) -> None:
    with pytest.raises(OSError, match=r"nothing listens|of a state_dict"):
        Asking(Rank(together=together, error=error), save, transfer="", step=2).ask()


def asked(within: WithinCall, step: int, rank: int = 0) -> Any:
    return within.answer(Question(rank, Progress(step=step), Measured({"num_samples": 4}, 8)))


class Started:
    """Notes the checkpoints that begin. While `busy`, none does."""

    def __init__(self, every: Any, ranks: int = 2) -> None:
        self.now, self.busy, self.ranks = 0.0, False, ranks
        self.steps: list[int] = []
        self.errors: list[BaseException] = []
        self.schedule = Schedule(every, lambda: self.now)

    def part(self, step: int) -> WithinCall:
        return WithinCall(self.schedule, self._start, self.errors.append, step=step, ranks=self.ranks, before=[])

    def _start(self, contents: Contents) -> Any:
        if self.busy:
            return None
        self.steps.append(contents.progress.step)
        return {}


def test_all_ranks_get_the_same_reply() -> None:
    """Although time passes between their questions, and one has asked after a later step before."""
    started = Started(10.0)
    within = started.part(0)
    replies = {}
    for step in (1, 3, 7):
        for rank in (0, 1):
            started.now += 6.0
            replies[step, rank] = asked(within, step, rank)
        assert replies[step, 0] == replies[step, 1]
    assert started.steps == [3, 7]


@pytest.mark.parametrize("every", [4, 7])
def test_a_number_of_batches_means_its_multiples(every: int) -> None:
    started = Started(every, ranks=1)
    step = started.part(5).first
    for _ in range(3):
        step = asked(started.part(step - 1), step).step
    assert started.steps == [each for each in range(6, 40) if each % every == 0][:3]


def test_seconds_are_few_questions() -> None:
    """10 batches take a second: about one question for each doubling, and a checkpoint every 30 s, at most a batch late."""
    started = Started(30.0, ranks=1)
    within, step, questions = started.part(0), 0, 0
    ask_at: float = within.first
    while step < 1000:
        step += 1
        started.now += 0.1
        if step >= ask_at:
            ask_at, questions = asked(within, step).step, questions + 1
    assert len(started.steps) == 3 and questions < 40
    assert all(each - before <= 302 for before, each in zip([0, *started.steps], started.steps, strict=False))


def test_what_is_not_written_yet_leaves_the_next_one_out(caplog: pytest.LogCaptureFixture) -> None:
    started = Started(2)
    within = started.part(0)
    for step in (2, 4, 6, 8):
        started.busy = step in (4, 6)
        asked(within, step)
    assert started.steps == [2, 8]
    (line,) = caplog.messages
    assert "after step 4 was left out, because the one before it is still being written" in line


def test_a_part_that_has_ended_begins_no_checkpoint() -> None:
    started = Started(2)
    within = started.part(0)
    asked(within, 2)
    within.end()
    assert asked(within, 4).step == math.inf and started.steps == [2]


def test_a_record_has_the_sums_of_all_parts_and_ranks() -> None:
    """With the weight of a metric that not all samples have, and without other values than numbers."""
    before = [[Measured({"num_samples": 8, "loss": 1.0}, 16), Measured({"num_samples": 8, "loss": 3.0}, 16)]]
    contents = Contents(Progress(step=7), 2, before)
    for rank, loss in enumerate((5.0, float("inf"))):
        own = Measured({"num_samples": 2, "loss": loss, "some": WeightedMean(0.5, 1.0)}, 20)
        contents.add(Question(rank, Progress(step=7), own))
    stored = json.loads(json.dumps(numbers_of(contents.wait().call)))
    found = measured_in({"measured": stored})
    assert found is not None and found.committed == 20
    assert found.metrics["num_samples"] == 20 and found.metrics["loss"] == math.inf
    later = Measured({"num_samples": 2, "some": WeightedMean(1.0, 2.0)})
    assert merge_measured([[found, later]]).metrics["some"] == 0.75


class Losing(Line):
    """Its loss is not finite in some batches. Waits in each batch, if there is something to wait for."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup({"rows": 24, **config})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == self.config.get("raise_at"):
            raise ZeroDivisionError
        result = super().train_batch(batch, batch_info)
        wrong = self.config.get("not_finite", math.inf)
        return {**result, "train_loss": math.nan} if self.global_step >= wrong else result


def trainer_of(folder: Path, *, every: Any = 2, config: Any = None, patient: bool = True, **settings: Any) -> Any:
    checkpoints = AutoCheckpoint(path=folder, every=every, **settings)
    trainer = inline(Losing, config=config or {}, checkpoints=checkpoints, resume="auto", seed=3)
    if patient:
        leave_no_checkpoint_out(trainer)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(each.stem.removeprefix("loop1-") for each in folder.glob("*.pt"))


def test_the_newest_finite_checkpoint_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trainer_of(tmp_path, config={"not_finite": 3, "raise_at": 5}, every=1, keep=1) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(1, 0)
        finish_saves(trainer)
    assert names(tmp_path) == ["epoch00000-step000000003", "epoch00000-step000000005"]
    caplog.clear()
    with trainer_of(tmp_path, every=1, keep=1) as trainer:
        (line,) = [each for each in caplog.messages if "were not finite" in each]
        assert f"resumes from {trainer.resumed_from}, whose loss, score or weights were not finite" in line
        trainer.fit(2, 0)
    assert len(names(tmp_path)) == 1, "the second epoch was finite"


@pytest.mark.parametrize("every", [2, 1e-6])
def test_a_checkpoint_is_that_of_its_batch(tmp_path: Path, every: Any) -> None:
    """Although it is written when later batches have been trained."""
    later = threading.Event()
    with trainer_of(tmp_path, every=every, patient=False, keep=None) as trainer:
        delay_saves(trainer, later.is_set)
        operator = trainer.get_local_operator()
        original, seen = operator.train_batch, dict[int, torch.Tensor]()

        def train_batch(batch: Any, batch_info: Any) -> Any:
            seen[operator.global_step] = nn.utils.parameters_to_vector(operator.model.parameters()).detach().clone()
            if operator.global_step == STEPS - 1:
                later.set()
            return original(batch, batch_info)

        operator.train_batch = train_batch
        trainer.fit(1, 0)
    first = next(each for each in names(tmp_path))
    step = int(first[-9:])
    assert step in (1, 2) and len(names(tmp_path)) == 2, (
        "those meanwhile were left out, and the last one is after the call"
    )
    with inline(Losing, seed=3) as other:
        other.load(tmp_path / f"loop1-{first}.pt")
        assert torch.equal(weights(other), seen[step])


def test_a_call_that_has_returned_makes_none_when_it_is_made_again(tmp_path: Path) -> None:
    """Their record would say that it has returned, and a resumed script would not train the rest of it."""
    with trainer_of(tmp_path, config={"raise_at": STEPS + 2}, every=2) as trainer:
        for _ in trainer.epochs(1):
            trainer.train()
            assert not saves_within_again(trainer)
        for _ in trainer.epochs(1):
            with pytest.raises(ZeroDivisionError):
                trainer.train()
            assert not saves_within_again(trainer)


def test_an_error_of_the_storage_ends_the_call(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    class Breaking(Losing):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if self.global_step == 1:
                shutil.rmtree(folder)
                folder.write_text("a file, where the folder was")
            return super().train_batch(batch, batch_info)

    with (
        inline(Breaking, checkpoints=AutoCheckpoint(path=folder, every=2)) as trainer,
        pytest.raises(ConfigError, match=r"run.*cannot be a path here: Not a directory"),
    ):
        for _ in trainer.epochs(1):
            trainer.train()
            pytest.fail("the call has returned")
