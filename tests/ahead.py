"""Work of several tests of one module in threads, two at a time, where most of it is waiting for something to be noticed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["ahead"]

T = TypeVar("T")


@contextmanager
def ahead(jobs: dict[str, Callable[[], T]]) -> Iterator[dict[str, Future[T]]]:
    """All of them begun, in this order; each test waits for its own. What has not begun at the end never does."""
    pool = ThreadPoolExecutor(2)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
