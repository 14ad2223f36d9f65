"""The datasets of a training function: names, checks, and which ones are split. Driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.config import check_flags
from raysgd.errors import ConfigError

DEFAULT_NAME = "train"


@dataclass(frozen=True)
class DataConfig:
    """How datasets reach the workers.

    datasets_to_split      "all", or the names of the datasets that are split among the workers;
                           each worker reads the other datasets completely
    execution_options      Ray Data's ExecutionOptions for all datasets, or a dict of them by name
    enable_shard_locality  workers read blocks on their own node where possible
    equal                  every worker gets the same number of rows, so up to one row per worker is
                           not used; False: all rows are used, and the workers' numbers of rows
                           differ
    """

    datasets_to_split: Literal["all"] | Sequence[str] = "all"
    execution_options: Any = None
    enable_shard_locality: bool = True
    equal: bool = True

    def __post_init__(self) -> None:
        names = self.datasets_to_split
        is_list = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
        if names != "all" and not is_list:
            raise ConfigError(f"datasets_to_split must be 'all' or a list of names of datasets, got {names!r}")
        check_flags(enable_shard_locality=self.enable_shard_locality, equal=self.equal)

    def splits(self, name: str) -> bool:
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def options_for(self, name: str) -> Any:
        options = self.execution_options
        return options.get(name) if isinstance(options, Mapping) else options


def named_datasets(datasets: Any) -> dict[str, Any]:
    """The datasets by name. A single dataset is named "train"."""
    if datasets is None:
        return {}
    named = dict(datasets) if isinstance(datasets, Mapping) else {DEFAULT_NAME: datasets}
    for name, dataset in named.items():
        if not isinstance(name, str):
            raise ConfigError(f"the name of a dataset must be a string, got {name!r}")
        _check_dataset(name, dataset)
    return named


def is_dataset(value: Any) -> bool:
    """Whether this is a Ray Dataset, or a dictionary of Ray Datasets."""
    if isinstance(value, Mapping):
        return bool(value) and all(is_dataset(each) for each in value.values())
    return hasattr(value, "streaming_split") or hasattr(value, "iter_epochs")


def _check_dataset(name: str, dataset: Any) -> None:
    kind = type(dataset).__name__
    if kind == "DatasetPipeline" or (hasattr(dataset, "iter_epochs") and not hasattr(dataset, "streaming_split")):
        raise ConfigError(
            f"the dataset {name!r} is a {kind}, which Ray has removed: pass the Dataset itself. Workers read it as a stream, "
            "as with window(), and every iteration over a shard is a new pass, as with repeat()"
        )
    if not hasattr(dataset, "streaming_split"):
        raise ConfigError(
            f"the dataset {name!r} must be a Ray Dataset (ray.data.read_parquet(...), ray.data.from_items(...)), got "
            f"{dataset!r:.200}. Load other data (a torch Dataset, a list) in the training function"
        )


def parse_data_config(config: Any, names: Sequence[str]) -> Any:
    """Read a trainer's `dataset_config`: a DataConfig, Ray's own `ray.train.DataConfig` (or a
    subclass that overrides `configure`), or a dict that says which datasets are split: {"train":
    {"split": True}}."""
    if config is None:
        return DataConfig()
    if isinstance(config, Mapping):
        _check_names(config, names)
        return DataConfig([name for name in names if _is_split(name, config.get(name))])
    if callable(getattr(config, "configure", None)):
        return config
    if not isinstance(config, DataConfig):
        raise ConfigError(
            "dataset_config must be a DataConfig, such as DataConfig(datasets_to_split=['train']), or a dict such as "
            f"{{'train': {{'split': True}}}}, got {config!r}"
        )
    if config.datasets_to_split != "all":
        _check_names(config.datasets_to_split, names)
    return config


def _check_names(entries: Any, names: Sequence[str]) -> None:
    unknown = sorted(set(entries) - set(names))
    if unknown:
        raise ConfigError(
            f"dataset_config names {', '.join(unknown)}, but the datasets are {', '.join(names) or 'none'}"
        )


def _is_split(name: str, entry: Any) -> bool:
    """Read what one entry of the dict says; Ray's DatasetConfig has an attribute `split`."""
    if entry is None:
        return True
    split = entry.get("split") if isinstance(entry, Mapping) else getattr(entry, "split", entry)
    if split is None:
        return True
    if not isinstance(split, bool):
        raise ConfigError(f"dataset_config[{name!r}] must have split=True or split=False, got {entry!r}")
    return split
