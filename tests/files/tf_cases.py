"""A TFTrainer that files are tried on, which detects every change, and files that are wrong in many ways."""

import copy
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd import CheckpointError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.files.damage import Tally  # noqa: E402
from tests.tf.small import Small  # noqa: E402

VOLATILE = ("loads", "call", "call_done")


class Stateful(Small):
    """An operator with its own state, which it loads without checking it first, as users do."""

    fails_on, once = -1, True  # of the class, because a load that is undone restores attributes of the operator

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.best, self.seen = 0.5, [1, 2]

    def state_dict(self) -> Any:
        return {"best": self.best, "seen": self.seen, "table": np.arange(4), "half": tf.constant([1.5], tf.bfloat16)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen.append(state_dict["seen"][0])  # changed only in part if the next line fails
        if self.fails_on == self.world_rank:
            type(self).fails_on = -1 if self.once else self.fails_on
            raise ZeroDivisionError("planned")
        self.best = float(state_dict["best"])
        self.seen = list(state_dict["seen"])


def plain(value: Any) -> Any:
    """Return a value that can be compared."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, (np.ndarray, np.generic)) else value


def of(trainer: TFTrainer) -> Any:
    """Return the complete state of the trainer."""
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

    def attempt(self, tally: Tally, what: str, data: bytes) -> None:
        self.path.write_bytes(data)
        rejected = tally.rejected
        tally.attempt(what, self.load, lambda found: saved_part(found) == self.saved, "saved.ckpt")
        found = of(self.trainer)
        if tally.rejected > rejected and found != self.now:
            tally.silent.append(f"{what}: it was refused, and the trainer is another one")
        self.now = found

    def load(self) -> Any:
        self.trainer.load(self.path)
        return of(self.trainer)

    def refuses(self, what: str, data: bytes, *, says: str = "") -> str:
        tally = Tally(what)
        self.attempt(tally, what, data)
        tally.check()
        assert tally.rejected == 1, f"{what}: it was loaded"
        try:
            self.load()
        except CheckpointError as error:
            assert says in str(error)
            return str(error)
        raise AssertionError("unreachable")


# -- hand-made files ---------------------------------------------------------------------------------


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: Any, how: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, content)
    return buffer.getvalue()


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
    members = members_of(data)
    head = json.loads(members["state.json"])
    holder, at = place_of(head, *keys)
    holder[at] = to(holder[at]) if callable(to) else to
    return zipped({**members, "state.json": json.dumps(head)})


def without(data: bytes, *keys: Any) -> bytes:
    def leave_out(holder: Any) -> Any:
        holder["items"] = [pair for pair in holder["items"] if pair[0] != keys[-1]]
        return holder

    return changed(data, *keys[:-1], to=leave_out)


def with_array(data: bytes, name: str, content: bytes) -> bytes:
    return zipped({**members_of(data), name: content})


def npy(header: str | bytes, payload: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + payload


def array_bytes(array: Any, **given: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), **given)
    return buffer.getvalue()


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
    "an operator's state without a part": (("operator",), {"#": "dict", "items": [["seen", [1]]]}),
    "a dictionary with a list for a key": (("operator",), {"#": "dict", "items": [[[1], 2]]}),
    "a dictionary with one key twice": (("operator",), {"#": "dict", "items": [["a", 1], ["a", 2]]}),
    "a tuple of a number": (("operator",), {"#": "tuple", "items": 5}),
    "version 0": (("version",), 0),
    "a newer version": (("version",), 3),
}


# -- hostile archives ---------------------------------------------------------------------------------

HUGE = "{'descr': '<f8', 'fortran_order': False, 'shape': (100000, 500000), }"
FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 16), }"


class Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code of the file was run",)


def hostile(data: bytes) -> dict[str, bytes]:
    return {**hostile_arrays(data), **hostile_archives(data)}


def hostile_arrays(data: bytes) -> dict[str, bytes]:
    first = members_of(data)["0.npy"]
    first_data = first[-8 * 16 * 4 :]
    objects = array_bytes(np.array([Evil()], dtype=object), allow_pickle=True)
    return {
        "an array of 373 GiB": with_array(data, "0.npy", npy(HUGE)),
        "an array of more than there is": with_array(data, "0.npy", npy(FLOATS.replace("8,", "9,"), first_data)),
        "an array of a negative size": with_array(
            data, "0.npy", npy(FLOATS.replace("(8, 16)", "(-8, -16)"), first_data)
        ),
        "an array of objects": with_array(data, "0.npy", objects),
        "an array of objects, by its header": with_array(data, "0.npy", npy(FLOATS.replace("<f4", "|O"), first_data)),
        "an array with a deep header": with_array(data, "0.npy", npy("(" * 9000)),
        "an array with code for a header": with_array(data, "0.npy", npy("__import__('os').abort()")),
        "a pickle": with_array(data, "0.npy", pickle.dumps([1])),
    }


def hostile_archives(data: bytes) -> dict[str, bytes]:
    members = members_of(data)
    method = bytearray(zipped(members))
    method[method.index(b"PK\x01\x02") + 10] = 99
    return {
        "deflated": zipped(members, zipfile.ZIP_DEFLATED),
        "a member too many": zipped({**members, "evil": b"1"}),
        "no state": zipped({name: each for name, each in members.items() if name != "state.json"}),
        "two arrays of one name": zipped([*members.items(), ("0.npy", members["0.npy"])]),
        "state: empty": zipped({**members, "state.json": b""}),
        "state: a list": zipped({**members, "state.json": b"[]"}),
        "state: nested": zipped({**members, "state.json": b"[" * 1_000_000}),
        "state: nested a little too deep": changed(data, "operator", to=json.loads("[" * 150 + "]" * 150)),
        "state: a number of many digits": zipped({**members, "state.json": b'{"#": ' + b"9" * 100_000 + b"}"}),
        "state: no text": zipped({**members, "state.json": b"\xff\xfe\x00"}),
        "an unknown compression": bytes(method),
        "no zip": b"PK\x03\x04" + bytes(500),
        "nothing": b"",
        "a pickled object": pickle.dumps({"models": [], "format": "raysgd-tensorflow"}),
    }
