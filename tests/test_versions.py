"""The supported versions of Python, torch and Ray are tested at both ends in `make nightly`. tools/check_pages.py checks that they
are stated alike everywhere."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "try_versions.py"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_the_ends_of_the_supported_range(name: str) -> None:
    done = subprocess.run([sys.executable, str(TOOL), name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
