"""The data sets of a run, as the user gives them: checked, named, and which of them are divided. Opens none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.errors import ConfigError

__all__ = ["DataConfig", "named_datasets", "parse_data_config"]

ONLY = "train"


@dataclass(frozen=True)
class DataConfig:
    """How data sets reach the workers.

    datasets_to_split      "all", or the names of those of which every worker gets its own part; the others are given whole
    execution_options      Ray Data's ExecutionOptions for all of them, or a dict of them by name
    enable_shard_locality  blocks go to workers on their own node where that is possible
    equal                  every worker gets the same number of rows, and up to a row per worker is left out; without it
                           all rows are used, and the parts differ in length
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    execution_options: Any = None
    enable_shard_locality: bool = True
    equal: bool = True

    def __post_init__(self) -> None:
        names = self.datasets_to_split
        listed = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
        if names != "all" and not listed:
            raise ConfigError(f"datasets_to_split must be 'all' or a list of data sets' names, got {names!r}")
        for name in ("enable_shard_locality", "equal"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def splits(self, name: str) -> bool:
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def options_for(self, name: str) -> Any:
        given = self.execution_options
        return given.get(name) if isinstance(given, Mapping) else given


def named_datasets(given: Any) -> dict[str, Any]:
    """The data sets by name; a single one is called "train"."""
    if given is None:
        return {}
    named = dict(given) if isinstance(given, Mapping) else {ONLY: given}
    for name, dataset in named.items():
        if not isinstance(name, str):
            raise ConfigError(f"data sets are named by strings, got {name!r}")
        _check_dataset(name, dataset)
    return named


def _check_dataset(name: str, dataset: Any) -> None:
    kind = type(dataset).__name__
    if kind == "DatasetPipeline" or (hasattr(dataset, "iter_epochs") and not hasattr(dataset, "streaming_split")):
        raise ConfigError(
            f"the data set {name!r} is a {kind}, which Ray has given up: pass the Dataset itself. It is read as a stream "
            "now (what window() was for), and every iteration over a worker's shard is a new pass (what repeat() was for)"
        )
    if not hasattr(dataset, "streaming_split"):
        raise ConfigError(
            f"the data set {name!r} must be a Ray Dataset (ray.data.read_parquet(...), ray.data.from_items(...)), got "
            f"{dataset!r:.200}. Other data (a torch Dataset, a list) is loaded in the function itself"
        )


def parse_data_config(given: Any, names: Sequence[str]) -> Any:
    """Ours, Ray's own `ray.train.DataConfig` (or a subclass with its own `configure`), or a dict that says of each name
    whether it is split: {"train": {"split": True}}."""
    if given is None:
        return DataConfig()
    if isinstance(given, Mapping):
        _check_names(given, names)
        return DataConfig([name for name in names if _split_of(name, given.get(name))])
    if callable(getattr(given, "configure", None)):
        return given
    if not isinstance(given, DataConfig):
        raise ConfigError(
            "dataset_config must be a DataConfig, such as DataConfig(datasets_to_split=['train']), or a dict such as "
            f"{{'train': {{'split': True}}}}, got {given!r}"
        )
    if given.datasets_to_split != "all":
        _check_names(given.datasets_to_split, names)
    return given


def _check_names(asked: Any, names: Sequence[str]) -> None:
    unknown = sorted(set(asked) - set(names))
    if unknown:
        raise ConfigError(
            f"dataset_config names {', '.join(unknown)}, but the data sets are {', '.join(names) or 'none'}"
        )


def _split_of(name: str, given: Any) -> bool:
    """One entry of the dict form; Ray's old DatasetConfig objects have the same word as an attribute."""
    if given is None:
        return True
    split = given.get("split") if isinstance(given, Mapping) else getattr(given, "split", given)
    if split is None:
        return True
    if not isinstance(split, bool):
        raise ConfigError(f"dataset_config[{name!r}] must say split=True or split=False, got {given!r}")
    return split
