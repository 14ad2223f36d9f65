"""A state can be restored from its bytes, which hold no code; damaged or other bytes are an error."""

import io
import pickle
import zipfile
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


def test_objects_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"state\['operator'\]\['net'\] is a object"):
        states.dump({**STATE, "operator": {"net": object()}})


def test_damage_is_reported() -> None:
    data = bytes(states.dump(STATE))
    for broken in (data[: len(data) // 2], b"", b"nonsense", data[:60] + bytes([data[60] ^ 255]) + data[61:]):
        with pytest.raises(CheckpointError):
            states.parse(broken)


def test_a_pickle_inside_is_not_run() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("code of the file was run",))

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array([Evil()], dtype=object), allow_pickle=True)
    good = zipfile.ZipFile(io.BytesIO(bytes(states.dump(STATE))))
    bad = io.BytesIO()
    with zipfile.ZipFile(bad, "w") as archive:
        for name in good.namelist():
            archive.writestr(name, buffer.getvalue() if name == "0.npy" else good.read(name))
    with pytest.raises(CheckpointError):
        states.parse(bad.getvalue())
    with pytest.raises(CheckpointError):
        states.parse(pickle.dumps(Evil()))


def test_other_formats_are_recognized() -> None:
    other = states.dump({**STATE, "format": "something else"})
    with pytest.raises(CheckpointError, match="not a checkpoint of a TFTrainer"):
        states.parse(other)
    with pytest.raises(CheckpointError, match="newer raysgd"):
        states.parse(states.dump({**STATE, "version": 99}))
