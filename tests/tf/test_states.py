"""A copy of a state for a later save is taken at once; objects in it, and other formats, are refused."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from raysgd.errors import CheckpointError
from raysgd.tf import states

STATE: dict[str, Any] = {"format": states.FORMAT, "version": 1, "models": [], "optimizers": []}


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


def test_other_formats_are_recognized() -> None:
    other = states.dump({**STATE, "format": "something else"})
    with pytest.raises(CheckpointError, match="not a checkpoint of a TFTrainer"):
        states.parse(other)
    with pytest.raises(CheckpointError, match="newer raysgd"):
        states.parse(states.dump({**STATE, "version": 99}))
