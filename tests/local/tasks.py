"""Tasks that are threads, of which one runs at a time: for code that greenlets cannot run, such as torch's backward passes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch

__all__ = ["Task", "current"]

LIMIT_S = 120.0
_here = threading.local()


def current() -> Task:
    """Return the task that runs. The first call in a thread that is none makes it one."""
    if not hasattr(_here, "task"):
        _here.task = Task()
    task: Task = _here.task
    return task


class Task:
    """Has the interface of a greenlet. Each task has random states of its own, as a process has."""

    def __init__(self, run: Callable[[], Any] | None = None, parent: Task | None = None) -> None:
        self._run, self._parent = run, parent
        self._turn = threading.Semaphore(0)
        self._given: Any = None
        self._thrown: type[BaseException] | None = None
        self._thread: threading.Thread | None = None
        self._states = _random_states()
        self._failure: BaseException | None = None
        self.dead = False

    def switch(self, value: Any = None) -> Any:
        """Resume this task, and wait until another one switches back. Return the value that it gives."""
        me = current()
        if me._thrown is not None:
            raise me._thrown
        self._given, me._states = value, _random_states()
        self._go_on()
        return me._wait()

    def throw(self, kind: type[BaseException]) -> None:
        """End this task with an exception, which is raised where it waits and wherever it tries to wait again."""
        self._thrown = kind
        if self._thread is None or self.dead:
            self.dead = True
        else:
            self.switch()

    def _go_on(self) -> None:
        if self._thread is None and self._run is not None:
            self._thread = threading.Thread(target=self._main, name="task", daemon=True)
            self._thread.start()
        else:
            self._turn.release()

    def _wait(self) -> Any:
        if not self._turn.acquire(timeout=LIMIT_S):
            raise RuntimeError(f"no other task has switched to this one for {LIMIT_S:.0f} s")
        _set_random_states(self._states)
        failure, self._failure = self._failure, None  # of a task that has ended
        if self._thrown is not None or failure is not None:
            raise self._thrown or failure  # type: ignore[misc]
        return self._given

    def _main(self) -> None:
        _here.task = self
        _set_random_states(self._states)
        assert self._run is not None and self._parent is not None
        try:
            self._run()
        except BaseException as error:
            if self._thrown is None or not isinstance(error, self._thrown):
                self._parent._failure = error
        self.dead = True
        self._parent._turn.release()


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
