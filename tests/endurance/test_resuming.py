"""A script with `fit` and automatic checkpoints is killed with its workers, again and again, and ends as if it never was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.endurance import resuming

pytestmark = [pytest.mark.elastic, pytest.mark.slow]


class Script:
    """One run of the script, which ends with the block in which it is used."""

    def __init__(self, folder: str, every: str, epochs: int) -> None:
        import ray

        environment = {**os.environ, "RAYSGD_TEST_CLUSTER": ray.get_runtime_context().gcs_address}
        self.process = subprocess.Popen(
            [sys.executable, resuming.__file__, folder, every, str(epochs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # if the test has failed, it is still running
        self.end()

    def words(self, first: str) -> list[str]:
        """Wait for the line that begins with this word, and return its other words."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith(first + " "):
                return line.split()[1:]
        raise AssertionError(f"no line {first}: {''.join(lines)}")

    def kill(self, after_batches: int, after_s: float) -> str:
        """Kill the workers and the script in the middle of training. Return from which checkpoint it had resumed."""
        resumed = self.words("RESUMED")[0]
        workers = self.words("WORKERS")
        # The first line can still say 0, so the place is read from the name of the checkpoint: ...-step000000040.pt
        first = now = int(resumed.removesuffix(".pt")[-9:]) if resumed != "None" else 0
        while now < first + after_batches:
            now = int(self.words("STEP")[0])
        time.sleep(after_s)
        self.process.send_signal(signal.SIGKILL)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker), signal.SIGKILL)
        return resumed

    def end(self) -> int:
        self.process.communicate(timeout=60)  # what it says when it exits must not be an error
        return self.process.returncode


def finished(folder: str, every: str, epochs: int) -> tuple[str, list[str]]:
    """Run the script to its end. Return the checkpoint from which it resumed, and what it says of its weights and losses."""
    with Script(folder, every, epochs) as script:
        resumed = script.words("RESUMED")[0]
        done = script.words("DONE")
        assert script.end() == 0
    return resumed, done


def killed(folder: str, every: str, epochs: int, chance: random.Random) -> str:
    """Run the script, and kill it at a random moment. Return the checkpoint from which it had resumed."""
    with Script(folder, every, epochs) as script:
        return script.kill(chance.randint(8, 60), chance.uniform(0.0, 0.2))


def killed_again_and_again(folder: str, elsewhere: str, every: str, *, kills: int, epochs: int) -> None:
    _, expected = finished(elsewhere, every, epochs)
    chance = random.Random(every)
    # An epoch has 20 batches: so some kills come in the first one after the start, others while a checkpoint is written.
    resumed = [killed(folder, every, epochs, chance) for _ in range(kills)]
    last, found = finished(folder, every, epochs)
    assert found == expected, (resumed, last)
    assert len({*resumed, last}) > 1 + kills // 5, "it has resumed from several checkpoints"


@pytest.mark.more
def test_three_kills(ray_cluster: None, tmp_path: Path) -> None:
    killed_again_and_again(f"{tmp_path}/killed", f"{tmp_path}/undisturbed", "7", kills=3, epochs=14)


@pytest.mark.nightly
@pytest.mark.parametrize("every", ["'epoch'", "1", "0.1"])
def test_eight_kills_with_local_storage(ray_cluster: None, tmp_path: Path, every: str) -> None:
    killed_again_and_again(f"{tmp_path}/killed", f"{tmp_path}/undisturbed", every, kills=8, epochs=25)


@pytest.mark.nightly
def test_eight_kills_with_s3(ray_cluster: None, s3: str, tmp_path: Path) -> None:
    folder = f"{s3}/{tmp_path.name}"
    killed_again_and_again(f"{folder}/killed", f"{folder}/undisturbed", "7", kills=8, epochs=25)
