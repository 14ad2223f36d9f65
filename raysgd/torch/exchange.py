"""How gradients reach the other ranks where no wrapper around the models sees to it."""

from __future__ import annotations

from typing import Any

__all__ = ["Exchange"]


class Exchange:
    """One object per operator. This one leaves it to the wrapper (DDP, FSDP), or to the user."""

    def prepare(self, models: list[Any], optimizers: list[Any]) -> None:
        """At registration, once."""

    def joined(self) -> None:
        """A generation stands, all of its ranks here: the same weights everywhere, and exchange begins anew."""

    def hold(self, on: bool) -> None:
        """Inner batches of a window that share one step: gradients stay where they are, until it ends."""

    def finish(self, optimizer: Any) -> None:
        """Before a step, or before gradients are thrown away: those that were kept back, or are under way, arrive."""
