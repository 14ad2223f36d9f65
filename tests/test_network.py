"""The address by which other machines reach this one."""

import socket

import pytest

from raysgd.compat.utils import get_address_and_port
from raysgd.core import network
from raysgd.core.network import address_towards, own_address


def test_the_name_of_the_machine_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not resolve, or have docker's address."""
    monkeypatch.setattr(network, "address_towards", lambda host: "10.9.0.2")
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert get_address_and_port()[0] == "10.9.0.2"


def test_without_a_route_the_address_of_the_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str) -> str:
        raise OSError(f"no route to {host}")

    monkeypatch.setattr(network, "address_towards", unreachable)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert own_address() == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert own_address() == "127.0.0.1"


def test_the_address_towards_this_machine() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
