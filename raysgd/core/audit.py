"""The audit log: what each worker wrote about its steps, and whether every sample was used exactly once. Both.

Each worker process has one file, to which it adds a line before it computes its part of a step, so that a killed process
has written about every step to which it contributed. A line ends with a hash of itself and of the line before it.

    raysgd-audit 1 RUN BEGAN WORKER NODE PID      the file's first line; BEGAN is when the run's driver created its trainer
    joined GENERATION LOADS RANK WORLD STEP       what follows belongs to this generation, which begins after STEP
    batch STEP PLACE PIECE BEFORE AFTER START STOP ROWS
                                                  the batch of step STEP + PLACE + 1, where STEP steps are committed; if it is
                                                  processed in several pieces, one of them
    part STEP PLACE SHARD START STOP              of that batch, these samples of a shard of a stream
    length EPOCH SHARD SHARDS LENGTH              the worker has read one of the stream's SHARDS shards to its end
    epoch STEP EPOCH OFFSET TOTAL WHY             the epoch ended after this step: WHY is "all", "drop_last" or "operator"
    weights STEP DIGEST                           of the parameters after this step
    done STEP                                     a call ended, and all its steps are committed

A stream in shards has a sum of samples as its position, and a `part` line for each shard of which a batch has samples. In
an epoch, those of a shard must follow each other from 0 to the LENGTH that a reader has found.

BEFORE and AFTER are the positions in the epoch's order before and after the step. All ranks together have the samples from
BEFORE to AFTER, this one those from START to STOP: none, if it repeats a sample of another rank. With ROWS above 0, START
and STOP are rows of a batch of so many, which the ranks divide. START is -1 if the worker divides its data itself.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from raysgd.errors import RaysgdError, counted, ranked

__all__ = ["SUFFIX", "AuditError", "Batch", "Chain", "Verdict", "verify"]

SUFFIX = ".audit"
FIRST = "raysgd-audit 1"
HASH_LENGTH = 32
LINE_AT_MOST = 1000


class AuditError(RaysgdError):
    """An audit log was changed, is not complete, or shows that samples were lost or used twice."""


class Chain:
    """Creates the lines of one file. Owns the hash of the newest line."""

    def __init__(self) -> None:
        self._newest = b""

    def line(self, text: str) -> bytes:
        content = text.encode()
        self._newest = hashlib.sha256(self._newest + content).hexdigest()[:HASH_LENGTH].encode()
        return content + b" " + self._newest + b"\n"


class Batch(NamedTuple):
    """What one rank has of one step, or a piece of it."""

    step: int
    before: int
    after: int
    start: int
    stop: int
    rows: int

    @property
    def whole(self) -> tuple[int, int]:
        """Return the range that all ranks have together."""
        return (0, self.rows) if self.rows else (self.before, self.after)


class Part(NamedTuple):
    """The samples of a shard that one rank has in one step, or in a piece of it."""

    shard: int
    start: int
    stop: int


class EpochEnd(NamedTuple):
    step: int
    epoch: int
    offset: int
    total: int
    why: str


@dataclass
class Member:
    """What one worker wrote as a member of one generation. `committed` is the newest step that it knew to be committed."""

    worker: str
    generation: int
    loads: int
    rank: int
    world: int
    step: int
    committed: int
    ended: bool = False
    batches: dict[int, list[Batch]] = field(default_factory=dict)
    parts: dict[int, list[Part]] = field(default_factory=dict)
    lengths: dict[int, dict[int, int]] = field(default_factory=dict)
    shards: dict[int, int] = field(default_factory=dict)
    ends: list[EpochEnd] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)

    def add(self, kind: str, values: Sequence[str]) -> None:
        if kind == "length":
            epoch, shard, shards, length = map(int, values)
            self.shards[epoch] = shards
            self.lengths.setdefault(epoch, {})[shard] = length
            self.ended = False
            return
        step = int(values[0])
        if kind == "batch":
            place, piece, before, after, start, stop, rows = map(int, values[1:])
            number = step + place + 1
            earlier = self.batches[number] if piece else []  # a step that is repeated begins with its first piece
            self.batches[number] = [*earlier[:piece], Batch(number, before, after, start, stop, rows)]
            self.parts[number] = self.parts[number] if piece else []
        elif kind == "part":
            place, *part = map(int, values[1:])
            self.parts[step + place + 1].append(Part(*part))
        elif kind == "epoch":
            epoch, offset, total = map(int, values[1:4])
            self.ends.append(EpochEnd(step, epoch, offset, total, values[4]))
        elif kind == "weights":
            self.digests[step] = values[1]
        elif kind != "done" or values[1:]:
            raise ValueError(kind)
        self.ended = kind == "done"
        self.committed = max(self.committed, step)


@dataclass
class Log:
    """One worker's file, whose hashes are right."""

    run: str
    began: float
    name: str
    memberships: list[Member]


