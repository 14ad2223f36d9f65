"""A state can be restored from its bytes; objects and other formats are refused."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.errors import CheckpointError  # noqa: E402
from raysgd.tf import states  # noqa: E402

STATE: dict[str, Any] = {
    "format": states.FORMAT,
    "version": 1,
    "models": [[np.arange(6, dtype="float32").reshape(2, 3), np.float64(2.5)]],
    "optimizers": [[np.array(7, "int64")]],
    "operator": {"best": 0.5, "seen": [1, 2, (3, "four")], 5: None, "flag": True, "empty": np.zeros((0, 2))},
}


def test_a_state_survives_the_round_trip() -> None:
    back = states.parse(states.dump(STATE))
    assert back["operator"].pop("empty").shape == (0, 2)
    assert back["operator"] == {name: value for name, value in STATE["operator"].items() if name != "empty"}
    np.testing.assert_array_equal(back["models"][0][0], STATE["models"][0][0])
    assert back["models"][0][0].dtype == np.float32 and back["optimizers"][0][0].shape == ()


def test_half_precision_survives_the_round_trip() -> None:
    value = tf.constant([1.5, -2.0], tf.bfloat16)
    back = states.parse(states.dump({**STATE, "operator": value}))["operator"]
    assert tf.convert_to_tensor(back).dtype == tf.bfloat16
    np.testing.assert_array_equal(np.asarray(back, "float32"), [1.5, -2.0])


def test_a_copy_that_is_packed_later_has_what_state_dict_returned_then() -> None:
    own: Any = {"seen": [1], "counts": np.ones(3)}
    packed = states.packed(states.unchanging({**STATE, "operator": own}))
    own["seen"].append(2)
    own["counts"] += 1
    with packed as (content,):
        back = states.parse(content)["operator"]
    assert back["seen"] == [1] and back["counts"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"state\['operator'\]\['net'\] is a object"):
        states.unchanging({**STATE, "operator": {"net": object()}})


def test_objects_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"state\['operator'\]\['net'\] is a object"):
        states.dump({**STATE, "operator": {"net": object()}})


def test_other_formats_are_recognized() -> None:
    other = states.dump({**STATE, "format": "something else"})
    with pytest.raises(CheckpointError, match="not a checkpoint of a TFTrainer"):
        states.parse(other)
    with pytest.raises(CheckpointError, match="newer raysgd"):
        states.parse(states.dump({**STATE, "version": 99}))
