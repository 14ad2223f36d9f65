"""A TFTrainer that files are tried on, which detects every change, and files that are wrong in many ways."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.tf import TFTrainer  # noqa: E402
from tests.storage.damage import Tally, members, zipped  # noqa: E402
from tests.tf.small import Small  # noqa: E402

VOLATILE = ("loads", "call", "call_done")


class Stateful(Small):
    """An operator with its own state, which it loads without checking it first, as users do."""

    fails_on = -1  # a rank

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.best, self.seen = 0.5, [1, 2]

    def state_dict(self) -> Any:
        return {"best": self.best, "seen": self.seen, "table": np.arange(4), "half": tf.constant([1.5], tf.bfloat16)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen.append(state_dict["seen"][0])  # changed only in part if the next line fails
        if (
            self.fails_on == self.world_rank
            or Path(self.config.get("marks", ""), f"rank {self.world_rank} fails").exists()
        ):
            raise ZeroDivisionError("planned")
        self.best = float(state_dict["best"])
        self.seen = list(state_dict["seen"])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, (np.ndarray, np.generic)) else value


def of(trainer: TFTrainer) -> Any:
    return plain(trainer.state_dict())


def saved_part(state: Any) -> Any:
    """Return the state without the counters of calls and loads."""
    state = copy.deepcopy(state)
    for name in VOLATILE:
        state["position"].pop(name)
        state["validation_position"].pop(name)
    state["validation_position"].pop("ended")
    return state


class Bench:
    """A trainer in the middle of an epoch, a file that it saved earlier."""

    def __init__(self, folder: Path) -> None:
        self.trainer = TFTrainer(training_operator_cls=Stateful)
        self.trainer.train(num_steps=4)
        self.trainer.validate()
        self.path = folder / "saved.ckpt"
        self.trainer.save(self.path)
        self.saved = saved_part(of(self.trainer))
        self.data = self.path.read_bytes()
        self.trainer.train(num_steps=3)
        self.now = of(self.trainer)

    def load(self) -> Any:
        self.trainer.load(self.path)
        return of(self.trainer)

    def refuses(self, what: str, data: bytes) -> None:
        self.path.write_bytes(data)
        tally = Tally(what)
        tally.attempt(what, self.load, lambda found: saved_part(found) == self.saved, "saved.ckpt")
        tally.check()
        assert tally.rejected == 1, f"{what}: it was loaded"
        assert of(self.trainer) == self.now, f"{what}: it was refused, and the trainer is another one"


# -- hand-made files ---------------------------------------------------------------------------------


def place_of(head: Any, *keys: Any) -> tuple[Any, int]:
    """Return the list that contains a value in the JSON, and its index there: `{"#": "dict", "items": [[key, value], ...]}`."""
    holder, at = [head], 0
    for key in keys:
        value = holder[at]
        if isinstance(value, dict) and value["#"] == "dict":
            holder, at = next(pair for pair in value["items"] if pair[0] == key), 1
        else:
            holder, at = (value["items"] if isinstance(value, dict) else value), key
    return holder, at


def changed(data: bytes, *keys: Any, to: Any) -> bytes:
    """Return the file with another value at a path of its state, and correct checksums."""
    content = members(data)
    head = json.loads(content["state.json"])
    holder, at = place_of(head, *keys)
    holder[at] = to(holder[at]) if callable(to) else to
    return zipped({**content, "state.json": json.dumps(head)})


def without(data: bytes, *keys: Any) -> bytes:
    def leave_out(holder: Any) -> Any:
        holder["items"] = [pair for pair in holder["items"] if pair[0] != keys[-1]]
        return holder

    return changed(data, *keys[:-1], to=leave_out)


# -- wrong contents -----------------------------------------------------------------------------------

MODEL, OPTIMIZER = ("models", 0, 0), ("optimizers", 0, 2)
WRONG: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a model too many": (("models",), lambda models: models * 2),
    "a model without its last variable": (("models", 0), lambda model: model[:-1]),
    "a weight that is a text": (MODEL, "text"),
    "a weight of another shape": (MODEL, lambda entry: {**entry, "shape": [16, 8]}),
    "two weights exchanged": (("models", 0), lambda model: [model[1], model[0], *model[2:]]),
    "a weight of another type": (MODEL, lambda entry: {**entry, "dtype": "float64"}),
    "a missing weight": (MODEL, lambda entry: {**entry, "at": 999}),
    "a weight with True as its position": (MODEL, lambda entry: {**entry, "at": True}),
    "a value of an unknown kind": (MODEL, {"#": "object", "items": []}),
    "an optimizer of fewer slots": (("optimizers", 0), lambda slots: slots[:-1]),
    "an optimizer's slot of another shape": (OPTIMIZER, lambda entry: {**entry, "shape": entry["shape"][::-1]}),
    "a learning rate that is a text": (("optimizers", 0, 1), "0.1"),
    "a global step that is a text": (("global_step",), "4"),
    "a negative global step": (("global_step",), -4),
    "a step that is a text": (("position", "step"), "4"),
    "a negative offset": (("position", "offset"), -4),
    "a position that is a list": (("validation_position",), [1]),
    "a dictionary with a list for a key": (("operator",), {"#": "dict", "items": [[[1], 2]]}),
    "a dictionary with one key twice": (("operator",), {"#": "dict", "items": [["a", 1], ["a", 2]]}),
    "a tuple of a number": (("operator",), {"#": "tuple", "items": 5}),
    "version 0": (("version",), 0),
    "a newer version": (("version",), 3),
}
