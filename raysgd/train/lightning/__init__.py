"""Lightning's Trainer in a training function: the names of `ray.train.lightning`. Worker.

    trainer = lightning.Trainer(strategy=RayDDPStrategy(), plugins=[RayLightningEnvironment()])
    prepare_trainer(trainer).fit(module)

With `RayDDPStrategy`, the training continues with the next batch when workers fail or join.
"""

from raysgd.train.lightning.callbacks import RayTrainReportCallback
from raysgd.train.lightning.strategies import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    prepare_trainer,
)

__all__ = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]
