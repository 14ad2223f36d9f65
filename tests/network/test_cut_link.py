"""A cut link between two hosts: noticed in bounded time, survived in place, nothing lost. See cut_link.py."""

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


@pytest.mark.slow
@pytest.mark.elastic
def test_the_first_host_goes_on_alone() -> None:
    cut_link = script()
    lacking = cut_link.why_not()
    if lacking:
        pytest.skip(lacking)
    facts = cut_link.run()
    assert len(set(facts["hosts_before"])) == 2, "one worker on each host"
    assert facts["lost_and_doubled"] == [[0, 0]] * 3
    loss = facts["recoveries"][0]
    assert loss["in_place"] and loss["world_size_after"] == 1 and loss["batches_redone"] == 0
    assert loss["reason"] in ("network", "node loss")
    # Half of the limit goes by until the other machine counts as gone; then the survivor meets itself anew.
    assert facts["cut_to_next_step_s"] < facts["hang_timeout_s"]
