"""Which tests a run selects. `make test`, `make more` and `make nightly` set the environment variable RAYSGD_TIER.

A test without a mark is in the first tier, one with `@pytest.mark.more` or `@pytest.mark.nightly` in that tier. A
nightly run selects all tests, and some of them try more cases in it.
"""

import os

import pytest

__all__ = ["NIGHTLY", "TIER", "lacks", "selects"]

TIERS = ("test", "more", "nightly")
TIER = os.environ.get("RAYSGD_TIER", "test")
if TIER not in TIERS:
    raise pytest.UsageError(f"RAYSGD_TIER is {TIER!r}: it must be one of {', '.join(TIERS)}")
NIGHTLY = TIER == "nightly"


def selects(item: pytest.Item) -> bool:
    marked = [tier for tier in TIERS if item.get_closest_marker(tier)]
    return NIGHTLY or (marked[-1] if marked else "test") == TIER


def lacks(what: str, reason: str) -> None:
    """Skip the test, for what is missing here; fail it where RAYSGD_REQUIRE names that, as in CI."""
    if what in os.environ.get("RAYSGD_REQUIRE", ""):
        pytest.fail(f"{reason}, and RAYSGD_REQUIRE names {what}", pytrace=False)
    pytest.skip(reason)
