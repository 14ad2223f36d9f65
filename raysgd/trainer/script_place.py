"""Where a script is in its loops over `epochs()`, and which calls of the running body have
returned. Driver."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from raysgd.callbacks.writers import for_json
from raysgd.errors import NonFiniteError, RaysgdError, text_of

logger = logging.getLogger("raysgd")

RAISED = "raised: "  # before the name of a call that has raised an error


class Made(NamedTuple):
    """A call that has returned.

    call    its name with the arguments that count; "" for a change of which only the workers know
    result  what it has returned; of an error that it has raised, the module, class and text
    each    what each worker has measured; None for a call that changes the state
    stop    whether user code on the workers has ended the loop over epochs with it
    places  where an evaluation has ended on each rank
    """

    call: str
    result: Any
    each: Any = None
    stop: bool = False
    places: Any = None


class ScriptPlace:
    """Owns the place of a script: `loop`, how many of its epochs are `done`, and the calls that
    this body has `made`. Each of them is made once: a script that is started again gets in this
    body, in order, what had returned or been raised there before. Bodies that make other calls,
    because the code was changed, get nothing. Saves and other calls that change nothing are made
    again."""

    def __init__(self) -> None:
        self.loop = self.done = 0
        self.made: list[Made] = []
        self.raised: tuple[BaseException | None, Made | None] = None, None  # the newest error of a call
        self._resumed: tuple[int, int] | None = None
        self._before: list[Made] = []  # of the body that an earlier script has not ended
        self._rest: list[Made] = []  # those that this one has not come to yet

    def resume(self, loop: int, done: int, calls: Sequence[Sequence[Any]]) -> None:
        """Continue where an earlier script was."""
        self.loop, self.done = self._resumed = loop, done
        self.made = self._before = [Made(*each) for each in calls]

    def begin_body(self, loop: int, done: int) -> int:
        """Note that a body begins. Return how many rows the history has of it already."""
        self.loop, self.done, self.made, self.raised = loop, done, [], (None, None)
        self._rest = list(self._before) if self.is_resumed else []
        return sum(each.each is not None for each in self._rest)

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier script was in this body."""
        return (self.loop, self.done) == self._resumed

    def find_recorded(self, call: str, *, change: bool = False) -> Made | None:
        """Find what this call has returned in an earlier script, if it had returned there. Raise
        the error that it had raised, which the script had caught."""
        if not self._rest:
            return None
        was, *self._rest = self._rest
        if was.call == RAISED + call:
            self.made.append(was)
            raise _make_error_again(call, *was.result)
        if was.call != call and not (change and not was.call):
            if was.call:
                logger.warning("this script calls %s where the last one called %s: the call is made", call, was.call)
            self._rest = []
            return None
        self.made.append(was)
        return was

    def note(self, record: Made) -> None:
        if self.made is not self._before:  # a call before the body is not one of it
            self.made.append(record)

    def note_error(self, call: str, error: BaseException) -> None:
        """Note an error of user code. Those of machines may not come again."""
        kind = type(error)
        if not isinstance(error, Exception) or (isinstance(error, RaysgdError) and kind is not NonFiniteError):
            return
        record = Made(RAISED + call, [kind.__module__, kind.__qualname__, text_of(error)])
        self.raised = error, record
        self.note(record)

    def as_json(self) -> list[Any]:
        """The calls of this body for the record of a checkpoint."""
        return [
            [each.call, for_json(each.result, strict=False), for_json(each.each, strict=False), each.stop, each.places]
            for each in self.made
        ]


def _make_error_again(call: str, module: str, name: str, text: str) -> Exception:
    """Make an error of the same class and text, if this script knows the class."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind.__new__(kind, text)  # its own `__init__` may want other arguments
    return RaysgdError(f"{call} had raised {name}: {text}")


def storable(values: Sequence[Any]) -> list[Any] | None:
    """Values of the ranks if JSON can hold them, or None."""
    try:
        return list(values) if json.loads(json.dumps(values)) == values else None
    except (TypeError, ValueError, RecursionError):
        return None
