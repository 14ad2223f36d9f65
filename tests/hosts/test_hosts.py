"""Training on several hosts, made of Linux namespaces: names, files, slow networks, firewalls and other frameworks.

The script runs on the first host, which has no worker, and two workers run on the others, one on each."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.hosts.hosts import Host, Hosts, Script, wait_until, why_not
from tests.hosts.parts import begin, found_by, run
from tests.tiers import lacks

pytestmark = [pytest.mark.slow, pytest.mark.elastic]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """On one host its own name is unknown, and on two it has the address of docker's bridge."""
    if lacking := why_not():
        lacks("hosts", lacking)
    with Hosts(3) as hosts:
        hosts.start_ray(head_cpus=0)
        hosts[1].set_names({})
        for host in (hosts[0], hosts[2]):
            host.set_names({host.name: "172.30.0.1"})
        yield hosts


@pytest.fixture(scope="module")
def waiting(hosts: Hosts) -> Iterator[dict[str, Script]]:
    """Return two scripts that mostly wait, beside those of the first tests: `raysgd doctor`, and one before a firewall."""
    with ExitStack() as stack:
        stack.enter_context(hosts[0].firewall(7000))
        firewall = stack.enter_context(begin(hosts[0], "beside", RAYSGD_CONTROL_PORT="7000"))
        yield {"firewall": firewall, "doctor": stack.enter_context(begin(hosts[0], "doctor"))}


@pytest.fixture(scope="module")
def files(hosts: Hosts) -> dict[str, Any]:
    return run(hosts[0], "files")


@pytest.fixture(scope="module")
def slow(hosts: Hosts) -> dict[str, Any]:
    """At 7 Mbit/s, 20 MB take 24 s. The limits of a hang and of a set-up are 20 s."""
    with hosts[1].rate(7), hosts[2].rate(7):
        return run(hosts[0], "slow")


@pytest.mark.more
def test_training_does_not_need_the_names_of_the_hosts(
    hosts: Hosts, waiting: dict[str, Script], files: dict[str, Any]
) -> None:
    assert sorted(files["hosts"]) == [hosts[1].address, hosts[2].address]
    assert files["lost_and_doubled"] == [0, 0] and files["recoveries"] == []


@pytest.mark.more
def test_workers_share_neither_modules_nor_a_disk_with_the_script(hosts: Hosts, files: dict[str, Any]) -> None:
    assert files["words"] == ["borrowed"] * 2
    assert files["lost_and_doubled"] == [0, 0] and files["recoveries"] == []
    saved = files["saved"][0]
    assert files["saved"] == files["later"] == files["loaded"] == [saved] * 2
    assert saved not in files["left"] and files["again"] == files["left"], "the same epoch, from the same state"
    assert "the worker on host-" in files["refused"] and "or a URI" in files["refused"], files["refused"]
    assert not any("parts" in name for name in files["files"]), files["files"]
    assert {"whole.pt", "later.pt"} < set(files["files"])
    for host in hosts.all[1:]:
        assert ".pt" not in host.call("ls", "/tmp"), "only the script writes"


@pytest.mark.more
def test_a_state_crosses_a_slow_network_once_before_its_worker_joins(slow: dict[str, Any]) -> None:
    growth = slow["recoveries"][-1]
    assert growth["reason"] == "growth" and growth["in_place"] and growth["batches_redone"] == 0
    assert growth["seconds"] < 2 * 24 and slow["large"][0] == slow["large"][1]
    assert slow["lost_and_doubled"] == [0, 0]


@pytest.mark.more
def test_a_save_over_a_slow_connection_is_no_hang(slow: dict[str, Any]) -> None:
    assert slow["save_s"] > 20 and slow["bytes"] > 20_000_000
    # Its first step, in two parts, is made again, as its operator steps the optimizer itself.
    assert [each["reason"] for each in slow["recoveries"]] == ["shrink", "batch", "growth"]


@pytest.mark.more
def test_a_firewall_before_the_control_port_is_named_at_once(waiting: dict[str, Script]) -> None:
    found = found_by(waiting["firewall"])
    assert "cannot connect to the script's machine at 10.9.0.1:7000 (timed out): a firewall?" in found["error"]
    assert "attempt" not in found["output"], "it can never succeed, so it is not tried again"


@pytest.mark.more
def test_the_doctor_says_which_names_are_wrong(hosts: Hosts, waiting: dict[str, Script]) -> None:
    doctor = waiting["doctor"].end()
    assert "names       10.9.0.2: its name host-b does not resolve" in doctor, doctor
    for host in (hosts[0], hosts[2]):
        named = f"{host.address}: its name {host.name} resolves to 172.30.0.1, as that of another node does"
        assert named in doctor, doctor
    assert "ok    ports       gloo uses 10.9.0." in doctor and "firewall" not in doctor, doctor
    assert "what 10.9.0.2 wrote to /tmp is not seen by 10.9.0.1, 10.9.0.3" in doctor, doctor


@pytest.mark.nightly
def test_functions_save_their_checkpoints_on_the_host_of_the_script(hosts: Hosts) -> None:
    found = run(hosts[0], "functions")
    assert found["recoveries"] == [] and found["lost"] == 0 and found["uses"] == [3]
    assert found["again"] == 1600, "the fourth epoch, from the checkpoint of the third"
    assert found["epoch"] == 2 and found["words"] == 1000 and len(found["checkpoints"]) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["tensorflow", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_other_frameworks(hosts: Hosts, part: str) -> None:
    hosts.name_all()  # Horovod resolves them
    found = run(hosts[0], part)
    assert sorted(found["hosts"]) == [hosts[1].address, hosts[2].address]
    assert found["lost_and_doubled"] == [0, 0] and not found["recoveries"]
    if part == "tensorflow":
        assert found["saved"][0] == found["saved"][1] and found["loaded"] == found["saved"]
    else:
        assert found["weights"][0] == found["weights"][1]


@pytest.mark.nightly  # it is tried three times, for a minute each
def test_the_hosts_of_the_workers_that_cannot_reach_each_other_are_named(hosts: Hosts) -> None:
    with hosts[1].without_route_to(hosts[2]):
        found = run(hosts[0], "once")
    assert "could not connect to each other" in found["error"]
    assert "rank 0 on 10.9.0." in found["error"] and "rank 1 on 10.9.0." in found["error"]


@pytest.mark.more
def test_workers_end_if_the_host_of_the_script_is_cut_off(hosts: Hosts) -> None:
    """After half of `hang_timeout_s`. Ray would end them with their nodes, after a minute. This is the last test, because Ray
    counts the nodes as failed afterwards."""
    with begin(hosts[0], "wait") as script:
        script.until("now training")
        assert all(map(workers_of, hosts.all[1:]))
        with hosts[0].unplugged():
            wait_until(lambda: not any(map(workers_of, hosts.all)), 40, "the workers did not end")


def workers_of(host: Host) -> bool:
    return bool(host.processes("ray::WorkerActor"))
