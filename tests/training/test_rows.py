"""Reports of workers that divide one data set cause no warning. Those of others are in `local/test_loops_and_data.py`."""

from raysgd.core.measures.metrics import Measured
from raysgd.trainer.rows import RowsCheck


def said(check: RowsCheck, *reports: tuple[str, int, Measured]) -> list[str]:
    """Return the warnings about reports of (worker, rank, partial result)."""
    return [text for report in reports for text in check.see(*report)]


def test_all_is_well() -> None:
    check = RowsCheck()
    rows = Measured(rows={"easy": "80 rows with the indices 11"})
    other = Measured(rows={"hard": "79 rows with the indices 12"})
    assert not said(check, ("a", 0, rows), ("b", 1, rows), ("c", 2, Measured()), ("d", 3, other))
    check.begin()
    said_before = ("a", 0, Measured(rows={"easy": "80 rows"}))
    assert not said(check, said_before), "what was said in an earlier call does not count"
