"""Connections that the user's own threads opened survive a recovery."""

import contextlib
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.faults import Fault, Ground

PACE_S, AT_MOST = 0.002, 2000
KEPT = "connections_of_the_user"


@pytest.fixture
def echo() -> Iterator[int]:
    """Return the port of an echo server."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while content := connection.recv(64):
                connection.sendall(content)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def connecting(port: int) -> Any:
    """A hook whose thread opens connections, like an upload or a metrics client, until the process group is up."""

    def connect(kept: list[socket.socket]) -> None:
        import torch.distributed as dist

        while not dist.is_initialized() and len(kept) < AT_MOST:
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            time.sleep(PACE_S)

    def hook() -> None:
        kept: list[socket.socket] = []
        sys.modules[KEPT] = types.SimpleNamespace(kept=kept)  # type: ignore[assignment]
        threading.Thread(target=connect, args=(kept,), daemon=True).start()

    return hook


def answering() -> tuple[int, int]:
    """Return how many connections this worker has kept, and how many of them still work."""
    kept = sys.modules[KEPT].kept
    alive = 0
    for connection in kept:
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
            alive += connection.recv(1) == b"x"
    return len(kept), alive


@pytest.mark.elastic
def test_a_connection_opened_during_a_rendezvous_survives_the_recovery(
    ray_cluster: None, tmp_path: Path, echo: int
) -> None:
    field = Ground(
        tmp_path,
        num_workers=2,
        use_gpu=False,
        elastic=ElasticConfig(grow=False),
        initialization_hook=connecting(echo),
        config={"samples": 40},
    )
    with field.trainer as trainer:
        before = trainer.apply_all_workers(answering)
        assert all(made == alive > 0 for made, alive in before), before
        field.arm(Fault(1, 3))
        trainer.train()
        assert field.fired() == 1 and trainer.world_size == 1
        made, alive = trainer.apply_all_workers(answering)[0]
        assert alive == made
