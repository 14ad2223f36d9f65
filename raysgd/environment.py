"""What environment variables set, which is read and checked here; and whether a file is installed.
Both."""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

from raysgd.errors import ConfigError

START_LIMIT, FUNCTION_START_LIMIT = "SGD_PLACEMENT_GROUP_TIMEOUT_S", "TRAIN_PLACEMENT_GROUP_TIMEOUT_S"
NCCL_ANYWHERE = "RAYSGD_NCCL_ANYWHERE"  # for tests: on the CPU, where it is emulated, and several ranks on one GPU
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # read by gloo and NCCL, too
CONTROL_PORT, FIRST_PORT, LAST_PORT = "RAYSGD_CONTROL_PORT", 1024, 65535


def seconds_from_environment(name: str, default: int) -> int:
    """Read the seconds that an environment variable sets, or the default."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise ConfigError(
            f"the environment variable {name} is {text!r}; it must be a whole number of seconds above 0. "
            f"Correct it, or unset it for the default of {default}."
        )
    return int(text)


def control_ports() -> range | None:
    """Read the ports on which the driver may listen; None: the system chooses."""
    text = os.environ.get(CONTROL_PORT, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    if not FIRST_PORT <= first <= last <= LAST_PORT:
        raise ConfigError(
            f"the environment variable {CONTROL_PORT} is {text!r}; it must be a port or a range of ports from {FIRST_PORT} to "
            f"{LAST_PORT}, such as 7000 or 7000-7020. Correct it, or unset it so that the system chooses."
        )
    return range(first, last + 1)


def flag_from_environment(name: str, *, default: bool = False) -> bool:
    """Whether an environment variable switches something on, or the default."""
    text = os.environ.get(name, "").strip().lower()
    if text not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be 0 or 1. Correct it, or unset it.")
    return text in ("1", "true") if text else default


def start_limit_s() -> float:
    """How long the start of workers may wait for room in the cluster."""
    return float(seconds_from_environment(START_LIMIT, 100))


@cache
def is_installed(file: str) -> bool:
    """Whether a file or folder belongs to Python or an installed package, also in another
    environment that PYTHONPATH or a .pth file names."""
    path = Path(file)
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(
        path.is_relative_to(root) for root in _installed()
    )


@cache
def _installed() -> list[Path]:
    roots = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {*site.getsitepackages(), site.getusersitepackages(), sys.prefix, sys.base_prefix}
    return [path for root in roots if root for path in {Path(root), Path(root).resolve()}]
