"""Hosts of unequal speed: a loader that stalls, and a replacement on a host that is throttled. (On this machine, a busy neighbour of
one host would slow down all: that is only simulated, in `tests/core`.)"""

import pytest

from tests.hosts.hosts import Host, Hosts, Script, why_not
from tests.hosts.parts import begin, found_by
from tests.tiers import lacks

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.elastic]

THROTTLED = "while :; do kill -STOP $(cat /tmp/worker); sleep 0.2; kill -CONT $(cat /tmp/worker); sleep 0.05; done"


def announced(script: Script, hosts: Hosts, what: str) -> list[Host]:
    """Wait for what follows, and return the hosts of the workers, by rank."""
    addresses = script.until(f"now {what}").split(": ")[1].split()
    return [next(host for host in hosts.all if host.address == address) for address in addresses]


def test_slow_hosts_get_fewer_parts_and_are_named() -> None:
    """The weights are those of one worker."""
    if lacking := why_not():
        lacks("hosts", lacking)
    with Hosts(4) as hosts:
        hosts.start_ray(head_cpus=0)  # one of the others is spare
        with begin(hosts[0], "unequal") as script:
            _, stalls = announced(script, hosts, "equal")
            stalls.call("touch", "/tmp/stalls")
            workers = announced(script, hosts, "unequal")
            throttled = next(host for host in hosts.all[1:] if host not in workers)
            throttled.start("sh", "-c", THROTTLED)
            stalls.end()
            found = found_by(script)
    assert found["differs"] < 1e-9, found
    for slow, run, said in zip((stalls, throttled), found["found"], ("without data", "The others wait"), strict=True):
        rank = run["hosts"].index(slow.address)
        assert 2 * run["rows"][rank] <= run["rows"][1 - rank] and sum(run["rows"]) == 32 * 60, run
        verdicts = [line for line in found["output"].splitlines() if f"rank {rank} on {slow.address}: " in line]
        assert any(said in line for line in verdicts), found["output"]
    assert [each["reason"] for each in run["recoveries"]][-1] == "growth"
