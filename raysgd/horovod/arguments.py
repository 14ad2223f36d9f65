"""What `horovod_args` may say, and what must be there for Horovod."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raysgd.errors import ConfigError

__all__ = ["HorovodArguments", "check_installed"]

GET_IT = (
    "Horovod has no wheels. In a checkout of raysgd: make horovod. For another environment: pip install 'raysgd[horovod]', "
    "then run tools/build_horovod.py of raysgd's sources (minutes; needs cmake and a C++ compiler; the wheel is kept for "
    "the next time)"
)
COMPRESSIONS = ("none", "fp16")
OPERATIONS = ("average", "sum")


@dataclass(frozen=True, kw_only=True)
class HorovodArguments:
    """Keywords of Horovod's DistributedOptimizer, for every registered optimizer; checked here.

    compression                 "none" or "fp16": how gradients travel
    op                          "average" or "sum" over the ranks
    backward_passes_per_step    backward passes in one batch (of one optimizer), before the gradients travel
    gradient_predivide_factor   splits the division of an average: part of it before the sum
    groups                      in how many groups gradients travel together; None: as Horovod sees fit
    sparse_as_dense             sparse gradients travel as dense ones
    """

    compression: str = "none"
    op: str = "average"
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float = 1.0
    groups: int | None = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        for name, legal in (("compression", COMPRESSIONS), ("op", OPERATIONS)):
            if getattr(self, name) not in legal:
                raise ConfigError(
                    f"horovod_args[{name!r}] must be one of {', '.join(map(repr, legal))}, got {getattr(self, name)!r}"
                )
        for name, value in (("backward_passes_per_step", self.backward_passes_per_step), ("groups", self.groups)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"horovod_args[{name!r}] must be a whole number of at least 1, got {value!r}")
        factor = self.gradient_predivide_factor
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0:
            raise ConfigError(f"horovod_args['gradient_predivide_factor'] must be a number above 0, got {factor!r}")
        if factor != 1.0 and self.op != "average":
            raise ConfigError("horovod_args: gradient_predivide_factor splits an average; it does not go with op='sum'")
        if not isinstance(self.sparse_as_dense, bool):
            raise ConfigError(f"horovod_args['sparse_as_dense'] must be True or False, got {self.sparse_as_dense!r}")

    @classmethod
    def taken_from(cls, given: Any) -> HorovodArguments:
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"horovod_args must be a dict of keyword arguments, got {given!r}")
        legal = sorted(each.name for each in fields(cls))
        unknown = sorted(given.keys() - set(legal))
        if unknown:
            raise ConfigError(f"horovod_args has no {unknown}; it takes {legal}")
        return cls(**given)

    def resolved(self, hvd: Any) -> dict[str, Any]:
        """Worker: in Horovod's own objects."""
        return {
            "compression": getattr(hvd.Compression, self.compression),
            "op": {"average": hvd.Average, "sum": hvd.Sum}[self.op],
            "gradient_predivide_factor": float(self.gradient_predivide_factor),
            "groups": self.groups,
            "sparse_as_dense": self.sparse_as_dense,
        }


def check_installed(framework: str | None = None) -> None:
    """Driver, when a trainer is made. `framework`: Horovod must also work with it, "torch" for instance."""
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(f"backend='horovod' needs Horovod, which is not installed. {GET_IT}")
    if framework is None:
        return
    try:
        importlib.import_module(f"horovod.{framework}")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"Horovod is installed, but does not work with the {framework} that is ({error}); it must be built for that "
            f"very version. {GET_IT}"
        ) from error
