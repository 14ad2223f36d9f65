"""Define the progress of a rank: what it has committed. Both.

A batch is committed when the optimizer's step for it has been applied. Ranks of one generation can
differ by one step, because one rank may have finished its all-reduce before a peer of another rank
failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Progress:
    """What one rank has committed.

    step         batches since the start of training
    batches      batches in the running call
    expected     how many batches the running call will have, 0 if that is unknown
    finished     whether the running call has trained all its batches
    phase        what the rank is doing, for messages
    applied      optimizer steps since the start of training
    loads        how often the user has loaded a state, or changed it with a call that does not
                 train; -1 if the state is undefined, because a load has begun to change it, and has
                 not completed that
    call         the number of the running call that trains, or of the last one
    lacks_state  whether its weights are a new worker's own initial ones, and not the group's
    cut_short    whether a peer's failure has cut a change of the state by the user's function short
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    expected: int = 0
    finished: bool = False
    phase: str = "idle"
    applied: int = 0
    loads: int = 0
    call: int = -1
    lacks_state: bool = False
    cut_short: bool = False

    @property
    def undefined(self) -> bool:
        return self.loads < 0

    @property
    def order(self) -> tuple[bool, int, int, int, int, bool]:
        """A key that sorts ranks by how much they have committed. `applied` counts within a batch;
        what was loaded later is ahead of all that was trained before."""
        whole = not (self.lacks_state or self.cut_short)
        return (whole, self.loads, self.step, self.applied, self.epoch, self.finished)

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """How far training has come: the end of a call is a place of its own."""
        return self.loads, self.step, self.call, self.finished

    def at(self, phase: str) -> Progress:
        return _at(self, phase)


@lru_cache(maxsize=64)
def _at(progress: Progress, phase: str) -> Progress:
    """Make the progress in another phase, once for all ranks that are at the same place."""
    return replace(progress, phase=phase)
