"""Ctrl-C at any moment of a trainer's call reaches the script, and the trainer can be used afterwards: no sample is lost or used twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.background import Background
from tests.tiers import NIGHTLY

pytestmark = [pytest.mark.elastic, pytest.mark.more]

SCRIPT = Path(__file__).with_name("interrupts.py")
COUNT, SEED = "100" if NIGHTLY else "30", "7"


def run(background: Background) -> tuple[dict[str, Any], str]:
    done = background.run(str(SCRIPT), str(background.folder()), COUNT, SEED)
    facts = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert facts, done.stdout + done.stderr
    return json.loads(facts[0].removeprefix("FACTS ")), done.stdout


@pytest.mark.script(run=run)
def test_the_trainer_stays_usable(outcome: Callable[[], tuple[dict[str, Any], str]]) -> None:
    facts, output = outcome()
    assert facts["hits"] >= int(COUNT) // 5, output
    assert (facts["wrong"], facts["failures"], facts["left"]) == (0, [], []), output
