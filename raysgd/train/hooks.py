"""Calls the hooks of a training function's backend. Driver."""

from __future__ import annotations

import contextlib

from raysgd.core.policy import PLANNED
from raysgd.engine.engine import Engine
from raysgd.train.backends import Backend, BackendConfig
from raysgd.train.worker_group import WorkerGroup, WorkersChanged


class BackendHooks:
    """Calls a backend's hooks, once for each generation of the workers. They get a `group` that no
    worker failure ends."""

    def __init__(self, backend: Backend, config: BackendConfig, engine: Engine, group: WorkerGroup) -> None:
        self._backend, self._config, self._engine, self._group = backend, config, engine, group
        self._called_for = -1  # the generation
        self._recoveries = 0  # before it

    def call(self) -> None:
        """Call the hooks for a new generation, again if it changes meanwhile."""
        engine = self._engine
        while self._called_for != engine.generation:
            first, self._called_for = self._called_for < 0, engine.generation
            changes = engine.recoveries[self._recoveries :]
            self._recoveries = len(engine.recoveries)
            failed = sorted(
                {rank for change in changes if change.reason not in PLANNED for rank in change.removed_ranks}
            )
            with contextlib.suppress(WorkersChanged):
                if failed and not first:
                    self._backend.handle_failure(self._group, failed, self._config)
                else:
                    self._backend.on_start(self._group, self._config)

    def begin_training(self) -> None:
        """Call the hooks before the function begins, again if a worker fails in one."""
        prepared = -1
        while prepared != self._engine.generation:
            self.call()
            prepared = self._engine.generation
            with contextlib.suppress(WorkersChanged):
                self._backend.on_training_start(self._group, self._config)
