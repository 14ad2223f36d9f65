"""Training on several hosts, made of Linux namespaces: networks with wrong names, slow and broken connections.

The script runs on the first host, which has no worker, and two workers run on the others, one on each."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import Hosts, run_script, why_not

pytestmark = [pytest.mark.slow, pytest.mark.elastic]

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    lacking = why_not()
    if lacking:
        pytest.skip(lacking)
    with Hosts(3) as hosts:
        hosts.start_ray(head_cpus=0)
        yield hosts


def run(hosts: Hosts, name: str, **environment: str) -> dict[str, Any]:
    """Run a part of `driver.py` on the first host, and return what it found."""
    _, output = run_script(hosts[0], DRIVER, name, limit_s=LIMIT_S, **environment)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    return {"output": output, **json.loads(lines[-1])}


def test_training_does_not_need_the_names_of_the_hosts(hosts: Hosts) -> None:
    """On one host its own name is unknown, and on another it has the address of docker's bridge."""
    hosts[1].set_names({})
    hosts[2].set_names({hosts[2].name: "172.30.0.1"})
    try:
        found = run(hosts, "train")
    finally:
        hosts.name_all()
    assert sorted(found["hosts"]) == [hosts[1].address, hosts[2].address]
    assert found["lost_and_doubled"] == [0, 0] and found["recoveries"] == []
