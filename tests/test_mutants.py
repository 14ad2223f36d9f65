"""Broken saves, loads and training functions are detected by the tests that their mutants name."""

import pytest

from tests.mutants import MUTANTS, detected

OF_EACH_CHANGE = ("load_on_one_rank_only", "acknowledge_a_report_before_it_is_stored")


def test_each_mutant_breaks_what_there_is() -> None:
    """The tests of most run rarely, and without this, a name that was changed makes them fail for the wrong reason."""
    for _, breaks in MUTANTS.values():
        with pytest.MonkeyPatch.context() as patch:
            breaks(patch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OF_EACH_CHANGE else [pytest.mark.nightly]) for name in MUTANTS]
)
def test_each_mutant_is_detected_by_make_test(name: str) -> None:
    assert detected(name) == "test"
