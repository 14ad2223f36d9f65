"""On a cluster: tokens that are refused, a job with a working directory, and where checkpoints are saved."""

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.background import Background
from tests.torch.small import Line, inline


@pytest.mark.parametrize("blocking", [True, False])
def test_save_reports_the_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "raysgd"), inline(Line) as trainer:
        saved: Any = trainer.save("x.pt", blocking=blocking)
        assert (saved if blocking else saved.result(60)) == str(tmp_path / "x.pt")
    assert f"saved the checkpoint {tmp_path / 'x.pt'}" in caplog.messages


def test_a_save_that_fails_does_not_say_that_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with inline(Line) as trainer, caplog.at_level(logging.INFO, "raysgd"), pytest.raises(IsADirectoryError) as caught:
        trainer.save("folder")
    assert str(tmp_path / "folder") in str(caught.value)
    assert not [message for message in caplog.messages if message.startswith("saved")]


# -- a cluster that requires a token ------------------------------------------------------------------

JOIN = """
import os, sys, tempfile
given = sys.argv[1]
os.environ["HOME"] = tempfile.mkdtemp()  # without a token that Ray has stored
del os.environ["RAY_AUTH_TOKEN"]
if given == "another token":
    os.environ["RAY_AUTH_TOKEN"] = "0" * 64
elif given == "nothing":
    del os.environ["RAY_AUTH_MODE"]
from raysgd import ClusterError, TorchTrainer
from tests.torch.small import Line
try:
    TorchTrainer(training_operator_cls=Line, num_workers=2)
except ClusterError as error:
    print("REFUSED", error)
"""


def join(background: Background, given: str) -> subprocess.CompletedProcess[str]:
    return background.run("-c", JOIN, given, connected=True)


@pytest.mark.script(run=join)
@pytest.mark.parametrize("given", ["another token", "the mode without a token", "nothing"])
def test_a_cluster_that_refuses_the_token(given: str, outcome: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    done = outcome()
    assert done.returncode == 0, done.stderr
    assert "REFUSED joining the Ray cluster at " in done.stdout, done.stdout + done.stderr
    assert "it requires a token, and this process has none or another one. Set RAY_AUTH_MODE=token" in done.stdout
    assert "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH" in done.stdout


# -- a job: `ray job submit --working-dir` uploads the folder, and runs the script in it on the cluster with this variable

SUBMIT = """
import json, os, subprocess, sys
import ray
ray.init(runtime_env={"working_dir": sys.argv[1]})
package = ray.get_runtime_context().runtime_env["working_dir"]
job = {"runtime_env": {"working_dir": package}, "metadata": {"job_submission_id": "raysubmit_1"}}
environment = {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job), "PYTHONPATH": os.environ["PYTHONPATH"]}
sys.exit(subprocess.run([sys.executable, "script.py"], cwd=sys.argv[2], env=environment).returncode)
"""
JOB = """
import logging
from raysgd import TorchTrainer
from raysgd.workers import user_code
from tests.torch.small import Line

class Uses(Line):
    def setup(self, config):
        import helper
        super().setup(config)
        self.where = helper.__file__

    def validate(self, iterator, info=None):
        return {"where": self.where, "num_samples": 1}

with TorchTrainer(training_operator_cls=Uses, num_workers=2, use_gpu=False) as trainer:
    trainer.train()
    print("HELPER", *(each["where"] for each in trainer.validate(reduce_results=False)))
    print("SAVED", trainer.save("x.pt"))
"""


def submit(background: Background) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder, extracted = background.folder(), background.folder()
    for place in (folder, extracted):  # the cluster extracts the package elsewhere
        (place / "script.py").write_text(JOB)
    (folder / "helper.py").write_text("")
    return extracted, background.run("-c", SUBMIT, str(folder), str(extracted), connected=True)


@pytest.mark.soak
@pytest.mark.script(run=submit)
def test_a_job_with_a_working_directory(outcome: Callable[[], tuple[Path, subprocess.CompletedProcess[str]]]) -> None:
    extracted, done = outcome()
    assert done.returncode == 0, done.stderr
    (helpers,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HELPER ")]
    assert all("/runtime_resources/working_dir_files/" in helper for helper in helpers), helpers
    assert f"SAVED {extracted / 'x.pt'}" in done.stdout.splitlines()
