"""All private names of transformers that raysgd uses. Worker.

Checked with transformers 5.23; 4.57 has the same names.
"""

from __future__ import annotations

from typing import Any


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
