"""SIGTERM and Ctrl-C end a driver at any moment in bounded time, and leave no process, no half file, no shared memory."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.background import Background
from tests.endurance.signals import ENDS_WITHIN_S, Ended, Moment, disturb, moments

pytestmark = [pytest.mark.elastic, pytest.mark.slow]

COUNT = 30 if os.environ.get("RAYSGD_SOAK") else 4
MOMENTS = [*moments(signal.SIGINT, COUNT, seed=1), *moments(signal.SIGTERM, COUNT, seed=2)]


def run(background: Background, moment: Moment) -> Ended:
    return disturb(moment)


@pytest.mark.script(run=run)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_nothing_is_left(outcome: Callable[[], Ended], moment: Moment) -> None:
    ended = outcome()
    assert ended.status is not None, f"the driver did not end within {ENDS_WITHIN_S:g} s: {ended}"
    assert not ended.left, ended
    assert not ended.drafts and not ended.temporary and not ended.shared_memory, ended
    if "SAVED" in ended.output:
        assert ended.checkpoint == "exact", ended
    else:
        assert ended.checkpoint in ("none", "exact"), ended
    if "CAUGHT" in ended.output:
        assert "USABLE" in ended.output.splitlines(), ended
