"""A Ray Dataset as an operator's data: features, target, and the size of a batch. Both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.config import at_least
from raysgd.errors import ConfigError

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class RayData:
    """A Ray Dataset, with its columns and the size of a batch.

        self.register_data(train_loader=RayData(ray.data.read_parquet(path), batch_size=32, features=["a", "b"], target="y"))

    dataset     the Ray Dataset
    batch_size  rows on each worker; by default config["*batch_size"]
    features    a column; or a list of columns, which become one array of rows; or a list of such
                lists (and columns), for models with several inputs
    target      a column, or a list of columns. Without features and target, a batch is a dict of
                all columns
    """

    dataset: Any
    batch_size: int | None = None
    features: str | Sequence[Any] | None = None
    target: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "streaming_split") and not hasattr(self.dataset, "read"):
            raise ConfigError(
                "RayData takes a Ray Dataset (ray.data.read_parquet(...), ray.data.from_items(...)), got "
                f"{self.dataset!r:.200}"
            )
        if self.batch_size is not None:
            at_least("batch_size", self.batch_size, 1, whole=True)
        if (self.features is None) != (self.target is None):
            raise ConfigError(
                f"pass both features and target, or neither for batches that are dicts of columns, got "
                f"features={self.features!r} and target={self.target!r}"
            )
        groups = [_names(group) for group in [*self._inputs(), *([] if self.target is None else [self.target])]]
        if not all(group and all(isinstance(name, str) for name in group) for group in groups):
            raise ConfigError(
                "features and target must be names of columns or lists of names, and features may be a list of such lists, got "
                f"features={self.features!r} and target={self.target!r}"
            )

    @staticmethod
    def is_given_as(data: Any) -> bool:
        return isinstance(data, RayData) or hasattr(data, "streaming_split")

    @classmethod
    def of(cls, data: Any) -> RayData:
        return data if isinstance(data, cls) else cls(data)

    def sized(self, config: Mapping[str, Any], key: str) -> RayData:
        """Make a copy with a batch size, its own or the config's."""
        if self.batch_size is not None:
            return self
        if key not in config:
            raise ConfigError(
                f"the Ray Dataset has no batch size: put {key!r} into the trainer's config, or register "
                "RayData(dataset, batch_size=...)"
            )
        return replace(self, batch_size=int(config[key]))

    def arranged(self, columns: Columns) -> Any:
        """Arrange one batch for the operator: `(*features, target)`, or the columns by name."""
        if self.target is None:
            return {name: _numbers(name, columns[name]) for name in columns}
        inputs = self._inputs()
        wanted = {name for group in [*inputs, self.target] for name in _names(group)}
        missing = sorted(wanted - set(columns))
        if missing:
            raise ConfigError(
                f"the Ray Dataset has no column {', '.join(missing)}: its columns are {', '.join(columns)}"
            )
        return (*(_joined(group, columns) for group in inputs), _joined(self.target, columns))

    def _inputs(self) -> list[Any]:
        """The inputs of the model: each is a column's name, or a list of names."""
        features = self.features
        if features is None:
            return []
        flat = isinstance(features, str) or all(isinstance(name, str) for name in features)
        return [features] if flat else list(features)


def _names(group: Any) -> list[Any]:
    return list(group) if isinstance(group, (list, tuple)) else [group]


def _joined(group: Any, columns: Columns) -> Any:
    """One column, or the columns of a list as one array of rows."""
    import numpy as np

    if isinstance(group, str):
        return _numbers(group, columns[group])
    parts = [_numbers(name, columns[name]) for name in group]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _numbers(name: str, column: Any) -> Any:
    """Convert a column to an array of numbers. Raise ConfigError if that is not possible."""
    import numpy as np

    array = np.asarray(column)
    if array.dtype.kind == "O" and len({np.shape(value) for value in array}) == 1:
        array = np.stack(list(array))  # lists of equal lengths
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"the column {name!r} must hold numbers of equal shapes, and has the type {array.dtype}: convert it to numbers with "
            "map_batches(...), choose other columns as features and target, or remove it with drop_columns(...)"
        )
    return array
