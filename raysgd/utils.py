"""The names of `ray.util.sgd.utils`, at the path that old scripts import. Both."""

from raysgd.compat.utils import *  # noqa: F403
from raysgd.compat.utils import __all__ as __all__
