"""On a cluster: tokens that are refused, a job with a working directory, and where checkpoints are saved."""

import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
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
import os, tempfile
os.environ["HOME"] = tempfile.mkdtemp()  # without a token that Ray has stored
del os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]
from raysgd import ClusterError, TorchTrainer
from tests.torch.small import Line
try:
    TorchTrainer(training_operator_cls=Line, num_workers=2)
except ClusterError as error:
    print("REFUSED", error)
"""


def join(background: Background) -> subprocess.CompletedProcess[str]:
    return background.run("-c", JOIN, connected=True)


@pytest.mark.more
@pytest.mark.script(run=join)
def test_a_cluster_that_requires_a_token(outcome: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    """Without one; tests/workers/test_joining.py tries another one."""
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


@pytest.mark.nightly
@pytest.mark.script(run=submit)
def test_a_job_with_a_working_directory(outcome: Callable[[], tuple[Path, subprocess.CompletedProcess[str]]]) -> None:
    extracted, done = outcome()
    assert done.returncode == 0, done.stderr
    (helpers,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HELPER ")]
    assert all("/runtime_resources/working_dir_files/" in helper for helper in helpers), helpers
    assert f"SAVED {extracted / 'x.pt'}" in done.stdout.splitlines()


# -- the same with the real command and its server, in the environment that `make jobs` creates

JOBS_PYTHON = Path(sys.prefix) / "jobs/bin/python"


def submit_really(background: Background) -> tuple[Path, subprocess.CompletedProcess[str], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = background.folder()
    (folder / "script.py").write_text(JOB)
    (folder / "helper.py").write_text("")
    ray = [str(JOBS_PYTHON), "-m", "ray.scripts.scripts"]
    head = [*ray, "start", "--head", "--block", "--port=0", "--num-cpus=2", f"--dashboard-port={port}"]
    command = [*ray, "job", "submit", "--address", f"http://127.0.0.1:{port}"]
    command += ["--working-dir", str(folder), "--", str(JOBS_PYTHON), "script.py"]
    # The variable RAY_ADDRESS precedes --address. The server looks for its cluster's address in a file in RAY_TMPDIR.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory(prefix="raysgd-", dir="/tmp", ignore_cleanup_errors=True) as own:
        environment["RAY_TMPDIR"] = own
        with subprocess.Popen(head, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                assert any("Ray runtime started" in line for line in server.stdout), "the cluster did not start"
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
                stranger = {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
                refused = subprocess.run(command, capture_output=True, text=True, env=stranger, timeout=300)
            finally:
                server.terminate()
    assert refused.returncode != 0
    return folder, done, refused.stdout + refused.stderr


@pytest.mark.nightly
@pytest.mark.skipif(not JOBS_PYTHON.exists(), reason="`make jobs` installs Ray's job server")
@pytest.mark.script(run=submit_really)
def test_ray_job_submit(outcome: Callable[[], tuple[Path, subprocess.CompletedProcess[str], str]]) -> None:
    folder, done, refused = outcome()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (helpers,) = [line.split()[1:] for line in lines if line.startswith("HELPER ")]
    (saved,) = [line.split()[1] for line in lines if line.startswith("SAVED ")]
    assert len(helpers) == 2
    for path in [*helpers, saved]:
        assert "/runtime_resources/working_dir_files/" in path
        assert str(folder) not in path
    assert Path(saved).is_absolute()
    assert "Invalid authentication token" in refused
