"""Gauges on a real metrics endpoint. The test starts its own Ray, because the tests' cluster may have no endpoint."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import time
import urllib.request

import ray

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

from raysgd import TorchTrainer
from raysgd.callbacks import RayMetricsCallback
from tests.callbacks.recording import Line

with TorchTrainer(
    training_operator_cls=Line, use_gpu=False, use_ray=True, num_cpus_per_worker=1, callbacks=[RayMetricsCallback()]
) as trainer:
    result = trainer.train()
    row = trainer.history[-1]
    print("samples", result["num_samples"] / row["seconds"])
    print("step", row["seconds"] / result["batch_count"])
    port = ray.nodes()[0]["MetricsExportPort"]
    until, found = time.monotonic() + 120, ""
    while time.monotonic() < until and not ("raysgd_step_seconds" in found and "raysgd_recoveries" in found):
        try:
            found = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:
            found = ""
        time.sleep(0.5)
    print("\\n".join(line for line in found.splitlines() if "raysgd" in line))
ray.shutdown()
"""


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None or importlib.util.find_spec("aiohttp_cors") is None,
    reason="needs Ray with its metrics agent: pip install 'raysgd[metrics]'",
)
def test_gauges_are_on_the_endpoint_of_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "RAY_metrics_report_interval_ms": "500"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    shown = {
        name: (labels, float(value))
        for name, labels, value in re.findall(r"^ray_(raysgd_\w+)\{(.*)\} (\S+)$", done.stdout, re.MULTILINE)
    }
    assert set(shown) == {
        "raysgd_samples_per_second",
        "raysgd_step_seconds",
        "raysgd_world_size",
        "raysgd_recoveries",
    }, done.stdout
    assert all('trainer="Line"' in labels for labels, _ in shown.values())
    assert shown["raysgd_world_size"][1] == 1
    assert shown["raysgd_recoveries"][1] == 0
    expected = {name: float(value) for name, value in re.findall(r"^(samples|step) (\S+)$", done.stdout, re.MULTILINE)}
    assert shown["raysgd_samples_per_second"][1] == pytest.approx(expected["samples"])
    assert shown["raysgd_step_seconds"][1] == pytest.approx(expected["step"])


def test_without_ray_there_is_an_error() -> None:
    """Run in another process, because this one may be connected to another test's cluster."""
    code = (
        "import logging; logging.basicConfig()\n"
        "from raysgd import TorchTrainer\n"
        "from raysgd.callbacks import RayMetricsCallback\n"
        "from tests.callbacks.recording import Line\n"
        "with TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=[RayMetricsCallback()]) as trainer:\n"
        "    print(trainer.train()['num_samples'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "32", done.stderr
    assert "RayMetricsCallback needs Ray, and this trainer runs without it: pass use_ray=True" in done.stderr
