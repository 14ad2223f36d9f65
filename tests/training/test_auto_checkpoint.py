"""`fit`, `epochs` and automatic checkpoints: a script that is killed and started again ends as if it never was."""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from raysgd import AutoCheckpoint, CheckpointError, ConfigError, TorchTrainer, shutdown_all
from raysgd.callbacks import Callback, EarlyStopping
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.replica.steps.asking import Question
from raysgd.trainer.auto_checkpoint import CheckpointFolder, SavedPlace, WriterFailed
from raysgd.trainer.saves import FileDraft
from tests import storing
from tests.peek import finish_saves, leave_no_checkpoint_out
from tests.torch.small import Line, inline, rows, weights

EPOCHS, STEPS = 4, 5  # and batches in an epoch


class Killed(BaseException):
    """Stands for the end of the process: nothing in the script catches it."""


class Noisy(Line):
    """Draws random numbers wherever training does: the order, dropout, and noise. Dies in batch `config["die_at"]`."""

    def setup(self, config: dict[str, Any]) -> None:
        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)

        super().setup({"seed": 3, "lr": 0.02, "scheduler": schedule, "rows": 20, "shuffle": True, **config})

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == self.config.get("die_at"):
            raise Killed
        x, y = batch
        return super().train_batch((x + torch.rand_like(x), y), batch_info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.global_step == self.config.get("die_validating_after"):
            raise Killed
        return super().validate_batch(batch, batch_info)


def started(folder: Any, config: dict[str, Any] | None = None, every: Any = "epoch", **arguments: Any) -> TorchTrainer:
    settings = AutoCheckpoint(path=folder, every=every, **arguments.pop("settings", {}))
    arguments = {"scheduler_step_freq": "epoch", "resume": "auto", "seed": 3, **arguments}
    trainer = inline(arguments.pop("operator", Noisy), config=config or {}, checkpoints=settings, **arguments)
    leave_no_checkpoint_out(trainer)
    return trainer


def lived_until(folder: Any, script: Callable[[TorchTrainer], Any], config: dict[str, Any], **arguments: Any) -> None:
    trainer = started(folder, config, **arguments)
    with pytest.raises(Killed):
        script(trainer)
    finish_saves(trainer)
    trainer.shutdown(force=True)


def test_a_worker_that_makes_checkpoints_has_one_result(tmp_path: Path) -> None:
    with started(tmp_path, every=2) as trainer, inline(Noisy, scheduler_step_freq="epoch", seed=3) as undisturbed:
        for _ in trainer.epochs(1):
            (result,) = trainer.train(reduce_results=False)
        (expected,) = undisturbed.train(reduce_results=False)
    assert (result["epoch"], result["batch_count"], result["num_samples"]) == (1, STEPS, 20)
    assert result.keys() == expected.keys()


def fitted(trainer: TorchTrainer) -> Any:
    return trainer.fit(EPOCHS, validate_every=2)


def loop_over(trainer: TorchTrainer, epochs: Iterable[int]) -> Any:
    for epoch in epochs:
        trainer.train()
        if epoch % 2 == 0:
            trainer.validate()
    return trainer.history


def own_loop(trainer: TorchTrainer) -> Any:
    return loop_over(trainer, trainer.epochs(EPOCHS))


def measured(history: Any) -> list[Any]:
    """What an undisturbed run measures, without times. The means of epochs in which the script was killed are rounded."""
    return [
        (row["kind"], row["epoch"], row["step"], row.get("val_loss"), row.get("last_train_loss"), mean_of(row))
        for row in history
    ]


def mean_of(row: Any) -> Any:
    return None if row["kind"] != "train" else pytest.approx(row["train_loss"], rel=1e-6)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[torch.Tensor, list[Any]]:
    with inline(Noisy, scheduler_step_freq="epoch", seed=3) as trainer:
        history = loop_over(trainer, range(1, EPOCHS + 1))
        return weights(trainer), measured(history)


def test_fit_is_the_loop_that_a_user_would_write(undisturbed: tuple[torch.Tensor, list[Any]]) -> None:
    with inline(Noisy, scheduler_step_freq="epoch", seed=3) as trainer:
        history = trainer.fit(EPOCHS, validate_every=2)
        assert history is trainer.history
        assert torch.equal(weights(trainer), undisturbed[0])
        assert measured(history) == undisturbed[1]
        assert len(trainer.fit(1, 0)) == len(undisturbed[1]) + 1, "a second call trains one more epoch"


@pytest.mark.parametrize(("every", "script"), [("epoch", fitted), (3, own_loop), (1e-6, fitted)])
def test_a_killed_script_ends_with_the_weights_of_an_undisturbed_run(
    undisturbed: tuple[torch.Tensor, list[Any]], tmp_path: Path, every: Any, script: Callable[[TorchTrainer], Any]
) -> None:
    deaths = [{"die_at": 1}, {"die_at": 8}, {"die_validating_after": 10}, {"die_at": EPOCHS * STEPS - 1}]
    for config in deaths:
        lived_until(tmp_path, script, config, every=every)
    with started(tmp_path, every=every) as trainer:
        assert trainer.resumed_from == trainer.latest_checkpoint
        history = script(trainer)
        assert torch.equal(weights(trainer), undisturbed[0])
        assert measured(history) == undisturbed[1]
    with started(tmp_path, every=every) as trainer:  # nothing is left to do
        assert measured(script(trainer)) == undisturbed[1]
        assert torch.equal(weights(trainer), undisturbed[0])


def test_the_log_says_where_training_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lived_until(tmp_path, fitted, {"die_at": 8})
    with started(tmp_path) as trainer:
        path = trainer.resumed_from
    here = [message for message in caplog.messages if message.startswith("training ")]
    assert here == [
        f"training starts from the beginning: there is no checkpoint in {tmp_path}",
        f"training resumes from {path}, after 1 epoch and 5 batches in all",
    ]
    for left in (True, False):
        caplog.clear()
        with started(tmp_path) as trainer:
            fitted(trainer)
        assert any("nothing is left to train" in message for message in caplog.messages) is not left


@pytest.mark.parametrize(("every", "step"), [(3, 6), (1e-6, 8)])
def test_every_says_when_a_checkpoint_is_made(tmp_path: Path, every: Any, step: int) -> None:
    lived_until(tmp_path, fitted, {"die_at": 8}, every=every)
    with started(tmp_path, every=every) as trainer:
        assert trainer.resumed_from == str(tmp_path / f"loop1-epoch00001-step{step:09}.pt")
        assert [row["kind"] for row in trainer.history] == ["train"]
        for _ in trainer.epochs(2):
            assert trainer.train()["batch_count"] == STEPS, "with those before the checkpoint"


def test_a_loop_that_is_shorter_now_says_that_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(tmp_path) as trainer:
        trainer.fit(3)
    with started(tmp_path) as trainer:
        trainer.fit(2)
        assert trainer.history[-1]["step"] == 3 * STEPS
    assert "nothing is left to train: the loop over trainer.epochs(2) had ended when the script did" in caplog.text


def test_loops_that_were_complete_are_skipped(tmp_path: Path) -> None:
    def script(trainer: TorchTrainer) -> list[int]:
        return [epoch for count in (2, 3) for epoch in trainer.epochs(count) if trainer.train(num_steps=2)]

    with inline(Noisy, scheduler_step_freq="epoch", seed=3) as plain:
        assert script(plain) == [1, 2, 1, 2, 3]
        expected = weights(plain)
    lived_until(tmp_path, script, {"die_at": 7})
    with started(tmp_path) as trainer:
        assert script(trainer) == [2, 3]
        assert torch.equal(weights(trainer), expected)


def test_the_best_accuracy_is_not_the_lowest(caplog: pytest.LogCaptureFixture) -> None:
    AutoCheckpoint(path="x", best="val_accuracy", mode="max")
    for best in ("val_loss", "remap"):
        AutoCheckpoint(path="x", best=best)
    assert not caplog.messages
    for number, best in enumerate(("val_accuracy", "val_F1"), 1):
        AutoCheckpoint(path="x", best=best)
        assert len(caplog.messages) == number and f"'{best}'" in caplog.messages[-1] and "mode='max'" in caplog.text


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    scores = iter([5.0, 1.0, float("nan"), 3.0, 2.0, 4.0])

    class Scored(Noisy):
        def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
            return {**super().validate(val_iterator, info), "score": next(scores)}

    settings = {"keep": 2, "best": "score"}
    (tmp_path / "notes.txt").write_text("the user's")
    with started(tmp_path, operator=Scored, settings=settings) as trainer:
        trainer.fit(6)
        names = ["loop1-epoch00002-step000000010", "loop1-epoch00005-step000000025", "loop1-epoch00006-step000000030"]
        assert storing.names(tmp_path) == sorted(
            [*(name + suffix for name in names for suffix in (".json", ".pt")), "notes.txt"]
        )
        assert trainer.best_checkpoint == str(tmp_path / f"{names[0]}.pt")
        assert trainer.latest_checkpoint == str(tmp_path / f"{names[2]}.pt")
        trainer.load(trainer.best_checkpoint)
    with started(tmp_path, operator=Scored, settings={**settings, "mode": "max"}) as trainer:
        assert trainer.best_checkpoint == str(tmp_path / f"{names[2]}.pt"), "scores are read from the folder"


def test_scores_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    class Scored(Noisy):
        def validate(self, val_iterator: Any, info: Any = None) -> dict[str, Any]:
            return {
                **super().validate(val_iterator, info),
                "low": float(self.global_step),
                "high": 1e3 + self.global_step,
            }

    for epochs, best in ((2, "low"), (4, "high")):
        with started(tmp_path, operator=Scored, settings={"keep": 1, "best": best}) as trainer:
            trainer.fit(epochs)
            assert Path(trainer.best_checkpoint or "").name.startswith(f"loop1-epoch0000{epochs - 1}")


def test_a_better_score_is_saved_although_no_save_is_due(tmp_path: Path) -> None:
    with started(tmp_path, every=1000, settings={"best": "val_loss", "keep": 1}) as trainer:
        history = trainer.fit(3)
        best = min((row["val_loss"], row["step"]) for row in history.of("validate"))
        assert trainer.best_checkpoint is not None and f"step{best[1]:09}" in trainer.best_checkpoint
        assert json.loads(Path(trainer.best_checkpoint).with_suffix(".json").read_text())["score"] == best[0]


@pytest.mark.parametrize("at", [2, 3])
def test_they_are_due_again_from_a_loaded_state_on(tmp_path: Path, at: int) -> None:
    with started(tmp_path / "run", every=STEPS, settings={"keep": None}) as trainer:
        first = trainer.save(tmp_path / "first.pt")
        for epoch in trainer.epochs(4):
            if epoch == at:
                trainer.load(first)
            trainer.train()
    ends = [epoch if epoch < at else epoch - at + 1 for epoch in range(1, 5)]
    found = [path.stem for path in sorted((tmp_path / "run").glob("*.pt"))]
    assert found == [f"loop1-epoch{epoch:05}-step{end * STEPS:09}" for epoch, end in enumerate(ends, 1)]


@pytest.mark.parametrize("damage", ["flipped", "no record", "damaged record", "missing"])
def test_a_damaged_or_incomplete_checkpoint_is_never_taken(
    undisturbed: tuple[torch.Tensor, list[Any]], tmp_path: Path, damage: str
) -> None:
    lived_until(tmp_path, fitted, {"die_at": 12})
    newest = tmp_path / "loop1-epoch00002-step000000010.pt"
    record, content = newest.with_suffix(".json"), bytearray(newest.read_bytes())
    if damage == "flipped":
        content[content.index(b"global_step")] ^= 1
        newest.write_bytes(content)
    elif damage == "no record":
        record.unlink()
    elif damage == "damaged record":
        record.write_bytes(record.read_bytes().replace(b"validate", b"validat3"))
    else:
        newest.unlink()
    with started(tmp_path) as trainer:
        assert trainer.resumed_from == str(tmp_path / "loop1-epoch00001-step000000005.pt")
        fitted(trainer)
        assert torch.equal(weights(trainer), undisturbed[0])


def test_all_damaged_is_an_error_and_no_new_start(tmp_path: Path) -> None:
    lived_until(tmp_path, fitted, {"die_at": 7})
    next(tmp_path.glob("*.pt")).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged: to start .* pass another path"):
        started(tmp_path)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    lived_until(tmp_path, fitted, {"die_at": 7})
    with pytest.raises(CheckpointError, match=r"resume='auto' found a checkpoint .* cannot load: .*1 schedulers"):
        started(tmp_path, operator=Line)


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_this_run_has_no_record_of_is_neither_deleted_nor_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lived_until(tmp_path, fitted, {"die_at": 3 * STEPS}, settings={"keep": None})
    first, second, third = sorted(tmp_path.glob("*.pt"))
    second.with_suffix(".json").unlink()
    third.with_suffix(".json").write_text("{}")
    users = tmp_path / f"loop1-epoch00004-step{4 * STEPS:09}.pt"  # where the run will save, too
    users.mkdir()
    (users / "notes.txt").write_text("the user's")
    (tmp_path / "loop9-epoch00001-step000000001.json").write_text("the user's, too")
    for name in (f".{first.name}.0123abcd.tmp", f".{first.name}.tmp"):  # the first is a draft
        (tmp_path / name).write_text(name)
    kept = {
        f".{first.name}.tmp".encode(),
        second.read_bytes(),
        third.read_bytes(),
        b"{}",
        b"the user's",
        b"the user's, too",
    }
    recorded = first.read_bytes()
    caplog.clear()
    with started(tmp_path, settings={"keep": 1}) as trainer:
        assert trainer.resumed_from == str(first)
        assert sum("neither loads nor deletes" in message for message in caplog.messages) == 1
        assert "raysgd neither loads nor deletes loop1-epoch00002-step000000010.pt" in caplog.text
        fitted(trainer)
        assert trainer.latest_checkpoint == str(users) and users.is_file()
    assert kept <= contents(tmp_path) and not (tmp_path / f".{first.name}.0123abcd.tmp").exists()
    assert recorded not in contents(tmp_path), "that of the older run, which this run continues, has a record"
    with started(tmp_path, settings={"keep": 1}) as trainer:
        assert trainer.resumed_from == str(users)
    (tmp_path / "again").mkdir()
    shutil.copy(users, tmp_path / "again")  # without its record
    with pytest.raises(ConfigError, match=r"has loop1-.*, which may be of an earlier run: move what you need"):
        started(tmp_path / "again", resume=None)


def test_a_folder_belongs_to_one_trainer(tmp_path: Path) -> None:
    with started(tmp_path) as trainer:
        for resume in ("auto", None):
            with pytest.raises(ConfigError, match=rf"{tmp_path} is in use by the trainer of process {os.getpid()} on "):
                started(tmp_path, resume=resume)
        fitted(trainer)
    with started(tmp_path) as trainer:
        assert trainer.resumed_from is not None, "the first trainer was shut down"


def test_a_save_that_a_shutdown_by_force_leaves_behind_writes_nothing(tmp_path: Path) -> None:
    """Another trainer of this process may have the folder then."""
    folder, complete = CheckpointFolder(AutoCheckpoint(path=tmp_path), ".pt", resumes=False), threading.Event()
    folder.claim()
    folder.save(SavedPlace(1, 1, 3), None, [], lambda path: complete.wait, {})
    folder.release()
    complete.set()
    folder.wait()
    assert not folder.newest_first() and not [*tmp_path.glob("loop*")]


def test_in_remote_storage_the_newer_trainer_takes_the_folder_over() -> None:
    folder = f"memory://{uuid.uuid4().hex}"
    with started(folder, settings={"keep": 1}) as older:
        own = iter(older.epochs(EPOCHS))
        for _ in range(2):  # the first epoch is saved when the second one begins
            next(own)
            older.train()
        with started(folder, settings={"keep": 1}) as newer:
            fitted(newer)
            names = storing.names(folder)
            with pytest.raises(CheckpointError, match=rf"the trainer of process {os.getpid()} .* uses {folder}, too"):
                next(own)
            assert storing.names(folder) == names


def test_a_damaged_checkpoint_that_cannot_be_deleted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lived_until(tmp_path, fitted, {"die_at": 12})
    older, newest = sorted(tmp_path.glob("*.pt"))
    newest.write_bytes(b"damaged")

    def refuse(_: Any, where: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(where))

    storing.instead(monkeypatch, "delete", refuse)
    caplog.clear()
    with started(tmp_path) as trainer:
        assert trainer.resumed_from == str(older)
        assert f"the checkpoint {newest} could not be deleted: [Errno 1] Operation not permitted" in caplog.text


@pytest.mark.parametrize("make", [lambda at: at.symlink_to(at), Path.mkdir, os.mkfifo], ids=["link", "folder", "pipe"])
def test_what_is_no_file_raises_no_error_of_the_system(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    lived_until(tmp_path, fitted, {"die_at": 12})
    older, newest = sorted(tmp_path.glob("*.pt"))
    newest.unlink()
    make(newest)
    with pytest.raises(CheckpointError, match=newest.name):
        started(tmp_path)
    record = newest.with_suffix(".json")
    record.unlink()
    make(record)  # without its record, it is not a checkpoint
    with started(tmp_path) as trainer:
        assert trainer.resumed_from == str(older)


def test_a_record_of_another_kind_is_not_used(tmp_path: Path) -> None:
    lived_until(tmp_path, fitted, {"die_at": 12})
    older, newest = sorted(tmp_path.glob("*.json"))
    record: dict[str, Any] = {"score": None, "history": []}
    for wrong in ({"score": "high"}, {"history": 3}, {"history": [{}]}):
        newest.write_bytes(storing.sealed_json({**record, **wrong}))
        with started(tmp_path) as trainer:
            assert trainer.resumed_from == str(older.with_suffix(".pt"))
    with started(tmp_path) as trainer:
        fitted(trainer)


def test_on_s3(s3: str, undisturbed: tuple[torch.Tensor, list[Any]], tmp_path: Path) -> None:
    folder = f"{s3}/{tmp_path.name}"
    for config in ({"die_at": 4}, {"die_at": 16}):
        lived_until(folder, fitted, config, every=2, settings={"keep": 1})
    with started(folder, every=2, settings={"keep": 1}) as trainer:
        fitted(trainer)
        assert torch.equal(weights(trainer), undisturbed[0])
        assert len(storing.names(folder)) == 2


def test_each_record_has_the_history_up_to_its_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, settings={"keep": None}) as trainer:
        trainer.fit(6)
        expected = trainer.history.rows
    for name in ("loop1-epoch00006-*.json", "loop1-epoch00005-*.json"):
        with started(tmp_path, settings={"keep": None}) as trainer:
            assert [row["step"] for row in trainer.history.rows] == [row["step"] for row in expected]
        next(tmp_path.glob(name)).unlink()
        expected = expected[:-2]
        Path(next(tmp_path.glob(name.replace("json", "pt")))).unlink()


def test_a_save_that_fails_is_raised(tmp_path: Path) -> None:
    class Breaking(Callback):
        def on_result(self, result: Any) -> None:
            if result.step == STEPS:
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").write_text("a file, where the folder was")

    with (
        started(tmp_path / "run", callbacks=[Breaking()]) as trainer,
        pytest.raises(ConfigError, match=r"run.*cannot be a path here: Not a directory"),
    ):
        trainer.fit(2)


def test_a_worker_that_fails_while_it_writes_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the last checkpoint is made again, because no later one follows."""
    with started(tmp_path) as trainer:
        start, begun = trainer._loops._start_save, list[str]()

        def fail_once(path: str) -> Callable[[], Any]:
            finish = start(path)
            begun.append(path)
            return finish if begun.count(path) > 1 else fail

        def fail() -> None:
            raise WriterFailed("the worker that was sending the checkpoint failed (gone)")

        trainer._loops._start_save = fail_once
        trainer.fit(2)
        assert trainer.latest_checkpoint == str(tmp_path / f"loop1-epoch00002-step{2 * STEPS:09}.pt")
        assert [each.name for each in tmp_path.glob("*.json")] == [f"loop1-epoch00002-step{2 * STEPS:09}.json"]
    lost = [each for each in caplog.messages if "no automatic checkpoint was saved after step" in each]
    assert len(lost) == 2 and lost[0].endswith("the worker that was sending the checkpoint failed (gone)")


def test_no_call_raises_what_the_folder_has_not_looked_at_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that begins when the worker of an automatic checkpoint has failed must not raise that failure, which its folder handles."""

    def lost(*_: Any) -> None:
        raise WriterFailed("gone")

    with started(tmp_path) as trainer:
        monkeypatch.setattr(FileDraft, "complete", lost)
        finish = trainer._loops._start_save(str(tmp_path / "x.pt"))
        while not all(each.done.done() for each in trainer._saves._running):
            time.sleep(0.01)
        trainer.validate()
        with pytest.raises(WriterFailed):
            finish()


def test_a_recovery_does_not_wait_for_a_checkpoint_that_no_worker_has_begun(tmp_path: Path) -> None:
    with started(tmp_path, every=1) as trainer:
        loops, waits, jobs = trainer._loops, list[bool](), list[Any]()
        begin = trainer._saves.hand_out

        def hand_out(path: str) -> Any:
            waits.append(jobs[0].is_waiting())
            return begin(path)

        trainer._saves.hand_out = hand_out
        for _ in trainer.epochs(1):
            jobs.append(job := trainer._train_job(None, False, None, 3))
            job.prepare()
            assert loops._within.answer(Question(0, Progress(step=1), Measured({}, 0))).arguments is not None
            assert waits == [True] and not job.is_waiting(), "ranks wait for the script only while it makes the answer"
            thread = threading.Thread(target=trainer._newest_saved, args=[True], daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
            trainer.train()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*rows(8), strict=True))


