"""A host that is cut off in the middle of an epoch. Ray counts its node as failed afterwards, so these hosts have no other test."""

import json
import sys

import pytest

from tests.hosts.hosts import Hosts, why_not
from tests.hosts.test_hosts import DRIVER
from tests.tiers import lacks


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
def test_the_other_host_continues_alone() -> None:
    if lacking := why_not():
        lacks("hosts", lacking)
    with Hosts(3) as hosts:
        hosts.start_ray(head_cpus=0)
        with hosts[0].start(sys.executable, str(DRIVER), "cut") as driver:
            assert driver.stdout is not None
            assert any("trained epoch 0" in line for line in driver.stdout)
            hosts[2].unplug()
            found = json.loads([line for line in driver.stdout if line.startswith("{")][-1])
    assert found["lost_and_doubled"] == [[0, 0]] * 3
    recovery = found["recoveries"][0]
    assert recovery["reason"] in ("network", "node failure")
    assert recovery["in_place"] and recovery["world_size_after"] == 1 and recovery["batches_redone"] == 0
    # After half of the limit, the other machine counts as failed. Then the survivor forms a group of its own.
    assert found["seconds"][1] < 20 + found["seconds"][2]
