"""Hosts that fail, are cut off and come back, leave and join, and hosts that differ. Each test has hosts of its own, because Ray
counts a host that was cut off as failed afterwards."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.hosts.chaos import chaos
from tests.hosts.hosts import ROOT, Host, Hosts, Script, why_not
from tests.hosts.parts import begin, found_by, run
from tests.tiers import lacks

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.elastic]

ENOUGH_S = 0.7  # after a line of the script: what it says has begun then


@pytest.fixture
def make() -> Iterator[Callable[..., Hosts]]:
    """Return a function that makes hosts, the first of which has no worker."""
    if lacking := why_not():
        lacks("hosts", lacking)
    with ExitStack() as stack:

        def made(count: int, *, start: bool = True) -> Hosts:
            hosts = stack.enter_context(Hosts(count))
            if start:
                hosts.start_ray(head_cpus=0)
            return hosts

        yield made


def announced(script: Script, hosts: Hosts, what: str) -> list[Host]:
    """Wait for what the script announces, and return the hosts of its workers, by rank."""
    addresses = script.until(f"now {what}").split(": ")[1].split()
    return [next(host for host in hosts.all if host.address == address) for address in addresses]


def until_complete(script: Script, hosts: Hosts, epoch: int) -> tuple[int, list[Host]]:
    """Wait for an epoch, this one or a later one, that begins with two workers. Return its number, and their hosts."""
    while len(workers := announced(script, hosts, f"epoch {epoch}")) < 2:
        epoch += 1
    return epoch, workers


def end_epochs(hosts: Hosts, script: Script) -> dict[str, Any]:
    hosts[0].call("touch", "/tmp/last")
    return found_by(script)


def kill(host: Host, stack: ExitStack, hosts: Hosts) -> None:
    host.kill()


def cut(host: Host, stack: ExitStack, hosts: Hosts) -> None:
    host.unplug()


def cut_one_way(host: Host, stack: ExitStack, hosts: Hosts) -> None:
    stack.enter_context(host.without_route_to(*(other for other in hosts.all if other is not host)))


@pytest.mark.parametrize("fault", [kill, cut, cut_one_way])
def test_a_host_fails_in_an_epoch_in_a_save_and_in_a_load(fault: Any, make: Callable[..., Hosts]) -> None:
    """20 MB take some 4 s, so the save and the load are under way when the host fails."""
    hosts = make(5)
    with ExitStack() as faults, begin(hosts[0], "moments") as script, ExitStack() as rates:
        for host in hosts.all:
            rates.enter_context(host.rate(40))
        for moment, rank in (("in an epoch", -1), ("in a save", 0), ("in a load", 0)):
            victim = announced(script, hosts, moment)[rank]
            time.sleep(ENOUGH_S)
            fault(victim, faults, hosts)
        found = found_by(script)
    assert found["lost_and_doubled"] == [[0, 0]] * 3
    assert found["recovered"] == [1, 2, 3] and len(found["recoveries"]) == 3
    assert all(each["in_place"] and each["batches_redone"] == 0 for each in found["recoveries"])
    assert len(found["hosts"]) == 1 and found["bytes"] > 20_000_000
    assert found["loaded"] == found["saved"][:1] and len(set(found["saved"])) == 1
    print(fault.__name__, found["seconds"], [each["seconds"] for each in found["recoveries"]])


def test_the_other_host_continues_alone(make: Callable[..., Hosts]) -> None:
    hosts = make(3)
    with begin(hosts[0], "epochs") as script:
        victim = announced(script, hosts, "epoch 1")[1]
        time.sleep(ENOUGH_S)
        victim.unplug()
        announced(script, hosts, "epoch 2")
        found = end_epochs(hosts, script)
    assert found["lost_and_doubled"] == [[0, 0]] * 3
    recovery = found["recoveries"][0]
    assert recovery["reason"] in ("network", "node failure")
    assert recovery["in_place"] and recovery["world_size_after"] == 1 and recovery["batches_redone"] == 0
    # After half of the limit, the other machine counts as failed. Then the survivor forms a group of its own.
    assert found["seconds"][1] < 20 + found["seconds"][2]


def test_a_host_is_plugged_in_again(make: Callable[..., Hosts]) -> None:
    """After 5 s all continue as if nothing had happened. After 15 s and 25 s of `hang_timeout_s=20` its worker has failed, and a new
    one joins."""
    hosts, epoch = make(3), 0
    with begin(hosts[0], "epochs") as script:
        for seconds in (5, 15, 25):
            epoch, workers = until_complete(script, hosts, epoch + 1)
            time.sleep(ENOUGH_S)
            with workers[1].unplugged():
                time.sleep(seconds)
        until_complete(script, hosts, epoch + 1)
        found = end_epochs(hosts, script)
    assert set(map(tuple, found["lost_and_doubled"])) == {(0, 0)}
    assert found["at"][1] == found["at"][0] and found["seconds"][1] > 5
    recoveries = found["recoveries"]
    assert recoveries[0]["epoch"] == 3, "counted from 1: nothing failed in the 5 s"
    assert [each["world_size_after"] for each in recoveries] == [1, 2, 1, 2]
    assert all(each["in_place"] and each["batches_redone"] == 0 for each in recoveries)
    assert len(set(found["weights"])) == 1
    print(found["at"], found["seconds"], found["recoveries"])


def test_a_host_is_killed_and_another_one_joins(make: Callable[..., Hosts]) -> None:
    hosts = make(3)
    with begin(hosts[0], "epochs") as script:
        victim = announced(script, hosts, "epoch 1")[1]
        time.sleep(ENOUGH_S)
        victim.kill()
        announced(script, hosts, "epoch 2")
        hosts.add().start_ray(head=hosts[0])
        until_complete(script, hosts, 3)
        found = end_epochs(hosts, script)
    assert set(map(tuple, found["lost_and_doubled"])) == {(0, 0)}
    lost, growth = found["recoveries"]
    assert lost["in_place"] and lost["batches_redone"] == 0 and growth["reason"] == "growth"
    assert hosts[3].address in found["hosts"] and len(set(found["weights"])) == 1


def test_the_script_and_a_worker_are_on_the_head(make: Callable[..., Hosts]) -> None:
    """The other host loses its power, and joins again after a restart."""
    hosts = make(2, start=False)
    head, other = hosts.all
    hosts.start_ray()
    with begin(head, "epochs") as script:
        assert {each.address for each in announced(script, hosts, "epoch 1")} == {head.address, other.address}
        time.sleep(ENOUGH_S)
        other.kill()
        assert announced(script, hosts, "epoch 2") == [head]
        other.boot()
        hosts.name_all()
        other.start_ray(head=head)
        until_complete(script, hosts, 3)
        found = end_epochs(hosts, script)
    assert set(map(tuple, found["lost_and_doubled"])) == {(0, 0)}
    lost, growth = found["recoveries"]
    assert lost["in_place"] and lost["batches_redone"] == 0 and growth["reason"] == "growth"
    assert sorted(found["hosts"]) == [head.address, other.address] and len(set(found["weights"])) == 1


@pytest.mark.usefixtures("make")  # which skips it where hosts cannot be made
def test_faults_at_random() -> None:
    found = chaos(faults=8, seed=int(time.time()))
    print(found)
    assert (found["lost"], found["doubled"], found["differing"], found["wrong"], found["error"]) == (0, 0, 0, "", "")
    assert found["faults"] == 8 and found["epochs"] > 1


def test_a_host_stops_for_a_while_in_an_epoch_in_a_save_and_in_a_load(make: Callable[..., Hosts]) -> None:
    """And the network loses packets, so that the load takes longer than the limit of a hang. Nothing has failed."""
    hosts = make(5)
    with begin(hosts[0], "moments") as script, ExitStack() as network:
        for host in hosts.all:
            network.enter_context(host.rate(40))
            network.enter_context(host.losing(0.05))
        for moment in ("in an epoch", "in a save", "in a load"):
            stopped = announced(script, hosts, moment)[0]
            time.sleep(ENOUGH_S)
            with stopped.paused():
                time.sleep(5)
        found = found_by(script)
    assert found["lost_and_doubled"] == [[0, 0]] * 3 and found["recoveries"] == []
    assert all(seconds > 5 for seconds in found["seconds"].values()), "it was stopped meanwhile"
    assert found["bytes"] > 20_000_000 and len(found["hosts"]) == 4
    assert found["loaded"] == found["saved"] and len(set(found["saved"])) == 1
    print(found["seconds"])


def test_large_arguments_and_answers_take_longer_than_a_hang(make: Callable[..., Hosts]) -> None:
    """At 7 Mbit/s, 20 MB take 24 s, and the limit of a hang is 20 s. The worker on the script's host has them at once."""
    hosts = make(2, start=False)
    hosts.start_ray()
    with hosts[0].rate(7), hosts[1].rate(7):
        found = run(hosts[0], "calls")
    assert found["recoveries"] == [] and all(seconds > 20 for seconds in found["seconds"].values()), found
    assert found["sent"] == [20_480_000] * 2 and found["same"] == [True] * 2
    assert len(found["large"]) == 2 and len(set(found["large"])) == 1
    print(found["seconds"])


