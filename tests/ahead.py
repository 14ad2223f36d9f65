"""Work of several tests in threads, two at a time: much of what a script does is waiting for processes to start."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

__all__ = ["ahead", "chosen"]

T = TypeVar("T")


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """This parameter's values in those tests of the asking module that will run."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return list(dict.fromkeys(spec.params[parameter] for spec in specs if spec and parameter in spec.params))


@contextmanager
def ahead(jobs: dict[str, Callable[[], T]]) -> Iterator[dict[str, Future[T]]]:
    """All of them begun, in this order; each test waits for its own. What has not begun at the end never does."""
    pool = ThreadPoolExecutor(2)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
