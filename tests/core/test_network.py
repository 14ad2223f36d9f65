"""A process with many workers raises its limit of open files, or says what is missing."""

import resource
import subprocess
import sys

import pytest

from raysgd.core.channel import network
from raysgd.core.channel.network import OWN_FILES, allow_connections
from raysgd.errors import ResourceError


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the limits that are set, of a process that begins with 1024 of at most 4096 open files."""
    found = [(1024, 4096)]
    monkeypatch.setattr(network.resource, "getrlimit", lambda which: found[-1])
    monkeypatch.setattr(network.resource, "setrlimit", lambda which, pair: found.append(pair))
    return found


@pytest.mark.parametrize(("workers", "soft"), [(2, 1024), (96, 1024), (97, OWN_FILES + 8 * 97), (480, 4096)])
def test_the_limit_is_raised_only_if_it_is_too_low(limits: list[tuple[int, int]], workers: int, soft: int) -> None:
    allow_connections(workers, each=8)
    assert limits[-1] == (soft, 4096) and len(limits) <= 2


def test_a_limit_that_cannot_be_raised(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(ResourceError, match=r"may have 4096 open files.* with 481 workers it needs about 4104"):
        allow_connections(481, each=8)
    assert len(limits) == 1


def test_a_limit_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(network.resource, "getrlimit", lambda which: (unlimited, unlimited))
    allow_connections(1_000_000, each=8)


def test_a_real_process_raises_its_own_limit() -> None:
    script = (
        "import resource; from raysgd.core.channel.network import allow_connections\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))\n"
        "allow_connections(100, each=1); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "356\n"
