"""A cut connection between two hosts is detected in time, and training continues in place (see cut_link.py)."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cut_link", Path(__file__).with_name("cut_link.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
def test_the_first_host_continues_alone() -> None:
    cut_link = script()
    lacking = cut_link.why_not()
    if lacking:
        pytest.skip(lacking)
    facts = cut_link.run()
    assert len(set(facts["hosts_before"])) == 2, "one worker on each host"
    assert facts["lost_and_doubled"] == [[0, 0]] * 3
    recovery = facts["recoveries"][0]
    assert recovery["in_place"] and recovery["world_size_after"] == 1 and recovery["batches_redone"] == 0
    assert recovery["reason"] in ("network", "node failure")
    # After half of the limit, the other machine counts as failed. Then the survivor forms a group of its own.
    assert facts["cut_to_next_step_s"] < facts["hang_timeout_s"]
