"""A value that user code reports is in the result, or refused with its name. It never causes an internal error after the epoch."""

import decimal
import fractions
import io
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysgd import ElasticConfig, train
from raysgd.callbacks import CSVCallback, JsonLinesCallback
from raysgd.torch import TorchTrainer
from tests.replicas import FunctionRank
from tests.tiers import NIGHTLY
from tests.torch.small import Line, inline

EXAMPLES = 300 if NIGHTLY else 25


class Measuring(Line):
    """Returns `metrics` from its batches, or from its complete epoch."""

    metrics: Any  # in place of the method, which only the default batch methods call
    batches = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        self.batches += 1
        return self.metrics

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        return self.metrics


class MeasuringEpochs(Measuring):
    def train_epoch(self, iterator: Any, info: Any = None, **more: Any) -> Any:
        for _ in iterator:
            self.batches += 1
        return self.metrics

    def validate(self, val_iterator: Any, info: Any = None) -> Any:
        return self.metrics


class Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("its repr")

    __str__ = __repr__


class BadNumber:
    def __float__(self) -> float:
        raise ZeroDivisionError("its float")


class BadShape:
    shape = 3


def endless() -> list[Any]:
    value: list[Any] = [1.0]
    value.append({"again": value})
    return value


Invalid = dict[str, tuple[Callable[[], Any], type[Exception], str]]
REFUSED: Invalid = {
    "number as a name": (lambda: {1: 1.0}, TypeError, "name of a metric must be a string, got 1 of type int"),
    "tuple as a name": (lambda: {("a", "b"): 1.0}, TypeError, r"got \('a', 'b'\) of type tuple"),
    "integer beyond floats": (lambda: {"m": 10**400}, ValueError, "the metric 'm' is a number of 1329 bits"),
    "fraction beyond floats": (lambda: {"m": fractions.Fraction(10**400)}, ValueError, "'m' is a number"),
}
REFUSED_OF_EPOCHS: Invalid = {
    "integer beyond floats, inside": (lambda: {"m": {"x": [10**400]}}, ValueError, "a number in the metric 'm'"),
    "contains itself": (lambda: {"m": endless()}, ValueError, "'m' contains itself"),
}
# From an epoch or from a batch: the value that is returned, and what is expected in the result.
NUMBERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "nan": (lambda: math.nan, "nan"),
    "large integer": (lambda: 10**300, 1e300),
    "decimal": (lambda: decimal.Decimal("1.5"), 1.5),
    "numpy half": (lambda: np.float16(2), 2.0),
    "0-dim tensor": (lambda: torch.tensor(2.5), 2.5),
}
# From an epoch alone, because a batch returns numbers. None: any value is expected.
OTHERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "none": (lambda: None, "None"),
    "text": (lambda: "3", "3"),
    "signalling decimal": (lambda: decimal.Decimal("sNaN"), None),
    "large tensor": (lambda: torch.ones(1000), None),
    "empty tensor": (lambda: torch.zeros(0), None),
    "nested": (lambda: {1: {(2, 3): [4, {5}]}}, {1: {(2, 3): [4, {5}]}}),
    "large list": (lambda: list(range(100_000)), None),
    "a file": (lambda: io.StringIO("x"), None),
    "a lock": (threading.Lock, None),
    "no repr": (Unshowable, None),
    "no float": (BadNumber, None),
    "no shape": (BadShape, None),
}


def results(operator: type[Measuring], metrics: Any) -> Iterator[Callable[[], Any]]:
    """Yield the calls of a trainer whose operator returns `metrics`."""
    trainer = inline(operator)
    trainer.get_local_operator().metrics = metrics  # type: ignore[attr-defined]
    yield trainer.train
    yield trainer.validate


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_OF_EPOCHS])
def test_invalid_metrics_are_refused_by_name(name: str) -> None:
    made, kind, text = (REFUSED | REFUSED_OF_EPOCHS)[name]
    for operator in (Measuring, MeasuringEpochs) if name in REFUSED else (MeasuringEpochs,):
        for call in results(operator, made()):
            with pytest.raises(kind, match=text) as caught:
                call()
            method = call.__name__ if operator is Measuring else {"train": "train_epoch"}.get(call.__name__, "validate")
            assert f"{operator.__name__}.{method}" in str(caught.value)


def test_an_invalid_metric_is_refused_at_the_first_batch() -> None:
    trainer = inline(Measuring)
    operator: Any = trainer.get_local_operator()
    operator.metrics = {2: 1.0}
    with pytest.raises(TypeError, match="must be a string"):
        trainer.train()
    assert operator.batches == 1
    operator.metrics = {"fine": 1.0}
    assert trainer.train()["fine"] == 1.0


@pytest.mark.parametrize("samples", ["x", -1, math.nan, None, 10**400, torch.ones(2)], ids=repr)
def test_an_invalid_number_of_samples_is_refused(samples: Any) -> None:
    for call in results(Measuring, {"num_samples": samples, "m": 1.0}):
        with pytest.raises(ValueError, match=r"Measuring\.\w+_batch.*num_samples.*finite number of 0 or more, got "):
            call()


@pytest.mark.parametrize("made", [made for made, _ in OTHERS.values()], ids=OTHERS.keys())
def test_what_is_no_number_is_refused_at_the_first_batch(made: Callable[[], Any]) -> None:
    for call in results(Measuring, {"fine": 0.5, "m": made()}):
        with pytest.raises(
            TypeError, match=r"(?s)Measuring\.\w+_batch.* the metric 'm' is not a number, .*return numbers"
        ):
            call()