@dataclass
class Verdict:
    """What a log shows. `steps` and `samples` are those that the weights contain."""

    workers: int = 0
    runs: int = 0
    generations: int = 0
    steps: int = 0
    samples: int = 0
    epochs: int = 0
    left_out: int = 0
    unnumbered: int = 0
    repeated: int = 0
    compared: int = 0
    evicted: int = 0
    unfinished: int = 0
    shards: int = 0

    def lines(self) -> Iterator[str]:
        generations, runs = counted(self.generations, "generation"), counted(self.runs, "run")
        yield f"{counted(self.workers, 'worker process', 'worker processes')} in {generations} of {runs}"
        yield (
            f"{counted(self.steps, 'step')}, {counted(self.epochs, 'complete epoch')}: {counted(self.samples, 'sample')}, each used "
            "exactly once in its epoch"
        )
        if self.shards:
            yield f"{counted(self.shards, 'shard')} of streams, each used from its beginning to its end in its epoch"
        if self.left_out:
            yield f"{counted(self.left_out, 'sample')} left out, by drop_last=True or because the operator ended the epoch"
        if self.unnumbered:
            yield f"{counted(self.unnumbered, 'step')} on data that each worker divides itself, whose samples cannot be checked"
        if self.repeated:
            yield (
                f"{counted(self.repeated, 'step')} repeated, from a checkpoint or snapshot or from the beginning, which count once"
            )
        if self.evicted:
            yield f"{counted(self.evicted, 'rank')} evicted because the weights differed from those of the others"
        if self.unfinished:
            yield (
                f"{counted(self.unfinished, 'file')} without the end of a call: the process ended in it, or the end of the file was "
                "removed"
            )
        equal = f"equal in {counted(self.compared, 'comparison')}" if self.compared else "never compared"
        yield f"the ranks' weights were {equal}"


# -- reading ------------------------------------------------------------------------------------------


def verify(folder: Path) -> Verdict:
    """Return what the files in this folder show. Raise AuditError for the first violation."""
    files = sorted(folder.glob("*" + SUFFIX)) if folder.is_dir() else []
    if not files:
        raise AuditError(
            f"{folder} contains no file *{SUFFIX}: pass the folder that ElasticConfig(audit=...) named. If the workers were on "
            "several machines without a shared folder, collect the files from all of them"
        )
    logs = [log for file in files if (log := read(file)) is not None]
    unfinished = sum(bool(log.memberships) and not log.memberships[-1].ended for log in logs)
    verdict = Verdict(workers=len(files), unfinished=unfinished)
    history = CountedSteps(verdict)
    runs: dict[tuple[float, str], list[Log]] = {}
    for log in logs:
        runs.setdefault((log.began, log.run), []).append(log)
    for _, members in sorted(runs.items()):
        verdict.runs += 1
        _add_run(history, members)
    history.check()
    return verdict


def read(file: Path) -> Log | None:
    """Return the content of one worker's file. Its last line may be incomplete, if the machine failed or the disk was full.
    None if there is no line at all: then the worker had no part of any step."""
    lines = file.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    chain = Chain()
    log: Log | None = None
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        text, _, _ = line[:LINE_AT_MOST].decode(errors="replace").rstrip("\n").rpartition(" ")
        if chain.line(text) != line:
            raise AuditError(f"{where} was changed, or a line before it was removed: its hash is wrong")
        kind, *values = text.split(" ")
        try:
            if log is None:
                run, began, name, _, _ = text.removeprefix(FIRST + " ").split(" ")
                log = Log(run, float(began), name, [])
            elif kind == "joined":
                generation, loads, rank, world, step = map(int, values)
                log.memberships.append(Member(name, generation, loads, rank, world, step, step))
            else:
                log.memberships[-1].add(kind, values)
        except (ValueError, LookupError) as error:
            raise AuditError(f"{where} is not a line of an audit log that this version writes: {text!r}") from error
    return log


# -- checking -----------------------------------------------------------------------------------------


