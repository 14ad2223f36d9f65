"""State that belongs to a part of the batch: `self.part_state`. Worker."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch

from raysgd.core.outcomes import RetryStep
from raysgd.core.tree import mapped
from raysgd.errors import CheckpointError, ConfigError
from raysgd.replica.steps.feed import Feed, NoFeed
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.group.sharing import gathered_objects, summed
from raysgd.torch.registered import Registered, move

logger = logging.getLogger("raysgd")

NAME = "part_states"  # in states
ELSEWHERE = (
    "self.part_state belongs to the part of the batch that is being trained, so it exists only while train_batch runs. Use it there, or "
    "keep what all parts share in an attribute that state_dict() returns"
)
LATE = "self.part_state is used for the first time, which all ranks have to know"
LOST = (
    "part %d of the batch continues with an empty self.part_state, because no worker that is left has it. Results differ from those of "
    "an undisturbed run. To continue with it, load the newest checkpoint"
)


class PartStates(Policy):
    """Owns the dict of each part. A step works on copies of those that it uses, which count when it
    is committed.

    After each step, a rank has the dicts of the parts that it computes. It gets those of the others
    where all ranks are together: at the end of a call or at a planned stop, before a snapshot, and
    when a process group has formed. So between two calls, each rank has all. For that, all ranks
    must know whether dicts are used. Mostly, methods of the operator's class `kind` show it;
    otherwise the ranks agree again after the first use, or share them `always`, where new processes
    would repeat that step, which know no more.
    """

    def __init__(self, kind: type, registered: Registered, device: torch.device, *, always: bool) -> None:
        self._registered, self._device = registered, device
        self._used = self._shown = always or _shows_use(kind)  # on all ranks
        self._alone = False
        self._dicts: dict[int, dict[str, Any]] = {}
        self._position = Position()
        # What the newest step has made of them if it was undone, and how many steps were made before it.
        self._undone: tuple[int, dict[int, dict[str, Any]]] = (0, {})

    @classmethod
    def for_run(cls, run: Any) -> Any:
        return run.part_states

    @property
    def in_usual_steps(self) -> bool:  # type: ignore[override]
        return self._used or self._alone  # so that its first use needs no agreement

    def of(self, feed: Feed | NoFeed) -> dict[str, Any]:
        """The dict of the part that is trained now."""
        step, part = feed.step, feed.step.current.part
        if not isinstance(feed, Feed) or not feed.training or step.ended:
            raise ConfigError(ELSEWHERE)
        if not self._used:
            self._used = True
            if feed.rank_info.world_size > 1 or self.end_step not in step.policies.end_step:
                raise RetryStep(LATE)
        # Copies, by part and whether its samples count.
        running: dict[tuple[int, bool], dict[str, Any]] = step.notes.setdefault(self, {})
        place = part, step.current.fresh
        if place not in running:
            if part not in self._dicts and any(self._dicts.values()):
                logger.warning(LOST, part)
            running[place] = mapped(_copied, self._dicts.get(part, {}))
        return running[place]

    def begin_loop(self, feed: Feed) -> None:
        self._position, self._alone = feed.position, feed.rank_info.world_size == 1

    def end_step(self, step: Step) -> None:
        if not self._used:
            return
        running = step.notes.get(self, {})
        dicts = {each.part: running.get((each.part, True), self._dicts.get(each.part, {})) for each in step.drawn}
        if step.outcome == "undone":
            self._undone = self._position.step, dicts
        else:
            self._dicts = dicts

    # -- all ranks together ---------------------------------------------------------------------------

    def share(self) -> None:
        """Give all ranks the dicts of all parts."""
        if self._used:
            self.joined()

    def taken(self, steps: int) -> None:
        """Keep this rank's dicts of a step that was undone here only: the state of a peer, which
        has made this many `steps`, was loaded. That peer has made the step with the gradients of
        all ranks, so this one had got as far as its backward pass."""
        before, dicts = self._undone
        if steps > before:
            self._dicts |= dicts

    def joined(self) -> None:
        """Give all ranks of a new generation the dicts that there are."""
        self._undone = 0, {}
        answers = gathered_objects((self._used, mapped(_copied, self._dicts)), self._registered.control)
        self._used = any(used for used, _ in answers)
        self._dicts = {part: each for _, dicts in answers for part, each in dicts.items()} | self._dicts

    def agreed(self, due: bool, *, first: bool) -> bool:
        """Whether a snapshot is due on the `first` rank, if all ranks take part in it."""
        return summed([due and first], self._device, self._registered.control)[0] > 0 if self._used else due

    def state(self) -> dict[str, Any]:
        """The entry of states, if there is one."""
        return {NAME: self._dicts} if self._used else {}

    def load(self, state: Mapping[str, Any]) -> None:
        dicts = state.get(NAME)
        self._used, self._dicts = self._shown or dicts is not None, move(dict(dicts or {}), self._device)


def check_part_states(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a state's dicts of parts are some."""
    dicts = state.get(NAME) or {}
    if not isinstance(dicts, Mapping) or any(type(each) is not int for each in dicts):
        raise CheckpointError(f"{NAME} is {dicts!r:.60}, and must be a dictionary by the numbers of parts")


def _shows_use(kind: type) -> bool:
    methods = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, FunctionType)]
    return any("part_state" in each.__code__.co_names for each in methods)


def _copied(value: Any, *_: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
