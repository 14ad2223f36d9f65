"""Where a script is in its loops over `epochs()`, and which calls of the running body have
returned. Driver."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.writers import for_json

logger = logging.getLogger("raysgd")

RAISED = "raised: "  # before the name of a change that has raised an error, and is made again


class Made(NamedTuple):
    """A call that has returned.

    call    its name with the arguments that count; "" for a change of which only the workers know
    result  what it has returned
    each    what each worker has measured; None for a call that changes the state
    """

    call: str
    result: Any
    each: Any = None


class Place:
    """Owns the place of a script: `loop`, how many of its epochs are `done`, and the calls that
    this body has `made`. Each of them is made once: a script that is started again gets in this
    body, in order, what had returned there before. Bodies that make other calls, because the code
    was changed, get nothing. Saves and other calls that change nothing are made again."""

    def __init__(self) -> None:
        self.loop = self.done = 0
        self.made: list[Made] = []
        self._resumed: tuple[int, int] | None = None
        self._before: list[Made] = []  # of the body that an earlier script has not ended
        self._left: list[Made] = []  # those that this one has not come to yet

    def resume(self, loop: int, done: int, made: Sequence[Sequence[Any]]) -> None:
        """Continue where an earlier script was."""
        self.loop, self.done = self._resumed = loop, done
        self._before = [Made(*each) for each in made]

    def begin_body(self, loop: int, done: int) -> int:
        """Note that a body begins. Return how many rows the history has of it already."""
        self.loop, self.done, self.made = loop, done, []
        self._left = list(self._before) if self.is_resumed else []
        return sum(each.each is not None for each in self._left)

    @property
    def is_resumed(self) -> bool:
        """Return whether an earlier script was in this body."""
        return (self.loop, self.done) == self._resumed

    def recorded(self, call: str, *, change: bool = False) -> Made | None:
        """Return what this call has returned in an earlier script, if it had returned there."""
        if not self._left:
            return None
        was, *self._left = self._left
        if was.call == RAISED + call:
            return None
        if was.call != call and not (change and not was.call):
            if was.call:
                logger.warning("this script calls %s where the last one called %s: the call is made", call, was.call)
            self._left = []
            return None
        self.made.append(was)
        return was

    def note(self, made: Made) -> None:
        self.made.append(made)

    def as_json(self) -> list[Any]:
        """Return the calls of this body for the record of a checkpoint."""
        return [
            [each.call, for_json(each.result, strict=False), for_json(each.each, strict=False)] for each in self.made
        ]


def storable(values: Sequence[Any]) -> list[Any] | None:
    """Return values of the ranks if JSON can hold them, or None."""
    try:
        return list(values) if json.loads(json.dumps(values)) == values else None
    except (TypeError, ValueError, RecursionError):
        return None
