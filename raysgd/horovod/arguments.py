"""The trainer's `horovod_args`, and the check that Horovod is installed. Both."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from raysgd.config import at_least, check_flags, is_real, one_of
from raysgd.errors import ConfigError

HOW_TO_INSTALL = (
    "Horovod has no wheels. In a checkout of raysgd: make horovod. For another environment: pip install 'raysgd[horovod]', "
    "then run tools/build_horovod.py of raysgd's sources (it takes minutes, needs cmake and a C++ compiler, and keeps the "
    "wheel for the next time)"
)


@dataclass(frozen=True, kw_only=True)
class HorovodArguments:
    """Arguments of Horovod's DistributedOptimizer, which apply to every registered optimizer.

    compression                 "none" or "fp16": the format in which gradients are sent
    op                          "average" or "sum" over the ranks
    backward_passes_per_step    backward passes of one optimizer in each batch, before its gradients
                                are sent
    gradient_predivide_factor   divides an average in two parts: by this factor before the sum, by
                                the rest after it
    groups                      the number of groups in which gradients are sent; None: Horovod
                                decides
    sparse_as_dense             send sparse gradients as dense ones
    """

    compression: str = "none"
    op: str = "average"
    backward_passes_per_step: int = 1
    gradient_predivide_factor: float = 1.0
    groups: int | None = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        one_of("horovod_args['compression']", self.compression, "none", "fp16")
        one_of("horovod_args['op']", self.op, "average", "sum")
        for name, value in (("backward_passes_per_step", self.backward_passes_per_step), ("groups", self.groups)):
            if value is not None:
                at_least(f"horovod_args[{name!r}]", value, 1, whole=True)
        factor = self.gradient_predivide_factor
        if not is_real(factor) or factor <= 0:
            raise ConfigError(f"horovod_args['gradient_predivide_factor'] must be a number above 0, got {factor!r}")
        if factor != 1.0 and self.op != "average":
            raise ConfigError(
                "horovod_args['gradient_predivide_factor'] divides an average, and cannot be used with op='sum': leave one out"
            )
        check_flags(**{"horovod_args['sparse_as_dense']": self.sparse_as_dense})

    @classmethod
    def parse(cls, arguments: Any) -> HorovodArguments:
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"horovod_args must be a dict of keyword arguments, got {arguments!r}")
        known = sorted(each.name for each in fields(cls))
        unknown = sorted(arguments.keys() - set(known))
        if unknown:
            raise ConfigError(f"horovod_args has no argument {unknown[0]!r}; it takes {', '.join(known)}")
        return cls(**arguments)

    def resolved(self, hvd: Any) -> dict[str, Any]:
        """Convert the arguments to Horovod's own objects."""
        return {
            "compression": getattr(hvd.Compression, self.compression),
            "op": {"average": hvd.Average, "sum": hvd.Sum}[self.op],
            "gradient_predivide_factor": float(self.gradient_predivide_factor),
            "groups": self.groups,
            "sparse_as_dense": self.sparse_as_dense,
        }


def check_installed(framework: str | None = None) -> None:
    """Raise ImportError if Horovod is missing, or does not work with the framework ("torch")."""
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(f"backend='horovod' needs Horovod, which is not installed. {HOW_TO_INSTALL}")
    if framework is None:
        return
    try:
        importlib.import_module(f"horovod.{framework}")
    except (ImportError, OSError) as error:
        raise ImportError(
            f"Horovod is installed, but it does not work with the installed {framework} ({error}): build it for exactly this "
            f"version. {HOW_TO_INSTALL}"
        ) from error
