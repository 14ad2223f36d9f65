"""Trainers as Tune trials: each trial is a trainer with its own workers (extra: tune). Both.

What users write:

    Class API:          TorchTrainer.as_trainable(training_operator_cls=Digits, num_workers=2), for tune.Tuner
    Function API:       tune.Tuner(train.TorchTrainer(train_loop), param_space={"train_loop_config": {...}})
    Functions of Tune:  ray.tune.report(rows[0]), to which a train.Trainer in the function adds its newest checkpoint
"""

from __future__ import annotations

from raysgd.train.in_trial import report
from raysgd.train.run.trials import as_trainable
from raysgd.tune.trials import BaseTorchTrainable, TFTrainable

__all__ = ["BaseTorchTrainable", "TFTrainable", "as_trainable", "report"]
