"""A ground in a simulated cluster, and silence for tests with many failures."""

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.local.ground import LocalGround
from tests.local.group import Cluster


@pytest.fixture
def quiet() -> Iterator[None]:
    """Log nothing, and end the loader processes that ranks which have failed or left have not ended."""
    logging.getLogger("raysgd").disabled = True
    yield
    logging.getLogger("raysgd").disabled = False
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LocalGround]]:
    """Return a function that makes a ground of three workers that are not replaced by default."""
    made: list[LocalGround] = []

    def ground(**arguments: Any) -> LocalGround:
        elastic = {"grow": False, "hang_timeout_s": 60, **arguments.pop("elastic", {})}
        made.append(LocalGround(tmp_path / f"marks-{len(made)}", elastic=ElasticConfig(**elastic), **arguments))
        return made[-1]

    with Cluster():
        yield ground
        for each in made:
            each.trainer.shutdown()
