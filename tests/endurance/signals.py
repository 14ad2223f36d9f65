"""End a driver with a signal at a chosen moment, and check what is left: processes, files, the checkpoint."""

import contextlib
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import Ground

__all__ = ["ENDS_WITHIN_S", "PHASES", "RAY_AGENTS", "Ended", "Moment", "disturb", "moments"]

DRIVER = Path(__file__).with_name("driver.py")
PHASES = ("ray", "start", "train", "validate", "save", "background", "growth", "recovery", "shutdown")
# The approximate duration of each phase. A signal is sent at a random moment of it.
LASTS_S = {"ray": 3.0, "start": 6.0, "train": 1.0, "validate": 0.3, "save": 0.15, "background": 0.5, "growth": 4.0}
LASTS_S |= {"recovery": 4.0, "shutdown": 1.0}
STARTS_WITHIN_S = 240.0
ENDS_WITHIN_S = 60.0
# Processes of Ray's own. They stay when a signal ends the driver while Ray itself shuts down, also without raysgd.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
AGENTS_S = 10.0
MARK = "RAYSGD_TEST_RUN"


@dataclass(frozen=True)
class Moment:
    """The signal, its phase, and how long after the phase's beginning it is sent. It is sent again `again_s` later."""

    number: signal.Signals
    phase: str
    after_s: float
    catch: bool = False
    again_s: float | None = None

    def __str__(self) -> str:
        extra = ("-caught" if self.catch else "") + ("-twice" if self.again_s is not None else "")
        return f"{self.number.name}-{self.phase}-{self.after_s:.2f}s{extra}"


def moments(number: signal.Signals, count: int, *, seed: int) -> list[Moment]:
    """Return moments with every phase equally often. A third each of the Ctrl-Cs are plain, caught by the script, and pressed twice."""
    chance = random.Random(seed)
    phases = [PHASES[place % len(PHASES)] for place in range(count)]
    chance.shuffle(phases)
    chosen = []
    for place, phase in enumerate(phases):
        after_s = chance.uniform(0, LASTS_S[phase])
        again_s = chance.uniform(0, 1.5) if number == signal.SIGINT and place % 3 == 2 else None
        chosen.append(Moment(number, phase, after_s, number == signal.SIGINT and place % 3 == 1, again_s))
    return chosen


@dataclass
class Ended:
    """The outcome. `hit` is whether the driver was alive when the signal was sent. `seconds` is the time from the signal to its
    end, and `all_s` to the end of the last process that it had started."""

    moment: Moment
    hit: bool = False
    status: int | None = None
    seconds: float = 0.0
    all_s: float = 0.0
    output: str = ""
    errors: str = ""
    left: list[str] = field(default_factory=list)
    drafts: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    checkpoint: str = "none"

    def __str__(self) -> str:
        return (
            f"{self.moment}: hit={self.hit} status={self.status} driver {self.seconds:.1f} s, all {self.all_s:.1f} s, "
            f"left={self.left} drafts={self.drafts} temporary={self.temporary} shm={self.shared_memory} "
            f"checkpoint={self.checkpoint}\n{self.output}\n{self.errors}"
        )


def disturb(moment: Moment) -> Ended:
    """Run the driver with its own Ray cluster and temporary folder, and send the signal."""
    ended = Ended(moment)
    mark = uuid.uuid4().hex
    # Short, because Ray puts sockets there.
    with tempfile.TemporaryDirectory(prefix="raysgd-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for part in ("saved", "tmp", "ray"):
            (folder / part).mkdir()
        processes = _Processes(mark)
        with (folder / "errors").open("w+", encoding="utf-8") as errors:
            driver = subprocess.Popen(
                [sys.executable, str(DRIVER), str(folder / "saved"), *(["catch"] if moment.catch else [])],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, MARK: mark, "RAY_TMPDIR": str(folder / "ray"), "TMPDIR": str(folder / "tmp")},
                start_new_session=True,  # Ctrl-C is for the driver alone, as in a notebook or from `kill -INT`
            )
            try:
                _send(driver, moment, ended)
            finally:
                driver.kill()
                driver.wait()
                processes.end(ended)
            errors.seek(0)
            ended.errors = errors.read()[-4000:]
        _look(folder, ended, processes.seen)
    return ended


def _send(driver: "subprocess.Popen[str]", moment: Moment, ended: Ended) -> None:
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert driver.stdout is not None
        for line in driver.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    output: list[str] = []
    while (line := lines.get(timeout=STARTS_WITHIN_S)) is not None:
        output.append(line)
        if line.split() == ["PHASE", moment.phase]:
            break
    time.sleep(moment.after_s)
    ended.hit = driver.poll() is None
    sent = time.monotonic()
    driver.send_signal(moment.number)
    if moment.again_s is not None:
        time.sleep(moment.again_s)
        driver.send_signal(moment.number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended.status = driver.wait(timeout=ENDS_WITHIN_S)
    ended.seconds = time.monotonic() - sent
    reader.join(timeout=5)
    while not lines.empty():
        output.append(lines.get() or "")
    ended.output = "".join(output)


class _Processes:
    """Finds all processes of a run by a variable in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark, self.seen = f"{MARK}={mark}".encode(), set[int]()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def alive(self) -> dict[int, str]:
        found = dict(self._found())
        self.seen.update(found)
        return found

    def end(self, ended: Ended) -> None:
        """Wait for them to end by themselves. Record and kill those that do not."""
        self._done.set()
        self._thread.join()
        began = time.monotonic()
        while (alive := self.alive()) and time.monotonic() - began < ENDS_WITHIN_S:
            waited = time.monotonic() - began
            if waited > AGENTS_S and all(name.startswith(RAY_AGENTS) for name in alive.values()):
                break
            time.sleep(0.1)
        ended.all_s = ended.seconds + time.monotonic() - began
        ended.left = sorted(name.strip() for name in alive.values())
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            self.alive()

    def _found(self) -> Iterator[tuple[int, str]]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except OSError:
                continue  # it has just ended


def _look(folder: Path, ended: Ended, processes: set[int]) -> None:
    saved = folder / "saved"
    ended.drafts = sorted(path.name for path in saved.iterdir() if path.name not in ("checkpoint.pt", "marks"))
    # torch makes its compiler's cache folder in every process that imports it, and keeps it on purpose.
    ended.temporary = sorted(path.name for path in (folder / "tmp").iterdir() if "torchinductor_" not in path.name)
    for path in Path("/dev/shm").iterdir():
        numbers = {int(number) for number in re.findall(r"\d+", path.name)}
        if numbers & processes:
            ended.shared_memory.append(path.name)
    if (saved / "checkpoint.pt").exists():
        ended.checkpoint = _loaded(saved / "checkpoint.pt")
    shutil.rmtree(folder / "ray", ignore_errors=True)


def _loaded(path: Path) -> str:
    """Load the checkpoint into a trainer in this process, and return whether its weights are exact."""
    with tempfile.TemporaryDirectory() as marks:
        ground = Ground(Path(marks), num_workers=1, use_ray=False, config={"samples": 240})
        try:
            ground.trainer.load(path)
            trained = ground.trained()
        except Exception as error:
            return f"damaged: {error!r}"
        finally:
            ground.trainer.shutdown()
    exact = set(trained) == set(range(240)) and max(trained.values()) - min(trained.values()) <= 1
    return "exact" if exact else f"wrong: {trained}"
