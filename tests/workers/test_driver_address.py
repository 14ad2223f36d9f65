"""Workers reach the script at the interface that the user has chosen."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from raysgd.environment import GLOO_INTERFACE, NCCL_INTERFACE
from raysgd.workers.cluster import nodes


def addressed(kind: int, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=kind, address=address)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "fast"}, "10.0.0.5"),
        ({"NCCL_SOCKET_IFNAME": "=fast,eth0"}, "10.0.0.5"),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "fast"}, "192.168.0.5"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, None),
        ({"GLOO_SOCKET_IFNAME": "elsewhere"}, None),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, None),
    ],
)
def test_the_address_of_the_interface_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], address: str | None
) -> None:
    known = {
        "lo": [addressed(socket.AF_INET, "127.0.0.1")],
        "eth0": [addressed(socket.AF_INET, "192.168.0.5")],
        "fast": [addressed(socket.AF_INET6, "fe80::1"), addressed(socket.AF_INET, "10.0.0.5")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    for variable in (GLOO_INTERFACE, NCCL_INTERFACE):
        monkeypatch.setenv(variable, variables.get(variable, ""))
    assert nodes.named_address() == address
