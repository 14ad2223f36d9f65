"""The audit log: what workers write, and that `raysgd verify` finds every violation in it."""

from __future__ import annotations

import errno
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, ElasticConfig, TorchTrainer, TrainingOperator, TrainingOptions
from raysgd.cli import main
from raysgd.core.audit import FIRST, AuditError, Chain, Verdict, verify
from raysgd.core.sampling_plan import SamplingPlan
from raysgd.data import ShardedStream
from raysgd.training.audit import AuditLog, AuditSettings
from tests.torch.small import rows

TOTAL = 23


class Writer:
    """Writes the files of a run as workers do, from a sampling plan."""

    def __init__(self, folder: Path, run: str = "run", began: float = 1.0) -> None:
        self.folder, self.run, self.began = folder, run, began
        self.lines: dict[str, list[str]] = {}
        self.generation = 0

    def join(self, workers: list[str], step: int, loads: int = 0) -> None:
        for rank, worker in enumerate(workers):
            if worker not in self.lines:
                self.lines[worker] = [f"{FIRST} {self.run} {self.began} {worker} node 1"]
            self.lines[worker].append(f"joined {self.generation} {loads} {rank} {len(workers)} {step}")
        self.generation += 1

    def steps(self, workers: list[str], step: int, offset: int, count: int, each: int = 4) -> tuple[int, int]:
        plan = SamplingPlan(TOTAL, each * len(workers), len(workers))
        for _ in range(count):
            after = plan.offset_after(offset)
            for worker, part in zip(workers, plan.parts(offset), strict=True):
                stop = part.stop if part.fresh else part.start
                self.lines[worker].append(f"batch {step} 0 0 {offset} {after} {part.start} {stop} 0")
            step, offset = step + 1, after
        return step, offset

    def end_epoch(self, workers: list[str], step: int, epoch: int = 1, offset: int = TOTAL, why: str = "all") -> None:
        for worker in workers:
            self.lines[worker].append(f"epoch {step} {epoch} {offset} {TOTAL} {why}")

    def save(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        for worker, lines in self.lines.items():
            chain = Chain()
            (self.folder / f"{worker}.audit").write_bytes(b"".join(map(chain.line, lines)))
        return self.folder


def undisturbed(folder: Path) -> Writer:
    writer = Writer(folder)
    writer.join(["a", "b"], 0)
    step, offset = writer.steps(["a", "b"], 0, 0, 3)
    writer.end_epoch(["a", "b"], step)
    assert offset == TOTAL
    return writer


def disturbed(folder: Path) -> Writer:
    """Worker b is killed in step 2, in which it takes part, and a new worker joins later."""
    writer = Writer(folder)
    writer.join(["a", "b", "c"], 0)
    writer.steps(["a", "b", "c"], 0, 0, 2)  # step 2 is not committed
    writer.join(["a", "c"], 1)
    step, offset = writer.steps(["a", "c"], 1, 12, 1)
    writer.join(["a", "c", "d"], step)
    step, offset = writer.steps(["a", "c", "d"], step, offset, 1)
    writer.end_epoch(["a", "c", "d"], step)
    assert offset == TOTAL
    return writer


def refused(folder: Path) -> str:
    with pytest.raises(AuditError) as caught:
        verify(folder)
    return str(caught.value)


def test_an_undisturbed_run(tmp_path: Path) -> None:
    assert verify(undisturbed(tmp_path).save()) == Verdict(
        workers=2, runs=1, generations=1, steps=3, samples=TOTAL, epochs=1, unfinished=2
    )


def test_a_run_in_which_workers_failed_and_joined(tmp_path: Path) -> None:
    assert verify(disturbed(tmp_path).save()) == Verdict(
        workers=4, runs=1, generations=3, steps=3, samples=TOTAL, epochs=1, unfinished=4
    )


def test_a_run_that_began_again_from_a_checkpoint(tmp_path: Path) -> None:
    first = Writer(tmp_path)
    first.join(["a"], 0)
    first.steps(["a"], 0, 0, 4)
    first.save()
    second = Writer(tmp_path, "later", 2.0)
    second.join(["b"], 2, loads=1)
    step, _ = second.steps(["b"], 2, 8, 4)
    second.end_epoch(["b"], step)
    second.save()
    verdict = verify(tmp_path)
    assert (verdict.steps, verdict.samples, verdict.epochs, verdict.repeated) == (6, TOTAL, 1, 1)


@pytest.mark.parametrize("make", [undisturbed, disturbed])
def test_every_changed_removed_or_moved_line_is_found(make: Callable[[Path], Writer], tmp_path: Path) -> None:
    make(tmp_path).save()
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        lines = content.splitlines(keepends=True)
        for number, line in enumerate(lines):
            others = (
                [[*lines[:number], line.replace(b" 1 ", b" 2 ", 1), *lines[number + 1 :]]] if b" 1 " in line else []
            )
            if number < len(lines) - 1:
                others += [
                    lines[:number] + lines[number + 1 :],
                    [*lines[:number], lines[number + 1], line, *lines[number + 2 :]],
                ]
            for other in others:
                file.write_bytes(b"".join(other))
                assert "its hash is wrong" in refused(tmp_path)
        file.write_bytes(content)
    verify(tmp_path)


def test_files_that_end_within_a_call_are_counted(tmp_path: Path) -> None:
    writer = undisturbed(tmp_path)
    for worker in ("a", "b"):
        writer.lines[worker].append("done 3")
    assert verify(writer.save()).unfinished == 0
    writer.lines["b"] = writer.lines["b"][:-2]  # another line of rank 0 shows that the step counts
    verdict = verify(writer.save())
    assert (verdict.unfinished, verdict.steps) == (1, 3)
    assert any("1 file without the end of a call" in line for line in verdict.lines())


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    undisturbed(tmp_path).save()
    with (tmp_path / "a.audit").open("ab") as file:
        file.write(b"batch 3 0 0 0 8 0 4")
    assert verify(tmp_path).steps == 3


def test_a_worker_that_wrote_no_line_had_no_part(tmp_path: Path) -> None:
    """It was killed, or its disk was full, when it had created its file. With a part of a step it would have a line."""
    undisturbed(tmp_path).save()
    (tmp_path / "c.audit").touch()
    assert verify(tmp_path).steps == 3
    (tmp_path / "b.audit").write_bytes(b"")
    assert "there are logs of ranks [0]" in refused(tmp_path)


def test_a_full_disk_leaves_a_log_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half of a line, and then nothing. When there is room, the step is repeated."""
    settings = AuditSettings.of(ElasticConfig(audit=tmp_path))
    assert settings is not None
    log, write, room = AuditLog(settings, lambda: None), os.write, [20]

    def limited(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        with pytest.raises(OSError, match="No space"):
            log.done(1)
    log.done(2)
    log.close()
    (file,) = tmp_path.iterdir()
    lines, chain = file.read_bytes().splitlines(keepends=True), Chain()
    assert [line.split(b" ")[:2] for line in lines[1:]] == [[b"done", b"1"], [b"done", b"2"]]
    assert lines == [chain.line(line.decode().rpartition(" ")[0]) for line in lines]


# Each changes one value of a line, with hashes that are right: what a broken protocol would write.
VIOLATIONS = [
    ("a", "batch 1 0 0 8 16 8 12 0", "batch 1 0 0 8 16 8 11 0", "in step 2, samples 11 to 11 of the epoch were lost"),
    (
        "b",
        "batch 1 0 0 8 16 12 16 0",
        "batch 1 0 0 8 16 11 16 0",
        "in step 2, samples 11 to 11 of the epoch were used twice",
    ),
    ("b", "batch 1 0 0 8 16 12 16 0", "batch 1 0 0 8 15 12 16 0", "the ranks do not agree on which samples step 2 has"),
    ("b", "batch 1 0 0 8 16 12 16 0", None, "step 2 counts, but in generation 0 rank 1 had no part of it"),
    ("a", "joined 0 0 0 2 0", "joined 0 0 0 2 1", "the ranks of generation 0 do not agree"),
    ("b", "joined 0 0 1 2 0", "joined 0 0 2 3 0", "generation 0 has 2 ranks, but there are logs of ranks [0, 2]"),
    (
        "b",
        f"epoch 3 1 {TOTAL} {TOTAL} all",
        f"epoch 3 1 {TOTAL} 24 all",
        "the ranks do not agree on the end of epoch 1",
    ),
]


@pytest.mark.parametrize(("worker", "line", "other", "message"), VIOLATIONS)
def test_violations(worker: str, line: str, other: str | None, message: str, tmp_path: Path) -> None:
    writer = undisturbed(tmp_path)
    lines = writer.lines[worker]
    lines[lines.index(line) : lines.index(line) + 1] = [] if other is None else [other]
    assert message in refused(writer.save())


def test_a_step_that_skips_samples_is_found(tmp_path: Path) -> None:
    for offset, message in (
        (12, "step 2 begins at sample 12 of its epoch, and the step before it ended at 8: 4 samples were lost"),
        (4, "step 2 begins at sample 4 of its epoch, and the step before it ended at 8: 4 samples were used twice"),
    ):
        writer = Writer(tmp_path)
        writer.join(["a", "b"], 0)
        writer.steps(["a", "b"], 0, 0, 1)
        writer.steps(["a", "b"], 1, offset, 1)
        for worker in ("a", "b"):
            writer.lines[worker].append("done 2")
        assert refused(writer.save()) == message


def test_an_epoch_that_ends_early_is_found(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.join(["a"], 0)
    step, offset = writer.steps(["a"], 0, 0, 2)
    writer.end_epoch(["a"], step, offset=offset)
    assert refused(writer.save()) == "epoch 1 ended after 8 of 23 samples: 15 were lost"
    writer.lines["a"][-1] = writer.lines["a"][-1].replace(" all", " operator")
    assert verify(writer.save()).left_out == 15


STREAM = {
    "a": [
        "joined 0 0 0 2 0",
        "batch 0 0 0 0 8 0 4 0",
        "part 0 0 0 0 4",
        "length 1 0 3 6",
        "batch 1 0 0 8 11 8 10 0",
        "part 1 0 0 4 6",
        "epoch 2 1 11 -1 all",
        "done 2",
    ],
    "b": [
        "joined 0 0 1 2 0",
        "batch 0 0 0 0 8 4 8 0",
        "part 0 0 1 0 4",
        "length 1 2 3 0",
        "length 1 1 3 5",
        "batch 1 0 0 8 11 10 11 0",
        "part 1 0 1 4 5",
        "epoch 2 1 11 -1 all",
        "done 2",
    ],
}


def streamed(folder: Path) -> Writer:
    """An epoch of a stream in three shards, with 6, 5 and 0 samples."""
    writer = Writer(folder)
    writer.lines = {worker: [f"{FIRST} run 1.0 {worker} node 1", *lines] for worker, lines in STREAM.items()}
    return writer


def test_an_epoch_of_a_stream(tmp_path: Path) -> None:
    verdict = verify(streamed(tmp_path).save())
    assert verdict == Verdict(workers=2, runs=1, generations=1, steps=2, samples=11, epochs=1, shards=3)
    assert "3 shards of streams, each used from its beginning to its end in its epoch" in "\n".join(verdict.lines())


@pytest.mark.parametrize(
    ("worker", "line", "other", "message"),
    [
        ("a", "part 1 0 0 4 6", "part 1 0 0 5 6", "in step 2, samples 4 to 4 of shard 0 were lost"),
        ("a", "part 1 0 0 4 6", "part 1 0 0 3 5", "in step 2, samples 3 to 3 of shard 0 were used twice"),
        ("b", "part 1 0 1 4 5", "part 1 0 0 4 5", "in step 2, samples 4 to 4 of shard 0 were used twice"),
        ("b", "length 1 1 3 5", "length 1 1 3 7", "epoch 1 ended after 5 of the 7 samples of shard 1: 2 were lost"),
        ("b", "length 1 2 3 0", None, "epoch 1 ended, but no worker has read shard 2 to its end"),
        ("a", "part 1 0 0 4 6", None, "epoch 1 ended after 4 of the 6 samples of shard 0: 2 were lost"),
    ],
)
def test_violations_in_a_stream(worker: str, line: str, other: str | None, message: str, tmp_path: Path) -> None:
    writer = streamed(tmp_path)
    lines = writer.lines[worker]
    lines[lines.index(line) : lines.index(line) + 1] = [] if other is None else [other]
    assert message in refused(writer.save())


def test_committed_steps_that_a_survivor_had_are_not_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.join(["a", "b"], 0)
    writer.steps(["a", "b"], 0, 0, 3)
    writer.join(["b"], 1)
    writer.steps(["b"], 1, 8, 1)
    assert "a worker of generation 0 that continued had committed step 2: committed steps were lost" in refused(
        writer.save()
    )
    writer.lines["c"] = [*writer.lines.pop("b")[:1], "joined 1 0 0 1 1"]  # nobody survived
    (tmp_path / "b.audit").unlink()
    assert "there are logs of ranks [0]" in refused(writer.save())  # b's file was removed


def test_a_generation_that_ended_before_all_ranks_had_begun(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.join(["a", "b"], 0)
    del writer.lines["b"][1:]  # it was killed before it wrote that it had joined
    writer.steps(["a"], 0, 0, 1)
    writer.join(["a"], 0)
    step, _ = writer.steps(["a"], 0, 0, 6)
    writer.end_epoch(["a"], step)
    assert verify(writer.save()).samples == TOTAL


def test_weights_that_differ_name_the_rank(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    workers = ["a", "b", "c"]
    writer.join(workers, 0)
    writer.steps(workers, 0, 0, 2)
    for worker in workers:
        writer.lines[worker].append(f"weights 1 {'other' if worker == 'b' else 'same'}")
    assert "after step 1, in generation 0, the weights of the ranks differ: the 2 others differ from rank 1" in refused(
        writer.save()
    )
    writer.lines["b"][-1] = "weights 1 same"
    assert verify(writer.save()).compared == 1


def test_the_command(tmp_path: Path) -> None:
    undisturbed(tmp_path / "log").save()
    good = CliRunner().invoke(main, ["verify", str(tmp_path / "log")])
    assert good.exit_code == 0, good.output
    assert "3 steps, 1 complete epoch: 23 samples, each used exactly once in its epoch" in good.output
    file = tmp_path / "log" / "b.audit"
    file.write_bytes(file.read_bytes().replace(b" 8 16 ", b" 8 17 ", 1))
    bad = CliRunner().invoke(main, ["verify", str(tmp_path / "log")])
    assert bad.exit_code == 1
    assert f"Error: {file}, line 4 was changed, or a line before it was removed: its hash is wrong" in bad.output
    (tmp_path / "empty").mkdir()
    assert "contains no file *.audit" in CliRunner().invoke(main, ["verify", str(tmp_path / "empty")]).output


# -- what workers write -------------------------------------------------------------------------------


class Line(TrainingOperator):
    """Trains on TOTAL rows. In its fourth batch, rank 1 kills itself (with `fail`) or changes its weights (with `corrupt`),
    once."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1)),
            criterion=torch.nn.MSELoss(),
        )
        data = TensorDataset(*rows(TOTAL))
        loader: Any = DataLoader(data, batch_size=2, shuffle=True, drop_last=config.get("drop_last", False))
        if config.get("stream"):
            loader = ShardedStream(lambda shard: [data[row] for row in range(TOTAL)[shard::4]], 4, batch_size=2)
        self.register_data(train_loader=loader)
        self.seen = 0

    def train_batch(self, batch: Any, info: dict[str, Any]) -> Any:
        self.seen += 1
        killer = self.config.get("fail")
        if killer is not None and self.world_rank == 1 and self.seen == 4 and not os.path.exists(killer):
            with open(killer, "x", encoding="utf-8"):
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.config.get("pace", 0.0))
        mark = self.config.get("corrupt")
        if mark and self.world_rank == 1 and self.seen == 4 and not os.path.exists(mark):
            with open(mark, "x", encoding="utf-8"), torch.no_grad():
                next(self.model.parameters()).add_(1e-3)
        return super().train_batch(batch, info)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_worker_writes_a_log(window: int, drop_last: bool, tmp_path: Path) -> None:
    elastic = ElasticConfig(audit=tmp_path / "log", audit_weights_every=2)
    options = TrainingOptions(accumulate=window)
    config = {"drop_last": drop_last}
    with TorchTrainer(
        training_operator_cls=Line, num_workers=1, use_local=True, config=config, elastic=elastic, options=options
    ) as trainer:
        trainer.train()
        trainer.train(num_steps=4)
        trainer.save(tmp_path / "x.pt")
        trainer.train()
        trainer.load(tmp_path / "x.pt")
        trainer.train()
    verdict = verify(tmp_path / "log")
    assert (verdict.workers, verdict.epochs) == (1, 2)
    assert verdict.left_out == 2 * drop_last
    assert verdict.samples == 2 * TOTAL - verdict.left_out
    assert verdict.repeated > 0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ElasticConfig]:
    yield ElasticConfig(audit=tmp_path / "log", audit_weights_every=2)