def _add_run(history: CountedSteps, logs: Iterable[Log]) -> None:
    """Add the generations of one run in their order. A generation ends where the next one begins."""
    found: dict[tuple[int, int], list[Member]] = {}
    for log in logs:
        for each in log.memberships:
            found.setdefault((each.generation, each.loads), []).append(each)
    generations = [sorted(members, key=lambda each: each.rank) for _, members in sorted(found.items())]
    for members, following in zip_longest(generations, generations[1:]):
        end = _end(members, following)
        if end > members[0].step:  # otherwise it ended before its first step, perhaps before all ranks had begun
            _check_membership(members)
        history.add(members, end, {each.worker for each in following or members})


def _check_membership(members: Sequence[Member]) -> None:
    first = members[0]
    name = f"generation {first.generation}"
    if [each.rank for each in members] != list(range(first.world)):
        ranks = [each.rank for each in members]
        raise AuditError(
            f"{name} has {first.world} ranks, but there are logs of ranks {ranks}: collect the files from all machines, or "
            "some were removed"
        )
    for each in members:
        if (each.world, each.step) != (first.world, first.step):
            raise AuditError(
                f"the ranks of {name} do not agree: rank 0 begins after step {first.step} with {first.world} ranks, rank "
                f"{each.rank} after step {each.step} with {each.world}"
            )


def _end(members: Sequence[Member], following: Sequence[Member] | None) -> int:
    """Return the last step of this generation that counts."""
    committed = max(each.committed for each in members)
    if following is None:
        return committed
    first, continued = following[0], {each.worker for each in following}
    if first.loads > members[0].loads:  # the user loaded a state
        return committed
    known = max((each.committed for each in members if each.worker in continued), default=None)
    if known is None:  # the next generation has a state that was saved: of the last step, or of an earlier one
        return max(first.step, committed)
    if first.step < known:
        raise AuditError(
            f"generation {first.generation} begins after step {first.step}, although a worker of generation "
            f"{members[0].generation} that continued had committed step {known}: committed steps were lost"
        )
    return first.step


