"""Let steps act only on gradients that have arrived whole, where the device computes later than the
host: with NCCL. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysgd.errors import ConfigError
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.registered import Registered


class WholeGradients(Policy):
    """Waits for the device, and looks whether a peer has failed meanwhile: in `self.step`, before
    anything is decided from the gradients, before each step of an optimizer, also in user code, and
    before a step is committed in which a collective call was made after that. It raises an error
    then, and the step is undone."""

    def __init__(self, registered: Registered) -> None:
        self._registered = registered

    @classmethod
    def for_run(cls, run: Any) -> Any:
        return run.whole

    def require_hooks(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise ConfigError(
                    "backend='nccl' with several workers needs torch optimizers, because raysgd waits for the gradients in a hook, got "
                    f"a {type(optimizer).__name__}, which has no register_step_pre_hook: make it a subclass of torch.optim.Optimizer, "
                    "or pass backend='gloo'"
                )

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        self._registered.control.ensure_whole()

    on_other_step = on_whole_step

    def look_again(self) -> None:
        """Look if a collective call was made after `on_whole_step`."""
        self._registered.control.ensure_whole(unless_seen=True)

    def before_commit(self, step: Step) -> None:
        self._registered.control.ensure_whole(unless_seen=True)