@pytest.mark.parametrize(("batch", "stream"), [("per_worker", False), ("global", False), ("global", True)])
def test_a_killed_worker_and_its_replacement(
    batch: Any, stream: bool, log: ElasticConfig, tmp_path: Path, ray_cluster: None
) -> None:
    """With a constant batch, the two survivors process their parts in pieces."""
    log = replace(log, batch=batch, grow="epoch")
    config = {"fail": str(tmp_path / "killed"), "stream": stream}
    with TorchTrainer(training_operator_cls=Line, num_workers=3, config=config, elastic=log, use_gpu=False) as trainer:
        for _ in range(3):
            trainer.train()
        assert trainer.recoveries
    verdict = verify(tmp_path / "log")
    assert verdict.generations > 1
    pieces = [
        line for file in (tmp_path / "log").iterdir() for line in file.read_text().splitlines() if " 0 1 " in line
    ]
    assert any(line.startswith("batch") for line in pieces) is (batch == "global")
    assert (verdict.epochs, verdict.samples, verdict.repeated) == (3, 3 * TOTAL, 0)
    assert verdict.shards == 3 * 4 * stream
    assert verdict.compared > 3
    file = random.Random(0).choice(sorted((tmp_path / "log").iterdir()))
    content = file.read_bytes()
    file.write_bytes(content.replace(b"batch ", b"batch 1", 1) if b"batch " in content else content[:-2] + b"0\n")
    assert "its hash is wrong" in refused(tmp_path / "log")