class CountedSteps:
    """Owns the steps and ends of epochs that count. A state that is older than them, which was loaded, removes them."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._steps: dict[int, list[Batch]] = {}
        self._ends: dict[int, EpochEnd] = {}
        self._parts: dict[int, list[Part]] = {}
        self._lengths: dict[int, dict[int, int]] = {}
        self._shards: dict[int, int] = {}  # how many a stream has in an epoch
        self._evicted: set[str] = set()
        self._starts: set[int] = set()  # steps that follow a state from outside the log

    def add(self, members: Sequence[Member], end: int, staying: Set[str]) -> None:
        """Add the steps of a generation up to `end`. The workers in `staying` are in the next one, too."""
        first, verdict = members[0], self._verdict
        verdict.generations += 1
        for step in [step for step in self._steps if step > first.step]:
            verdict.repeated += 1
            del self._steps[step]
        for step in [step for step in self._ends if step > first.step]:
            del self._ends[step]
        if first.step not in self._steps:
            self._starts.add(first.step + 1)
        for step in range(first.step + 1, end + 1):
            absent = [each.rank for each in members if step not in each.batches]
            if absent:
                raise AuditError(
                    f"step {step} counts, but in generation {first.generation} {ranked(absent)} had no part of it"
                )
            self._steps[step] = [part for each in members for part in each.batches[step]]
            self._parts[step] = [part for each in members for part in each.parts[step]]
        for each in members:
            for ended in each.ends:
                if ended.step <= end and self._ends.setdefault(ended.step, ended)[1:] != ended[1:]:
                    raise AuditError(
                        f"the ranks do not agree on the end of epoch {ended.epoch}, after step {ended.step}"
                    )
            self._shards.update(each.shards)
            for epoch, lengths in each.lengths.items():
                self._lengths.setdefault(epoch, {}).update(lengths)
        self._compare(members, end, staying)

    def _compare(self, members: Sequence[Member], end: int, staying: Set[str]) -> None:
        """Compare the digests of the weights that all ranks have. A rank that differs may have been evicted."""
        for step in sorted(set.intersection(*(set(each.digests) for each in members))):
            digests = Counter(each.digests[step] for each in members)
            if step > end or len(digests) == 1:
                self._verdict.compared += step <= end and len(members) > 1
                continue
            usual, count = digests.most_common(1)[0]
            if all(each.worker not in staying for each in members if each.digests[step] != usual):
                self._evicted |= {each.worker for each in members if each.digests[step] != usual}
                self._verdict.evicted = len(self._evicted)
                continue
            ranks = [each.rank for each in members if each.digests[step] != usual]
            named = f"the {count} others differ from {ranked(ranks)}" if count > len(ranks) else "no majority is equal"
            workers = [each.worker for each in members if each.rank in ranks]
            raise AuditError(
                f"after step {step}, in generation {members[0].generation}, the weights of the ranks differ: {named} (their "
                f"workers: {', '.join(workers)})"
            )

    def check(self) -> None:
        """Raise AuditError unless each step that counts continues where the one before it ended, and its ranks had each of
        its samples once."""
        verdict = self._verdict
        position: int | None = 0
        used = Used()
        for step, parts in sorted(self._steps.items()):
            verdict.steps += 1
            if step in self._starts:
                position = None if step > 1 else 0  # a state from outside the log can be in the middle of an epoch
                used = Used(known=step == 1)
            elif step - 1 not in self._steps:
                raise AuditError(f"step {step} counts, but the step before it is not in the log")
            if any(part.start < 0 for part in parts):
                verdict.unnumbered += 1
            else:
                self._check_samples(step, parts, position)
                position = parts[0].after
            used.add(step, self._parts[step])
            if step in self._ends:
                ended = self._ends[step]
                self._check_end(ended, position)
                if ended.why == "all":
                    verdict.shards += used.end(
                        ended.epoch, self._shards.get(ended.epoch, 0), self._lengths.get(ended.epoch, {})
                    )
                position, used = 0, Used()

    def _check_samples(self, step: int, parts: Sequence[Batch], position: int | None) -> None:
        first = parts[0]
        if any((part.before, part.after, part.rows) != (first.before, first.after, first.rows) for part in parts):
            raise AuditError(f"the ranks do not agree on which samples step {step} has")
        if position is not None and first.before != position:
            lost = first.before - position
            what = f"{lost} samples were lost" if lost > 0 else f"{-lost} samples were used twice"
            raise AuditError(
                f"step {step} begins at sample {first.before} of its epoch, and the step before it ended at {position}: {what}"
            )
        at, stop = first.whole
        self._verdict.samples += stop - at
        for part in sorted(part for part in parts if part.stop > part.start):
            if part.start != at:
                what = "were lost" if part.start > at else "were used twice"
                raise AuditError(
                    f"in step {step}, samples {min(at, part.start)} to {max(at, part.start) - 1} of the epoch {what}"
                )
            at = part.stop
        if at != stop:
            what = "were lost" if at < stop else "were used twice"
            raise AuditError(f"in step {step}, samples {min(at, stop)} to {max(at, stop) - 1} of the epoch {what}")

    def _check_end(self, ended: EpochEnd, position: int | None) -> None:
        self._verdict.epochs += 1
        left = ended.total - ended.offset if ended.total >= 0 else 0
        if left and ended.why == "all":
            raise AuditError(
                f"epoch {ended.epoch} ended after {ended.offset} of {ended.total} samples: {left} were lost"
            )
        if position is not None and ended.total >= 0 and ended.offset != position:
            raise AuditError(
                f"epoch {ended.epoch} ended at sample {ended.offset}, but its last step ended at {position}"
            )
        self._verdict.left_out += left


@dataclass
class Used:
    """How many samples of each shard of a stream were used since the beginning of the epoch. If that is not `known`, because
    the epoch has begun outside the log, a shard counts from its first sample in the log."""

    known: bool = True
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, parts: Iterable[Part]) -> None:
        for shard, start, stop in sorted(parts):
            count = self.counts.get(shard, 0 if self.known else start)
            if start != count:
                what = "were lost" if start > count else "were used twice"
                first, last = min(start, count), max(start, count) - 1
                raise AuditError(f"in step {step}, samples {first} to {last} of shard {shard} {what}")
            self.counts[shard] = stop

    def end(self, epoch: int, shards: int, lengths: Mapping[int, int]) -> int:
        """Check the end of an epoch in which all samples were used. Return how many shards were checked."""
        if not self.counts or not self.known:
            return 0
        for shard in range(max(shards, max(self.counts) + 1)):
            used, length = self.counts.get(shard, 0), lengths.get(shard)
            if length is None:
                raise AuditError(f"epoch {epoch} ended, but no worker has read shard {shard} to its end")
            if used != length:
                raise AuditError(
                    f"epoch {epoch} ended after {used} of the {length} samples of shard {shard}: {length - used} were lost"
                )
        return shards


def new_file(folder: str, worker: str) -> int:
    """Return a descriptor of a new file for this worker. Each write to it is a complete line, which is not lost if the
    process is killed."""
    os.makedirs(folder, exist_ok=True)
    return os.open(
        os.path.join(folder, worker + SUFFIX), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
    )
