"""Fixtures of the tests on emulated devices."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def nccl_anywhere() -> Iterator[None]:
    """Let trainers without GPUs use NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSGD_NCCL_ANYWHERE", "1")
        yield
