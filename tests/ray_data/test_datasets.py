"""Which objects are accepted as datasets, and which datasets are split. Pure."""

from types import SimpleNamespace
from typing import Any

import pytest

from raysgd.errors import ConfigError
from raysgd.ray_data.datasets import DataConfig, named_datasets, parse_data_config


class Splittable:
    def streaming_split(self, n: int) -> None: ...


class DatasetPipeline:
    def iter_epochs(self) -> None: ...


ONE, TWO = Splittable(), Splittable()


def test_a_single_dataset_is_named_train() -> None:
    assert named_datasets(ONE) == {"train": ONE}
    assert named_datasets({"a": ONE, "b": TWO}) == {"a": ONE, "b": TWO}
    assert named_datasets(None) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (DatasetPipeline(), "Ray has removed: pass the Dataset itself"),
        ({"train": ONE, "val": DatasetPipeline()}, r"'val' is a DatasetPipeline.*window\(\).*repeat\(\)"),
        ([1, 2], r"'train' must be a Ray Dataset .*got \[1, 2\]"),
        ({3: ONE}, "must be a string, got 3"),
    ],
)
def test_other_objects_are_refused_as_datasets(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_datasets(given)


@pytest.mark.parametrize(
    ("given", "split"),
    [
        (None, {"a", "b"}),
        (DataConfig(), {"a", "b"}),
        (DataConfig(["a"]), {"a"}),
        (DataConfig([]), set()),
        ({"a": {"split": True}, "b": {"split": False}}, {"a"}),
        ({"b": SimpleNamespace(split=False)}, {"a"}),
        ({"b": SimpleNamespace(split=None)}, {"a", "b"}),
        ({"a": False}, {"b"}),
    ],
)
def test_datasets_that_are_split(given: Any, split: set[str]) -> None:
    config = parse_data_config(given, ["a", "b"])
    assert {name for name in ("a", "b") if config.splits(name)} == split


def test_a_config_with_a_configure_method_is_returned_unchanged() -> None:
    own = SimpleNamespace(configure=lambda *given: None)
    assert parse_data_config(own, ["a"]) is own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig("train"), r"'all' or a list of names of datasets, got 'train'"),
        (lambda: DataConfig(equal=1), "equal must be True or False, got 1"),
        (lambda: parse_data_config(DataConfig(["c"]), ["a", "b"]), "names c, but the datasets are a, b"),
        (lambda: parse_data_config({"c": {"split": True}}, ["a"]), "names c, but the datasets are a"),
        (lambda: parse_data_config({"a": {"split": 1}}, ["a"]), "must have split=True or split=False"),
        (lambda: parse_data_config("train", ["a"]), r"must be a DataConfig.*got 'train'"),
    ],
)
def test_invalid_dataset_configs_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_execution_options_for_all_or_by_name() -> None:
    assert DataConfig(execution_options="x").options_for("a") == "x"
    assert DataConfig(execution_options={"b": "y"}).options_for("a") is None
    assert DataConfig(execution_options={"b": "y"}).options_for("b") == "y"