@pytest.mark.parametrize("name", [*NUMBERS, *OTHERS])
def test_valid_metrics_are_in_the_result(name: str) -> None:
    made, expected = (NUMBERS | OTHERS)[name]
    for operator in (Measuring, MeasuringEpochs) if name in NUMBERS else (MeasuringEpochs,):
        for call in results(operator, {"m": made(), "fine": 0.5}):
            result = call()
            assert result["fine"] == 0.5 and "m" in result
            if expected is not None:
                assert str(result["m"]) == str(expected) or result["m"] == expected


NUMERIC = st.one_of(
    st.integers(),
    st.integers(min_value=-(10**420), max_value=10**420),
    st.floats(),
    st.booleans(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.sampled_from([np.float16("nan"), np.float64("inf"), np.int8(-3), np.bool_(True), np.datetime64(1, "s")]),
)
SCALARS = st.one_of(NUMERIC, st.none(), st.text(max_size=50), st.binary(max_size=20))
KEYS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=8), st.binary(max_size=3))
ARRAYS = st.sampled_from(
    [torch.zeros(()), torch.zeros(0), torch.ones(2, 3), torch.tensor(1j), np.zeros(3), np.array(1)]
)
OBJECTS = st.sampled_from([BadNumber(), BadShape(), object(), int, len, endless(), ..., NotImplemented])
VALUES = st.recursive(
    SCALARS | ARRAYS | OBJECTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.one_of(st.text(max_size=8), st.sampled_from(["epoch", "batch_count", "profile", "last_x", "x"]), KEYS)
SAMPLES = st.one_of(st.integers(1, 64), st.integers(1, 64), SCALARS)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(metrics=st.dictionaries(NAMES, VALUES, max_size=3), samples=SAMPLES, by_epoch=st.booleans(), data=st.data())
def test_any_metrics_give_a_result_or_a_clear_error(metrics: Any, samples: Any, by_epoch: bool, data: Any) -> None:
    metrics = {**metrics, **({"num_samples": samples} if data.draw(st.booleans()) else {})}
    for call in results(MeasuringEpochs if by_epoch else Measuring, metrics):
        try:
            result = call()
        except (TypeError, ValueError) as error:
            assert "returned an invalid " in str(error) or "returned a metric named" in str(error)
        else:
            assert all(isinstance(name, str) for name in result)


def test_writers_accept_every_value_in_a_result(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks get every value that was returned, and none of them may fail because of it."""
    trainer = inline(MeasuringEpochs, callbacks=[JsonLinesCallback(), CSVCallback()], logdir=tmp_path)
    operator: Any = trainer.get_local_operator()
    with caplog.at_level(logging.ERROR, logger="raysgd"), trainer:
        operator.metrics = {name: made() for name, (made, _) in (NUMBERS | OTHERS).items()}
        trainer.train()
        assert "large integer" in repr(trainer.history)
    assert [record.getMessage() for record in caplog.records] == []


# -- on workers ---------------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "long": lambda: {"note": "x" * (20 << 20)},
    "many": lambda: {f"metric-{number}": float(number) for number in range(20_000)},
    "many and long": lambda: {f"{number}-" + "n" * 5000: "x" * 5000 for number in range(2000)},
    "nested": lambda: {"note": nested(90)},
    "a large number": lambda: {"note": 2**900},
}


class OnOneRank(Line):
    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> Any:
        found = super().train_epoch(iterator, info)
        return {**found, **info["metrics"]} if self.world_rank == 1 else found


def test_the_rank_that_returned_it_is_named_and_values_of_any_size_arrive(ray_cluster: None) -> None:
    given: dict[str, Any] = {"config": {"batch": 2}, "elastic": ElasticConfig(snapshot_every=1)}
    with TorchTrainer(training_operator_cls=OnOneRank, num_workers=2, **given) as trainer:
        for metrics, kind in [({3: 1.0}, TypeError), ({"m": 10**400}, ValueError)]:
            with pytest.raises(kind, match=r"OnOneRank\.train_epoch returned an invalid result") as caught:
                trainer.train(info={"metrics": metrics})
            assert caught.value.raysgd_rank == 1  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"cannot be sent to the driver: opened .*Generator|generator"):
            trainer.train(info={"metrics": {"opened": Opened()}})
        assert trainer.train(info={"metrics": {"m": 2.0}})["m"] == 2.0
        for make in LARGE.values():
            result = trainer.train(info={"metrics": make()})
            assert result["num_samples"] == 12 and {name: result[name] for name in make()} == make()
        assert trainer.recoveries == []


class Opened:
    """Can be pickled for the worker, but not on its way back."""

    def __reduce__(self) -> Any:
        return counting, ()


def counting() -> Any:
    return (number for number in range(3))


def reporting(config: dict[str, Any]) -> None:
    rows = config["rows"]
    refused = []
    for row in rows:
        try:
            train.report(row)
        except (TypeError, ValueError) as error:
            refused.append(f"{type(error).__name__}: {error}")
    train.report(refused=refused)


def test_reports_of_functions_follow_the_same_rules() -> None:
    bad = [{1: 1.0}, {"m": 10**400}, {"m": counting()}]
    good = [{"m": math.nan}, {"m": 1j}, {"m": {1: [2]}}, {"_training_iteration": "x", "_time_this_iter_s": None}]
    there = FunctionRank()
    try:
        there.run(reporting, {"rows": [*bad, *good]})
    finally:
        there.close()
    *kept, (_, last, _) = there.messages
    assert len(kept) == len(good) and all("train.report()" in text for text in last["refused"])
    first, second, third = last["refused"]
    assert "TypeError" in first and "ValueError" in second and "cannot send m to the driver" in third