class Streaming(Noisy):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=DataLoader(Stream(), batch_size=4))


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    for arguments, message in [
        ({"resume": "auto"}, "resume='auto' needs a folder: pass checkpoints=AutoCheckpoint"),
        ({"resume": "last"}, "resume must be 'auto' or None, got 'last'"),
        ({"checkpoints": str(tmp_path)}, "checkpoints must be a raysgd.AutoCheckpoint, got '/"),
    ]:
        with pytest.raises(ConfigError, match=message):
            inline(**arguments)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every must be 'epoch', a whole number of batches, or seconds as a float, got 0"),
        ({"every": "batch"}, "every must be"),
        ({"every": True}, "every must be"),
        ({"keep": 0}, "keep must be a whole number of at least 1, got 0"),
        ({"best": 1}, "best must be the name of a metric"),
        ({"mode": "low"}, "mode must be 'min' or 'max', got 'low'"),
        ({"path": ""}, "a checkpoint's place must be a path"),
        ({"trusted": 1}, "trusted must be True or False"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            AutoCheckpoint(**{"path": "x", **settings})
    with started(tmp_path / "a", every=2, operator=Streaming) as trainer:
        with pytest.raises(ConfigError, match="have no place there that can be saved"):
            trainer.fit(1, 0)
        with pytest.raises(ConfigError, match=r"train\(\) must be called in a loop over trainer.epochs"):
            trainer.train()
        with pytest.raises(ConfigError, match=r"fit\(\) validates, but the operator has registered no validation data"):
            trainer.fit(1)
        with pytest.raises(ConfigError, match="must not begin inside another one"):
            for _ in trainer.epochs(1):
                list(trainer.epochs(1))


def test_mistakes_that_would_lose_a_run_are_refused(tmp_path: Path) -> None:
    lived_until(tmp_path, fitted, {"die_at": 7})
    with pytest.raises(ConfigError, match="has checkpoints of an earlier run: pass resume='auto' to continue it, or"):
        started(tmp_path, resume=None)
    with inline(Noisy, scheduler_step_freq="epoch", seed=3) as other:
        pretrained = other.save(tmp_path / "pretrained.pt")
    with started(tmp_path, settings={"best": "loss"}) as trainer:
        with pytest.raises(ConfigError, match=r"has resumed from .*, and load\(\) would replace that"):
            trainer.load(pretrained)
        with pytest.raises(ConfigError, match=r"AutoCheckpoint\(best='loss'\) was not measured: .*val_loss"):
            trainer.fit(2)


def test_a_callback_ends_the_loop(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_result(self, result: Any) -> None:
            self.wants_stop = result.step == 2 * STEPS

    with started(tmp_path, callbacks=[Enough()]) as trainer:
        assert [row["epoch"] for row in trainer.fit(EPOCHS, 0)] == [1, 2]
        assert trainer.latest_checkpoint is not None and "epoch00002" in trainer.latest_checkpoint
        assert len(trainer.fit(1, 0)) == 3, "the next loop is another one"


def test_shutdown_all_ends_a_trainer_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its callbacks get their last call, and its folder is free for the next trainer."""
    first = started(tmp_path, callbacks=[EarlyStopping("mistyped")])
    for _ in first.epochs(1):
        first.train()
    shutdown_all()
    assert "mistyped" in caplog.text
    with started(tmp_path) as again:
        assert again.resumed_from
