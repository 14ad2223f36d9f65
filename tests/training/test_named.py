"""What must be the same in two scripts with one trainer, without a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raysgd.callbacks.base import Run
from raysgd.config import ElasticConfig
from raysgd.errors import ConfigError
from raysgd.replica.replica_base import ReplicaBase
from raysgd.replica.settings import OperatorReplicaFactory, ReplicaSettings
from raysgd.trainer.named import NamedCalls, checked_name
from raysgd.trainer.script_place import Made


class Tenure:
    name, orphan_s, term = "digits", 60.0, 1

    def __init__(self, record: dict[str, bytes]) -> None:
        self.record = record

    def commit(self, parts: dict[str, bytes]) -> None:
        self.record = {**self.record, **parts}

    def begin_again(self) -> None:
        self.record = {}


ENGINE: Any = SimpleNamespace(
    attach=lambda **given: bool(given["recoveries"]) or given["trained"] is not None,
    calls=SimpleNamespace(
        trained=1, progress=SimpleNamespace(epoch=2, batches=7, loads=0), changes=0, reached=None, active=True
    ),
    recoveries=[],
    world_size=2,
    start=lambda: None,
    stop=lambda *, force: None,
    processes=tuple,
)
CONFIG = {"lr": 0.1, "model": {"sizes": [1, 2]}, "loss": object(), "kinds": {"a", "b", "c"}}


def run(record: dict[str, bytes], config: dict[str, Any] = CONFIG, kind: str = "Digits", **settings: Any) -> NamedCalls:
    operator: Any = type(kind, (), {})
    factory = OperatorReplicaFactory(ReplicaBase, operator, config, ReplicaSettings(**{"num_workers": 2, **settings}))
    named: Any = NamedCalls(factory, [], Run(trainer="", name="", num_workers=2, config={}, folder=Path()))
    named.tenure = Tenure(record)
    named.start(ENGINE)
    if not named.attached:
        named.commit()
    return cast(NamedCalls, named)


def begin(named: NamedCalls, loop: int, done: int) -> int:
    return named.begin_body(loop, done)


def test_the_same_script_attaches_also_if_its_objects_are_at_other_addresses() -> None:
    record = run({}).tenure.record
    again = run(record, {**CONFIG, "loss": object(), "kinds": {"c", "b", "a"}})
    assert again.attached


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"config": {**CONFIG, "lr": 0.2}},
            "this script has config['lr']=0.2, but the workers of the trainer 'digits'",
        ),
        ({"config": {**CONFIG, "model": {"sizes": [3]}}}, r"started with config['model']['sizes']=[1, 2]. Use that"),
        ({"config": {}}, "this script has config['lr']=(not set)"),
        ({"kind": "Letters"}, "training_operator_cls=Letters"),
        ({"num_workers": 3}, "num_workers=3"),
        ({"elastic": ElasticConfig(min_workers=2)}, "elastic.min_workers=2"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], text: str) -> None:
    record = run({}).tenure.record
    with pytest.raises(ConfigError) as raised:
        run(record, **changed)
    assert text in str(raised.value) and "raysgd end digits" in str(raised.value)


def test_only_the_same_calls_in_the_same_order_get_the_results_of_the_last_script(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = run({})
    assert begin(first, 1, 0) == 0 and first.place.find_recorded("train(num_steps=10)") is None
    for call in ("train(num_steps=10)", "validate()", "train(num_steps=10)"):
        first.place.note(Made(call, {"of": call}, []))
        first.commit()
    again = run(first.tenure.record)
    assert begin(again, 1, 0) == 3
    assert [again.place.find_recorded(call) for call in ("train(num_steps=10)", "validate()")] == [
        Made("train(num_steps=10)", {"of": "train(num_steps=10)"}, []),
        Made("validate()", {"of": "validate()"}, []),
    ]
    assert again.place.find_recorded("train()") is None and again.place.find_recorded("train(num_steps=10)") is None
    assert "this script calls train() where the last one called train(num_steps=10): the call is made" in caplog.text


def test_a_script_that_dies_in_the_first_call_of_an_epoch_begins_with_that_epoch() -> None:
    first = run({})
    for done in (0, 1):
        begin(first, 1, done)
        if done == 0:
            first.place.note(Made("train()", {"of": "the first epoch"}, []))
            first.commit()
    again = run(first.tenure.record)
    assert (again.place.loop, again.place.done) == (1, 1)
    assert begin(again, 1, 1) == 0 and again.place.find_recorded("train()") is None


def test_a_call_before_the_loop_does_not_replace_what_the_last_script_has_made_in_it() -> None:
    first = run({})
    begin(first, 1, 1)
    first.place.note(Made("train()", {"of": "the second epoch"}, []))
    first.commit()
    second = run(first.tenure.record)
    second.place.note(Made("validate()", {}, []))
    second.commit()
    third = run(second.tenure.record)
    assert begin(third, 1, 1) == 1 and third.place.find_recorded("train()") is not None


@pytest.mark.parametrize(
    ("name", "orphan_s", "text"),
    [
        ("two words", 60, "name must be a text of letters, digits"),
        (None, 60, "orphan_s=60 has no effect without name="),
        ("digits", 0, "orphan_s must be"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: Any, orphan_s: float, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked_name(name, orphan_s)