def test_a_rank_whose_weights_were_corrupted_is_named(log: ElasticConfig, tmp_path: Path, ray_cluster: None) -> None:
    config = {"corrupt": str(tmp_path / "x")}
    with TorchTrainer(training_operator_cls=Line, num_workers=3, config=config, elastic=log, use_gpu=False) as trainer:
        trainer.train()
        trainer.train()
    assert "the weights of the ranks differ: the 2 others differ from rank 1" in refused(tmp_path / "log")


def test_an_evicted_rank_is_named(log: ElasticConfig, tmp_path: Path, ray_cluster: None) -> None:
    elastic = replace(log, compare_weights=2, on_divergence="evict")
    with TorchTrainer(
        training_operator_cls=Line,
        num_workers=3,
        config={"corrupt": str(tmp_path / "x")},
        elastic=elastic,
        use_gpu=False,
    ) as trainer:
        for _ in range(3):
            trainer.train()
        assert [recovery.reason for recovery in trainer.recoveries if recovery.reason == "divergence"]
    verdict = verify(tmp_path / "log")
    assert (verdict.evicted, verdict.epochs) == (1, 3)


@pytest.mark.parametrize("given", [3, "", "s3://bucket/log"])
def test_audit_must_be_a_folder(given: Any) -> None:
    with pytest.raises(ConfigError, match="audit must be a folder that the workers can write to, or None, got"):
        ElasticConfig(audit=given)


def test_a_function_has_no_log(tmp_path: Path) -> None:
    from raysgd.train import Trainer

    with pytest.raises(ConfigError, match=r"ElasticConfig\(audit=...\) needs an operator"):
        Trainer(backend="torch", num_workers=1, elastic=ElasticConfig(audit=tmp_path))


def test_a_folder_that_one_machine_cannot_write_to_is_named_with_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = AuditSettings(str(tmp_path / "file"), "run", 0.0)
    with pytest.raises(ConfigError, match=f"on {platform.node()} it is not") as caught:
        AuditLog(settings, lambda: None)
    assert str(tmp_path / "file") in str(caught.value)
