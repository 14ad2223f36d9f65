"""Data for operators: from Ray, or with seeded samples. Both."""

from typing import TYPE_CHECKING

from raysgd.core.lazy import REFUSED, lazy_names
from raysgd.ray_data.columns import RayData

if TYPE_CHECKING:
    from raysgd.data.sample_seeds import SampleSeeds

__all__ = ["RayData", "SampleSeeds"]

_HOMES = {"SampleSeeds": "raysgd.data.sample_seeds", "Dataset": REFUSED}
__getattr__, __dir__ = lazy_names("raysgd.data", _HOMES, __all__)
