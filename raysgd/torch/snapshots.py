"""Copies of a replica's state that training does not change, and saves in the background. Worker."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import torch

from raysgd.torch.checkpoint import states

__all__ = ["copied", "save_in_background", "settled"]

logger = logging.getLogger(__name__)


def save_in_background(sink: Any, state: dict[str, Any], *, in_shards: bool) -> None:
    """Send a copy of the state to `sink` in a thread; training waits only for the copy. The connection is opened first, so
    that the driver notices if this process ends."""
    stream = sink.connect()
    try:
        kept = settled(state, in_shards=in_shards)
    except BaseException as error:
        stream.give_up(error)
        raise

    def write() -> None:
        try:
            stream.send(lambda file: states.write(kept, file))
        except Exception:
            logger.warning("a save in the background failed", exc_info=True)  # the driver raises the error

    threading.Thread(target=write, name="raysgd-save", daemon=True).start()


def settled(state: dict[str, Any], *, in_shards: bool) -> dict[str, Any]:
    """Return a replica's state that training does not change. What was gathered from shards is a copy already."""
    own = {"models", "optimizers"} if in_shards else set()
    return {name: value if name in own else copied(value) for name, value in state.items()}


def copied(value: Any) -> Any:
    """Return a deep copy, with tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return copy.deepcopy(value)
