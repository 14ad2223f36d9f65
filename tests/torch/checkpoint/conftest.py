"""The trainer on which the modules of this folder try files of TorchTrainer, which each test leaves in the state that it had, and a place
in a store."""

import uuid
from collections.abc import Iterator

import pytest

from tests.torch.checkpoint.cases import Bench, bench


@pytest.fixture(scope="package")
def torch_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def here(torch_bench: Bench) -> Bench:
    torch_bench.back()  # the random states of this process, too, which other modules change
    return torch_bench


@pytest.fixture
def bucket(s3: str) -> str:
    """Return a new folder in a bucket."""
    return f"{s3}/{uuid.uuid4().hex}"