def test_a_drained_host_is_left_without_a_loss(make: Callable[..., Hosts]) -> None:
    found = run(make(4)[0], "drain")
    assert found["lost_and_doubled"] == [[0, 0]] * 4
    assert found["before"][1] not in found["hosts"] and len(found["hosts"]) == 2
    assert all(each["in_place"] and each["batches_redone"] == 0 for each in found["recoveries"])
    assert {each["reason"] for each in found["recoveries"]} <= {"preemption", "growth"}


def test_a_function_continues_without_a_host(make: Callable[..., Hosts]) -> None:
    hosts = make(3)
    with begin(hosts[0], "functions") as script:
        script.until("now epoch 1")
        time.sleep(ENOUGH_S)
        hosts[2].kill()
        found = found_by(script)
    assert found["lost"] == 0 and found["uses"] == [3] and len(found["recoveries"]) == 1
    assert found["epoch"] == 2 and found["again"] == 1600


def test_hosts_differ(make: Callable[..., Hosts]) -> None:
    """One has Python and the checkout in other places and a read-only home, one has 8 MB of /dev/shm, one has a single CPU."""
    hosts = make(4, start=False)
    head, elsewhere, small, one = hosts.all
    head.start_ray(cpus=0)
    move = "mkdir /tmp/python /tmp/raysgd; mount --bind {0} /tmp/python; mount --bind {1} /tmp/raysgd"
    hide = "mount -t tmpfs -o ro hidden {0}; mount -t tmpfs -o ro hidden {1}; mount -t tmpfs -o ro home /tmp/home"
    elsewhere.call("sh", "-ec", f"{move}; {hide}".format(sys.prefix, ROOT))
    path = "/tmp/raysgd:/tmp/raysgd/examples/benchmarks"
    elsewhere.start_ray(head=head, python=["/tmp/python/bin/python"], PYTHONPATH=path)
    small.call("mount", "-o", "remount,size=8m", "/dev/shm")
    small.start_ray(head=head)
    one.start_ray(head=head, python=["taskset", "-c", "0", sys.executable])
    found = run(head, "loaders")
    with begin(head, "large_loaders") as script:
        output = script.end()
    assert found["lost_and_doubled"] == [0, 0] and found["recoveries"] == []
    assert sorted(found["hosts"]) == [elsewhere.address, small.address, one.address]
    assert ["/tmp/python/bin/python", "/tmp/raysgd/raysgd/__init__.py"] in found["pythons"]
    assert len(set(found["weights"])) == 1
    assert f"on node {small.address}" in output and "No space left on device" in output, output
