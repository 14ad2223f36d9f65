"""Settings refuse what they cannot mean, and say what they can."""

from typing import Any

import pytest

from raysgd import ConfigError, ElasticConfig
from raysgd.config import Limits, WorkerResources
from raysgd.environment import CONTROL_PORT, control_ports


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("min_workers", 0, "at least 1"),
        ("min_workers", 1.5, "whole number"),
        ("min_workers", True, "whole number"),
        ("max_attempts", 0, "at least 1"),
        ("hot_spares", -1, "at least 0"),
        ("backoff_s", -1, "at least 0"),
        ("backoff_max_s", 0.5, "at least 1"),
        ("hang_timeout_s", 0, "above 0"),
        ("hang_timeout_s", None, "seconds"),
        ("grow", "always", "'epoch'"),
        ("batch", "global", "'per_worker'"),
        ("snapshot_every", 0, "None"),
        ("snapshot_every", "batch", "'epoch'"),
    ],
)
def test_elastic_config_names_the_argument_and_what_is_legal(argument: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=argument) as caught:
        ElasticConfig(**{argument: value})
    assert says in str(caught.value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_spares_need_growth() -> None:
    with pytest.raises(
        ConfigError, match="hot_spares=1 and grow=False cannot be combined: with grow=False no worker is replaced"
    ):
        ElasticConfig(hot_spares=1, grow=False)


@pytest.mark.parametrize(("timeout_s", "hang_s"), [(1800, 600), (10, 600), (1800, 5), (1, 1)])
def test_every_limit_follows_from_two_numbers(timeout_s: float, hang_s: float) -> None:
    limits = Limits.derive(timeout_s=timeout_s, hang_timeout_s=hang_s, start_s=100)
    assert limits.collective_s < limits.hang_s, "a vanished host must end a collective before it looks like a hang"
    assert limits.unreachable_s < limits.collective_s or limits.collective_s == timeout_s
    assert limits.collective_s <= timeout_s
    assert limits.join_s <= min(timeout_s, 60)
    assert limits.setup_s >= limits.hang_s == hang_s
    assert limits.hang_s <= limits.silent_s == max(hang_s, 10), "an import may keep a process silent for a while"
    assert limits.start_s == 100


def parse(cpus: Any = 1, use_gpu: bool = False, resources: Any = None, asked: bool | None = None) -> WorkerResources:
    return WorkerResources.parse(cpus, use_gpu, resources, gpu_asked=asked)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"CPU": 1}),
        ({"cpus": 0}, {}),
        ({"cpus": 0.5}, {"CPU": 0.5}),
        ({"use_gpu": True}, {"CPU": 1, "GPU": 1}),
        ({"resources": {"CPU": 4}}, {"CPU": 4}),
        ({"resources": {"TPU": 1, "disk": 0}}, {"CPU": 1, "TPU": 1}),
    ],
)
def test_worker_resources(arguments: dict[str, Any], expected: dict[str, float]) -> None:
    assert parse(**arguments).as_dict() == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"cpus": -1}, "num_cpus_per_worker"),
        ({"cpus": "1"}, "num_cpus_per_worker"),
        ({"resources": {"GPU": "1"}}, "GPU"),
        ({"resources": [1]}, "resources_per_worker must be a dict"),
        ({"resources": {"GPU": 1}, "asked": False}, "set use_gpu=True"),
        ({"resources": {"GPU": 0}, "use_gpu": True, "asked": True}, "resources_per_worker['GPU'] is 0"),
    ],
)
def test_worker_resources_refuse(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "free", "fits"),
    [
        ({"CPU": 1}, {"CPU": 3.0}, 3),
        ({"CPU": 2}, {"CPU": 3.0}, 1),
        ({"CPU": 0.1}, {"CPU": 0.3}, 3),
        ({"CPU": 1, "GPU": 1}, {"CPU": 8.0}, 0),
        ({"CPU": 1, "disk": 3}, {"CPU": 8.0, "disk": 5.0}, 1),
    ],
)
def test_how_many_workers_fit(wanted: dict[str, float], free: dict[str, float], fits: int) -> None:
    assert parse(resources=wanted).fits(free) == fits


@pytest.mark.parametrize(
    ("text", "ports"),
    [("", None), (" 7000 ", range(7000, 7001)), ("7000-7010", range(7000, 7011)), ("1024-65535", range(1024, 65536))],
)
def test_the_control_port_can_be_chosen(text: str, ports: range | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_PORT, text)
    assert control_ports() == ports


@pytest.mark.parametrize("text", ["80", "65536", "7010-7000", "7000-", "a", "7000-7010-7020"])
def test_a_wrong_control_port_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_PORT, text)
    with pytest.raises(ConfigError, match=f"RAYSGD_CONTROL_PORT is {text!r}.* from 1024 to 65535, such as 7000"):
        control_ports()
