"""Workers that do not divide one data set are noticed by what they report."""

from raysgd.core.metrics import Measured
from raysgd.core.rows import RowsCheck


def said(check: RowsCheck, *reports: tuple[str, int, Measured], loader: str = "train_loader") -> list[str]:
    """Return the warnings about reports of (worker, rank, partial result)."""
    return [text for report in reports if (text := check.see(loader, *report))]


def test_ranks_with_other_rows_are_named_once_for_each_loader() -> None:
    check = RowsCheck()
    first, second = Measured(rows="80 rows with the indices 11"), Measured(rows="80 rows with the indices 22")
    (text,) = said(check, ("a", 0, first), ("b", 1, first), ("c", 2, second), ("b", 1, second))
    assert "the train_loader of rank 2 has other rows than that of rank 0" in text
    assert "(80 rows with the indices 22 and 80 rows with the indices 11)" in text
    assert "random_split(..., generator=torch.Generator().manual_seed(0))" in text and "add_dist_sampler=False" in text
    check.begin()
    assert not said(check, ("a", 0, first), ("c", 2, second))
    (text,) = said(check, ("a", 1, first), ("c", 0, second), loader="validation_loader")
    assert "the validation_loader of rank 1 has other rows than that of rank 0" in text


def test_ranks_that_begin_an_epoch_with_the_same_batch_are_named() -> None:
    check = RowsCheck()
    (text,) = said(check, ("b", 1, Measured(first="0 aa")), ("a", 0, Measured(first="0 aa")))
    assert "ranks 0 and 1 have begun an epoch with the same batch of the train_loader" in text
    assert "get_worker_info()" in text and "shard(rank, world_size)" in text and "self.world_rank" in text


def test_all_is_well() -> None:
    check = RowsCheck()
    rows = Measured(rows="80 rows with the indices 11")
    assert not said(check, ("a", 0, rows), ("b", 1, rows), ("c", 2, Measured()), ("c", 2, Measured(rows="")))
    check.begin()
    assert not said(
        check, ("a", 0, Measured(first="0 aa")), ("b", 1, Measured(first="0 bb")), ("a", 0, Measured(first="1 bb"))
    )
    # Rank 0 has failed, and the worker that was rank 1 reports again.
    check.begin()
    assert not said(check, ("b", 1, Measured(first="0 bb")), ("b", 0, Measured(first="0 bb")), ("c", 1, Measured()))
    check.begin()
    assert not said(check, ("a", 0, Measured(rows="80 rows"))), "what was said in an earlier call does not count"
