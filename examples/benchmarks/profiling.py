"""Where raysgd's loop spends its time, function by function, seen from inside a worker."""

import cProfile
import io
import pstats
from typing import Any

from contenders import BenchmarkOperator
from workloads import Setting

from raysgd import TorchTrainer

__all__ = ["where_the_time_goes"]

LINES = 40


class ProfiledOperator(BenchmarkOperator):
    """The default loop under cProfile; the table is reported like a metric."""

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        profiler = cProfile.Profile()
        result = profiler.runcall(super().train_epoch, iterator, info, num_steps, epoch_idx)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(LINES)
        return {**result, "profile_table": text.getvalue()}


def where_the_time_goes(setting: Setting) -> str:
    """Rank 0's functions, by their own time. cProfile makes Python calls look dearer than they are."""
    config: dict[str, Any] = {"setting": setting}
    with TorchTrainer(
        training_operator_cls=ProfiledOperator, num_workers=setting.workers, use_ray=True, config=config
    ) as trainer:
        trainer.train()
        return str(trainer.train()["profile_table"])
