"""All private names of transformers that raysgd uses. Worker.

Checked with transformers 5.23; 4.57 has the same names.
"""

from __future__ import annotations

import dis
from types import FunctionType
from typing import Any

from transformers import Trainer

from raysgd.train.elastic_state import copied

_FUNCTIONS = [each for each in vars(Trainer).values() if isinstance(each, FunctionType)]
SET_BY_TRANSFORMERS = {  # attributes of a Trainer
    each.argval for function in _FUNCTIONS for each in dis.get_instructions(function) if each.opname == "STORE_ATTR"
}
LOOP = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


def loop_of(trainer: Any) -> dict[str, Any]:
    """Copy what transformers adds up. Before version 5, a part of that is in its variables."""
    return {name: copied(getattr(trainer, name)) for name in LOOP if hasattr(trainer, "_tr_loss")}


class WeightsInMemory:
    """Goes before a Trainer class. Its `train(resume_from_checkpoint=folder)` finds only the
    trainer's state in that folder if `weights_in_memory` is set."""

    weights_in_memory = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.weights_in_memory:
            inner: Any = super()
            inner._load_from_checkpoint(resume_from_checkpoint, model)

    def before_best_model(self) -> None:
        """Called before the Trainer loads its best model."""

    def _load_best_model(self) -> None:
        self.before_best_model()
        inner: Any = super()
        inner._load_best_model()
