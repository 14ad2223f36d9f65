"""How long each test takes, and a budget of seconds for each folder.

At its end, a run writes into `build/durations.json` (`durations_more.json` for that tier): for each test the seconds of
its setup, its call and its teardown, and the processor seconds of this process and all processes below it (Ray's,
workers, scripts). Tests that it did not run keep theirs, until a run of the whole tier passes and replaces them all. It
prints their sums for each folder. A run of a whole tier fails if a folder took more than 1.5 times the seconds that
`tests/budgets.json` allows, unless other programs used the machine meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build"
BUDGETS = ROOT / "tests" / "budgets.json"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
EXCESS = 1.5
# The machine is quiet if programs outside of the run used less than this part of its processors.
QUIET = 0.05
# The options with which a run is not the whole of its tier.
CHOOSE = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob")
# The processes below this one are counted after tests that took this long. Shorter ones use what they use here.
COUNTED_S = 0.05


def processor_s() -> float:
    """Return the processor seconds of this process and of all processes below it, ended ones included."""
    used, below = {}, defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            used[int(entry)] = sum(map(int, fields[11:15])) * TICK_S
            below[int(fields[1])].append(int(entry))
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        total += used.get(process, 0.0)
        waiting += below[process]
    return total


def machine_s() -> float:
    """Return the processor seconds that all programs of this machine have used, and what its host took from it."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) * TICK_S


class Durations:
    """A plugin: measures the tests of this process, and in the process that reports, writes and judges all of them."""

    def __init__(self, tier: str, *, worker: bool) -> None:
        self._tier, self._worker = tier, worker
        self._tests: dict[str, dict[str, float]] = defaultdict(dict)
        self._begun = time.monotonic()
        self._of_machine, self._own = machine_s(), processor_s()
        self._used = self._own

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "teardown":
            begun = getattr(item, "_begun", call.start)
            used = processor_s() if time.time() - begun > COUNTED_S else self._used
            report.processor_s, self._used = max(0.0, used - self._used), used
        elif call.when == "setup":
            item._begun = call.start  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid][report.when] = round(report.duration, 4)
        if report.when == "teardown":
            self._tests[report.nodeid]["processor"] = round(getattr(report, "processor_s", 0.0), 2)

    def folders(self) -> dict[str, Counter[str]]:
        """Return the sums for each folder of tests: how many, their seconds, and their processor seconds."""
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for name, test in self._tests.items():
            path = Path(name.split("::")[0]).parts
            folder = path[1] if len(path) > 2 else "(top)"
            sums[folder].update(tests=1, processor=test.get("processor", 0.0))
            sums[folder]["seconds"] += sum(test.get(phase, 0.0) for phase in ("setup", "call", "teardown"))
        return dict(sorted(sums.items()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker or not self._tests:
            return
        passed = session.exitstatus == pytest.ExitCode.OK
        name = "durations.json" if self._tier == "test" else f"durations_{self._tier}.json"
        kept = (FOLDER / name).is_file() and not (passed and self._whole(session.config))
        earlier = json.loads((FOLDER / name).read_text(encoding="utf-8")) if kept else {}
        FOLDER.mkdir(exist_ok=True)
        draft = FOLDER / f"{name}.{os.getpid()}"
        draft.write_text(json.dumps(earlier | self._tests, indent=0, sort_keys=True), encoding="utf-8")
        draft.replace(FOLDER / name)
        if passed and self._over(session.config) and self._quiet():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if len(self._tests) < 100:
            return
        terminalreporter.section("seconds for each folder")
        for folder, sums in self.folders().items():
            row = f"{folder:14} {sums['tests']:5} tests {sums['seconds']:7.0f} s, {sums['processor']:6.0f} s of processors"
            terminalreporter.write_line(row)
        for line in self._over(config):
            terminalreporter.write_line(line if self._quiet() else line + " (other programs used the machine)")

    @staticmethod
    def _whole(config: pytest.Config) -> bool:
        return config.args == config.getini("testpaths") and not any(config.getoption(name, None) for name in CHOOSE)

    def _over(self, config: pytest.Config) -> list[str]:
        """Return a line for each folder that took too long, if a whole tier ran."""
        budgets = json.loads(BUDGETS.read_text(encoding="utf-8")).get(self._tier, {}) if self._whole(config) else {}
        return [
            f"tests/{folder} took {self.folders()[folder]['seconds']:.0f} s; its budget is {allowed} s: make its tests"
            " faster, move some to another tier, or change tests/budgets.json"
            for folder, allowed in budgets.items()
            if folder in self.folders() and self.folders()[folder]["seconds"] > EXCESS * allowed
        ]

    def _quiet(self) -> bool:
        others = (machine_s() - self._of_machine) - (processor_s() - self._own)
        return others < QUIET * (os.cpu_count() or 1) * (time.monotonic() - self._begun)
