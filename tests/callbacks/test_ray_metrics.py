"""Gauges on a real metrics endpoint. The test starts its own Ray, because the tests' cluster may have no endpoint."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raysgd import AutoCheckpoint, Recovery, TorchTrainer
from raysgd.callbacks import RayMetricsCallback, Run, ray_metrics
from raysgd.callbacks.ray_metrics import GAUGES
from tests.callbacks.recording import Line, result

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import sys
import time
import urllib.request

import ray

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

from raysgd import TorchTrainer
from raysgd.callbacks import RayMetricsCallback
from tests.callbacks.recording import Line

with TorchTrainer(
    training_operator_cls=Line, use_gpu=False, num_workers=2, num_cpus_per_worker=1, callbacks=[RayMetricsCallback()]
) as trainer:
    trainer.train()
    trainer.save(sys.argv[1])
    trainer.resize(1)
    port = ray.nodes()[0]["MetricsExportPort"]
    until, found = time.monotonic() + 120, ""
    last = ("raysgd_step_seconds", "raysgd_checkpoint_age_seconds", 'raysgd_recoveries{', "} 1.0")
    while time.monotonic() < until and not all(each in found for each in last):
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
def test_gauges_are_on_the_endpoint_of_ray(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "saved.pt")],
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
    assert set(shown) == set(GAUGES), done.stdout
    assert all('trainer="Line"' in labels for labels, _ in shown.values())
    values = [shown[f"raysgd_{name}"][1] for name in ("world_size", "target_workers", "recoveries")]
    assert values == [1, 2, 1]


def test_without_ray_there_is_an_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # this process may be connected to another test's cluster
    with TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=[RayMetricsCallback()]) as trainer:
        assert trainer.train()["num_samples"] == 32
    errors = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert errors == ["RayMetricsCallback needs Ray, and this trainer runs without it: pass use_ray=True"]


class FakeGauge:
    """Keeps what a gauge was set to, as Ray's endpoint would show it."""

    shown: dict[str, list[float]]

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        assert name in GAUGES and description and tag_keys == ("trainer",)
        self.name = name

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tags == {"trainer": "first"}

    def set(self, value: float) -> None:
        self.shown.setdefault(self.name.removeprefix("raysgd_"), []).append(value)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    FakeGauge.shown = {}
    monkeypatch.setattr(ray_metrics, "Gauge", FakeGauge)
    return FakeGauge.shown


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_values_of_the_gauges(ray_cluster: None, shown: dict[str, list[float]], tmp_path: Path) -> None:
    with TorchTrainer(
        training_operator_cls=Line,
        use_gpu=False,
        num_workers=2,
        checkpoints=AutoCheckpoint(path=tmp_path / "auto"),
        callbacks=[RayMetricsCallback("first")],
    ) as trainer:
        assert set(shown) == {"world_size", "target_workers", "recoveries", "recovery_seconds"}
        for _ in trainer.epochs(1):  # makes an automatic checkpoint at its end
            result = trainer.train()
            assert "checkpoint_age_seconds" not in shown, "there is no checkpoint yet"
        assert 0 < result["data_seconds"] == pytest.approx(shown["data_seconds"][-1] * result["batch_count"])
        assert shown["step_seconds"][-1] * result["batch_count"] == pytest.approx(trainer.history[-1]["seconds"])
        assert shown["waiting"][-1] == 0, "no rank is slow"
        wait_until(lambda: shown.get("checkpoint_age_seconds"))
        wait_until(lambda: shown["checkpoint_age_seconds"][-1] > 3)
        trainer.save(tmp_path / "again.pt", blocking=False).result()
        wait_until(lambda: shown["checkpoint_age_seconds"][-1] < 3)
        trainer.resize(1)
        assert (shown["world_size"][-1], shown["target_workers"][-1], shown["recoveries"][-1]) == (1, 2, 1)
        assert shown["recovery_seconds"][-1] == trainer.recoveries[0].seconds > 0


def test_another_trainer_counts_anew(shown: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    callback, run = RayMetricsCallback("first"), Run(trainer="TorchTrainer", name="Line", num_workers=2)
    callback.on_start(run)
    callback.on_result(result())
    callback.on_recovery(Recovery("growth", (), 2, 3, in_place=True, batches_redone=0, seconds=2.0))
    assert (shown["recoveries"][-1], shown["recovery_seconds"][-1]) == (1, 2)
    callback.on_end(False)
    shown.clear()
    callback.on_start(run)
    callback.on_end(False)
    assert set(shown) == {"world_size", "target_workers", "recoveries", "recovery_seconds"}
    assert (shown["recoveries"][-1], shown["recovery_seconds"][-1]) == (0, 0)


DASHBOARD = json.loads((ROOT / "examples" / "grafana" / "raysgd_dashboard.json").read_text(encoding="utf-8"))
PANELS = DASHBOARD["panels"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}


def expressions() -> list[str]:
    """Return everything in the dashboard that Prometheus evaluates."""
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    shown += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    return [*shown, *(each["definition"] for each in VARIABLES.values() if each["type"] == "query")]


def test_the_dashboard_shows_exactly_the_metrics_that_exist() -> None:
    names = {name for each in expressions() for name in re.findall(r"\b(?:ray_)?raysgd_\w+", each)}
    assert names == {f"ray_{name}" for name in GAUGES}, "the endpoint shows them with this prefix"
    for each in expressions():
        selectors = re.findall(
            r"([A-Za-z_:][\w:]*)\s*[{\[]", each
        )  # a metric has labels or a range in these expressions
        assert set(selectors) <= names and re.search(r"ray_raysgd_\w+", each), each
        assert each.count("(") == each.count(")") and each.count("{") == each.count("}")
        assert set(re.findall(r"\$(\w+)", each)) <= {"trainer"}
        assert set(re.findall(r"(\w+)\s*=~", each)) <= {"trainer"}, "the label of the gauges"


def test_grafana_can_import_the_dashboard() -> None:
    assert isinstance(DASHBOARD["title"], str) and re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 36 and "id" not in DASHBOARD, "Grafana gives it an id of its own"
    assert VARIABLES["datasource"]["type"] == "datasource" and VARIABLES["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    users = [*PANELS, *DASHBOARD["annotations"]["list"], *(target for panel in PANELS for target in panel["targets"])]
    assert all(each["datasource"] == source for each in [*users, VARIABLES["trainer"]])
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"] and panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, "the width of a page"
