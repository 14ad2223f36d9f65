"""Notice what user code changes in a step that nothing saves. Worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.foreign import content_version
from raysgd.torch.registered import Registered
from raysgd.torch.state.packing import has_bytes
from raysgd.torch.step.options import settings_of

logger = logging.getLogger("raysgd")

PLAIN = (int, float, str, bool)
CHANGED = (
    "train_batch has changed %s, which checkpoints and new workers will not have. Register a module (a frozen one needs eval()), change "
    "other state in on_step(self, info) and return it from state_dict(), or keep in self.part_state what belongs to a part of the batch"
)
CHANGED_LATER = CHANGED.replace("train_batch", "training")
CHANGED_BY_FUNCTION = (
    "a function of apply_all_operators() has set %s, which checkpoints and workers that join later will not have: return it from "
    "state_dict() and restore it in load_state_dict(), or let train_batch compute it from batch_info, which has what is passed to "
    "train(info=...)"
)
CHANGED_BY_PARTS = (
    "train_batch has changed %s, and this worker computes several parts of a batch, each of which does that. If anything is computed from "
    "it, results differ from those of an undisturbed run. Change it in on_step(self, info), or keep it in self.part_state"
)
CHANGED_AGAIN = (
    "train_epoch was called again for the rest of its epoch, because the workers have changed, and it has changed %s again before its "
    "loop. Unless this is meant, compute it from epoch_idx"
)
SETTINGS = "settings of the optimizer, such as the learning rate,"
CONTENTS = "contents of modules"
MOST_VALUES = 100  # of a container in which modules are looked for


class WatchAttributes(Policy):
    """Warns of what nothing saves and `train_batch` changes: in this process's first step, if that
    begins a call. Of what it changes at all in the first step in which this worker has several
    parts, and of what `train_epoch` changes when it is called again for the rest of an epoch.

    They are found by their identities, numbers and texts by their values. The contents of modules,
    also in short lists and dicts, are compared at the end of the first call too.
    """

    def __init__(self, operator: Any, registered: Registered) -> None:
        self._operator, self._registered, self._raysgds = operator, registered, {*vars(operator)}
        self._first = self._in_parts = True
        self._leads = False  # whether this is the first rank
        self._again = bool(operator._overrides("train_epoch"))
        self._call = -1  # which call of `train` has begun
        self._looks = False
        self._entered: dict[str, Any] | None = None  # when `train_epoch` was called again
        self._before: dict[str, Any] | None = None  # at the beginning of the part
        self._contents: dict[str, Any] = {}  # at the beginning of the first step
        self._text = ""
        self._named = set[str]()  # what was said, with raysgd's own names

    @classmethod
    def for_run(cls, run: Any) -> WatchAttributes | None:
        return run.attributes if run.acts_in_steps and not run.makes_own_steps else None

    def begin_loop(self, feed: Feed) -> None:
        position, self._leads = feed.position, feed.rank_info.world_rank == 0
        again = self._again and (position.call == self._call or position.call_batches > 0)
        self._looks = self._leads and self._first and not position.call_batches
        self._entered = self._state() if again and self._leads else None
        self._call, self._first = position.call, False

    def begin_part(self, step: Step) -> None:
        entered, self._entered, self._before = self._entered, None, None
        if entered is not None:
            self._again = not self._say(CHANGED_AGAIN, entered)
        if self._looks:
            self._looks, self._text, self._before = False, CHANGED, self._state()
            self._contents = self._before[CONTENTS]
        elif self._leads and self._in_parts and not step.current.last_part:
            self._in_parts, self._text, self._before = False, CHANGED_BY_PARTS, self._state()

    def after_batch(self, step: Step) -> None:
        if self._before is not None:
            self._say(self._text, self._before)
            self._before = None
        self.in_usual_steps = False  # from the next step on

    def after_loop(self) -> None:
        if any(self._contents.values()):
            self._say(CHANGED_LATER, {**self._state(), CONTENTS: self._contents})
        self._contents = {}

    def watch(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the operator."""
        if self._operator._internals.rank_info.world_rank:
            return function(self._operator)
        before, self._named = self._state(), self._named | self._registered.held.keys()
        value = function(self._operator)
        self._say(CHANGED_BY_FUNCTION, before)
        return value

    def _say(self, text: str, before: dict[str, Any]) -> bool:
        now = self._state()
        known = {id(each) for each in before.values() if not isinstance(each, PLAIN)}
        changed = {
            name for name, value in now.items() if not _same(before.get(name, known), value) and id(value) not in known
        }
        moved = {
            name: contents
            for name, was in before[CONTENTS].items()
            if (contents := {new[1] for old, new in zip(was, now[CONTENTS].get(name, ()), strict=False) if new != old})
        }
        changed = (changed | moved.keys()) - {SETTINGS, CONTENTS}
        if text is CHANGED_AGAIN and before[SETTINGS] != now[SETTINGS]:
            changed.add(SETTINGS)
        saved: Any = {}
        if text not in (CHANGED_BY_PARTS, CHANGED_AGAIN):
            changed -= self._named
            self._named |= changed
            saved = (self._operator.state_dict() or {}) if changed else {}
        state_contents = {_content(each)[1] for each in _tensors_in(saved)} if moved else set()
        rest = changed - saved.keys() if isinstance(saved, Mapping) else changed & moved.keys()
        rest -= {name for name, contents in moved.items() if contents <= state_contents}
        names = sorted(rest, key=lambda name: (name == SETTINGS, name))
        if names:
            logger.warning(text, ", ".join(name if name == SETTINGS else f"self.{name}" for name in names))
        return bool(names)

    def _state(self) -> dict[str, Any]:
        """The user's attributes that are not registered, their contents, and optimizers'
        settings."""
        registered = self._registered
        objects = [
            *registered.models,
            *registered.wrapped,
            *registered.optimizers,
            *registered.schedulers,
            registered.criterion,
        ]
        known = {id(each) for each in objects}
        attributes = {name: value for name, value in vars(self._operator).items() if name not in self._raysgds}
        saved = _tensors_in(
            [*registered.models, *registered.metrics.values(), registered.stepped_by(*registered.optimizers)]
        )
        memory = {each.untyped_storage().data_ptr() for each in saved}
        contents = {
            name: [_content(each) for each in _tensors_in(modules) if each.untyped_storage().data_ptr() not in memory]
            for name, value in attributes.items()
            if (modules := _modules_in(value))
        }
        attributes = {name: value for name, value in attributes.items() if id(value) not in known}
        return attributes | {SETTINGS: settings_of(registered.optimizers), CONTENTS: contents}


def _modules_in(value: Any) -> list[nn.Module]:
    """A module, or those in a short list, tuple or dict."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, nn.Module)] if len(values) <= MOST_VALUES else []


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in a module or in containers whose bytes are their values."""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if isinstance(value, (list, tuple, dict)):
        for each in (value.values() if isinstance(value, dict) else value) if depth else ():
            yield from _tensors_in(each, depth - 1)
    elif type(value) in (torch.Tensor, nn.Parameter) and has_bytes(value):
        yield value


def _content(tensor: torch.Tensor) -> tuple[int, bytes]:
    """How often a tensor has changed, which `.data` does not count, and 1000 of its elements."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(len(flat) // 1000, 1)].contiguous().cpu()
    return content_version(tensor), some.view(torch.uint8).numpy().tobytes()


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)
