"""Runs the parts of `driver.py` on a host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.hosts.hosts import Host, Script

DRIVER = Path(__file__).with_name("driver.py")
LIMIT_S = 240.0


def begin(host: Host, part: str, *, limit_s: float = LIMIT_S, **environment: str) -> Script:
    return Script(host, DRIVER, part, limit_s=limit_s, **environment)


def found_by(script: Script) -> dict[str, Any]:
    """Wait for the end of the part, and return what it found."""
    output = script.end()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, output
    return {"output": output, **json.loads(lines[-1])}


def run(host: Host, part: str, **environment: str) -> dict[str, Any]:
    with begin(host, part, **environment) as script:
        return found_by(script)
