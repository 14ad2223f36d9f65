"""A ground in a simulated cluster."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.local.ground import LocalGround
from tests.local.group import Cluster


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
