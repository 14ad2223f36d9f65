"""Training on several hosts, made of Linux namespaces: networks with wrong names, slow and broken connections.

The script runs on the first host, which has no worker, and two workers run on the others, one on each."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import Hosts, run_script, wait_until, why_not
from tests.tiers import lacks

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.elastic]

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    lacking = why_not()
    if lacking:
        lacks("hosts", lacking)
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
    """On one host its own name is unknown, and on two it has the address of docker's bridge."""
    hosts[1].set_names({})
    for host in (hosts[0], hosts[2]):
        host.set_names({host.name: "172.30.0.1"})
    try:
        found = run(hosts, "train")
        _, doctor = run_script(hosts[0], DRIVER, "doctor", limit_s=LIMIT_S)
    finally:
        hosts.name_all()
    assert sorted(found["hosts"]) == [hosts[1].address, hosts[2].address]
    assert found["lost_and_doubled"] == [0, 0] and found["recoveries"] == []
    assert "names       10.9.0.2: its name host-b does not resolve" in doctor, doctor
    for host in (hosts[0], hosts[2]):
        assert f"{host.address}: its name {host.name} resolves to 172.30.0.1, as that of another node does" in doctor, (
            doctor
        )
    assert "ok    ports       gloo uses 10.9.0." in doctor and "firewall" not in doctor, doctor
    assert "what 10.9.0.2 wrote to /tmp is not seen by 10.9.0.1, 10.9.0.3" in doctor, doctor


def test_a_firewall_before_the_control_port_is_named_at_once(hosts: Hosts) -> None:
    with hosts[0].firewall(7000):
        found = run(hosts, "train", RAYSGD_CONTROL_PORT="7000")
    assert "cannot connect to the script's machine at 10.9.0.1:7000 (timed out): a firewall?" in found["error"]
    assert "attempt" not in found["output"], "it can never succeed, so it is not tried again"


def test_a_save_over_a_slow_connection_is_no_hang(hosts: Hosts) -> None:
    """20 MB at 5 Mbit/s take 34 s, and the limit of a hang is 20 s."""
    with hosts[1].rate(5), hosts[2].rate(5):
        found = run(hosts, "save")
    assert found["recoveries"] == [] and found["lost_and_doubled"] == [0, 0]
    assert found["bytes"] > 20_000_000


def test_a_state_crosses_a_slow_network_once_before_its_worker_joins(hosts: Hosts) -> None:
    """20 MB at 5 Mbit/s take 34 s, and the limit of a set-up is 20 s."""
    with hosts[1].rate(5), hosts[2].rate(5):
        found = run(hosts, "grow")
    _, growth = found["recoveries"]
    assert growth["reason"] == "growth" and growth["in_place"] and growth["batches_redone"] == 0
    assert found["lost_and_doubled"] == [0, 0] and found["large"][0] == found["large"][1]


@pytest.mark.nightly  # it is tried three times, for a minute each
def test_the_hosts_of_the_workers_that_cannot_reach_each_other_are_named(hosts: Hosts) -> None:
    with hosts[1].without_route_to(hosts[2]):
        found = run(hosts, "train")
    assert "could not connect to each other" in found["error"]
    assert "rank 0 on 10.9.0." in found["error"] and "rank 1 on 10.9.0." in found["error"]


def test_workers_end_if_the_host_of_the_script_is_cut_off(hosts: Hosts) -> None:
    """After half of `hang_timeout_s`. Ray would end them with their nodes, after a minute. This is the last test, because Ray
    counts the nodes as failed afterwards."""
    with hosts[0].start(sys.executable, str(DRIVER), "wait") as driver:
        try:
            assert driver.stdout is not None
            assert any("training" in line for line in driver.stdout)
            assert workers(hosts)
            hosts[0].unplug()
            wait_until(lambda: not workers(hosts), 40, "the workers did not end")
        finally:
            hosts[0].plug_in()
            for process in hosts[0].processes(str(DRIVER)):
                process.kill()


def workers(hosts: Hosts) -> list[Any]:
    return [process for host in hosts.all for process in host.processes("ray::WorkerActor")]
