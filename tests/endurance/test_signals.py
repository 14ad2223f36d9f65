"""SIGTERM and Ctrl-C end a driver in bounded time at any moment, and leave no process, no partial file and no shared memory."""

import signal
from collections.abc import Callable

import pytest

from tests.background import Background
from tests.endurance.signals import ENDS_WITHIN_S, RAY_AGENTS, Ended, Moment, disturb, moments

pytestmark = [pytest.mark.elastic, pytest.mark.nightly]

COUNT = 9  # one in each phase
MOMENTS = [*moments(signal.SIGINT, COUNT, seed=1), *moments(signal.SIGTERM, COUNT, seed=2)]


def run(background: Background, moment: Moment) -> Ended:
    return disturb(moment)


@pytest.mark.script(run=run)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_nothing_is_left(outcome: Callable[[], Ended], moment: Moment) -> None:
    ended = outcome()
    assert ended.status is not None, f"the driver did not end within {ENDS_WITHIN_S:g} s: {ended}"
    left = ended.left
    # A signal during Ray's own start or shutdown can leave these, even without raysgd.
    if "DONE" in ended.output or moment.again_s is not None or moment.phase == "ray":
        left = [name for name in left if not name.startswith(RAY_AGENTS)]
    assert not left, ended
    assert not ended.shared_memory, ended
    # A driver that ends without a shutdown leaves the draft that it was writing; a later save removes it.
    shut_down = moment.number == signal.SIGINT and moment.again_s is None
    assert len(ended.drafts) <= (0 if shut_down else 1), ended
    assert all(name.startswith(".checkpoint.pt.") and name.endswith(".tmp") for name in ended.drafts), ended
    # Ray kills a worker soon after the driver has closed its connection, on a busy machine before it has removed its folder. The
    # next worker on that machine removes it.
    assert all(name.startswith("raysgd-worker-") for name in ended.temporary), ended
    if "SAVED" in ended.output:
        assert ended.checkpoint == "exact", ended
    else:
        assert ended.checkpoint in ("none", "exact"), ended
    if moment.number == signal.SIGINT and ended.status != 0:
        assert "KeyboardInterrupt" in ended.errors or ended.status == -signal.SIGINT, ended
    if "CAUGHT" in ended.output:
        assert "USABLE" in ended.output.splitlines(), ended
