"""A state is the same on every way that it takes: kinds of tensors, what they share, and the versions of modules."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from raysgd import AutoCheckpoint, ElasticConfig, TorchTrainer, train
from tests.local.group import Cluster, Fault
from tests.torch.small import Line, inline

FLAT = torch.arange(12.0)


class Odd(nn.Module):
    """Doubles the weights of states that its first version has made: so a state that lost its version loads wrong weights."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.first.weight = nn.Parameter(torch.arange(4.0).view(2, 2).t())
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(2, 1)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("part", self.table[2:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.first(x)))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *more: Any) -> None:
        if metadata.get("version") != 2:
            state.update({name: 2 * value for name, value in state.items()})
        super()._load_from_state_dict(state, prefix, metadata, *more)


class Holding(Line):
    """Its own state holds what people keep beside their models."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(**self.loaders(config))
        self.changed, self.loaded = config.get("changed", 0.0), None  # type: float, Any
        with torch.no_grad():
            model.last.bias += self.changed
            model.table += self.changed

    def state_dict(self) -> dict[str, Any]:
        flat = FLAT + self.changed
        return {
            "flat": flat,
            "again": [flat],
            "view": flat[2:6].view(2, 2),
            "every second": flat[::2],
            "transposed": flat.view(3, 4).t(),
            "expanded": flat[:1].expand(3),
            "scalar": torch.tensor(3 + int(self.changed)),
            "empty": torch.zeros(0, 3),
            "half": flat.to(torch.bfloat16)[1:3],
            "complex": (complex_ := torch.tensor([1 + 2j])),
            "conjugated": complex_.conj(),
            "parameter": nn.Parameter(flat[:2].clone()),
            "numpy": numpy.arange(3, dtype=numpy.int16),
            ("a", 1): {"set": {1, 2}, "bytes": b"\0", "none": None, "nan": math.inf},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def looked(operator: Holding) -> dict[str, Any]:
    """Return what an operator has loaded."""
    if operator.loaded is None:
        operator.loaded = operator.state_dict()
    model: Any = operator.unwrapped(operator.model)
    assert model.tied.weight is model.first.weight
    assert model.part.data_ptr() == model.table[2:].data_ptr()
    own = operator.loaded
    own["flat"][0] += 1
    assert own["again"][0][0] == own["flat"][0], "one tensor at two places is still one"
    own["flat"][0] -= 1
    optimizer = operator.optimizer.state_dict()
    return copy.deepcopy({"own": own, "model": dict(model.state_dict()), "optimizer": optimizer})


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: each for key in value for name, each in flattened(value[key], f"{place}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {name: each for i, item in enumerate(value) for name, each in flattened(item, f"{place}/{i}").items()}
    return {place: value}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    mine, others = flattened(found), flattened(expected)
    assert mine.keys() == others.keys()
    for place, value in others.items():
        assert type(mine[place]) is type(value), place
        if isinstance(value, torch.Tensor):
            assert (mine[place].dtype, mine[place].shape) == (value.dtype, value.shape), place
            assert mine[place].requires_grad == value.requires_grad, place
            assert torch.equal(mine[place], value), place
        elif isinstance(value, numpy.ndarray):
            assert mine[place].dtype == value.dtype and numpy.array_equal(mine[place], value), place
        else:
            assert mine[place] == value, place


def made(**more: Any) -> TorchTrainer:
    return inline(Holding, config={"changed": 1.0, **more.pop("config", {})}, **more)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What an operator has in memory that was trained a little."""
    with made() as trainer:
        trainer.train(num_steps=2)
        return looked(trainer.get_local_operator())  # type: ignore[arg-type]


# -- the ways ----------------------------------------------------------------------------------------


def by_file(where: Callable[[Path], Any], **how: Any) -> Callable[[TorchTrainer, TorchTrainer, Path], None]:
    def way(saved: TorchTrainer, loaded: TorchTrainer, folder: Path) -> None:
        handle = saved.save(where(folder), **how)
        if how.get("blocking") is False:
            saved.train(num_steps=1)  # in the time of the save
            handle.result()
        loaded.load(where(folder), trusted=True)

    return way


def by_value(through: Callable[[dict[str, Any], Path], Any]) -> Callable[[TorchTrainer, TorchTrainer, Path], None]:
    def way(saved: TorchTrainer, loaded: TorchTrainer, folder: Path) -> None:
        loaded.load_state_dict(through(saved.state_dict(), folder))

    return way


def checkpoint_in(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    return train.Checkpoint(train.Checkpoint.from_dict(state).to_uri((folder / "c").as_uri()), trusted=True).to_dict()


WAYS: dict[str, Callable[[TorchTrainer, TorchTrainer, Path], None]] = {
    "file": by_file(lambda folder: folder / "a.pt"),
    "file, in the background": by_file(lambda folder: folder / "a.pt", blocking=False),
    "sharded": by_file(lambda folder: folder / "a", sharded=True),
    "sharded, in the background": by_file(lambda folder: folder / "a", sharded=True, blocking=False),
    "store": by_file(lambda folder: f"memory://{folder.name}/a.pt"),
    "store, in the background": by_file(lambda folder: f"memory://{folder.name}/b.pt", blocking=False),
    "store, sharded": by_file(lambda folder: f"memory://{folder.name}/c", sharded=True),
    "state": by_value(lambda state, folder: state),
    "checkpoint of a function": by_value(
        lambda state, folder: train.Checkpoint.from_bytes(
            train.Checkpoint.from_dict(state).to_bytes(), trusted=True
        ).to_dict()
    ),
    "stored checkpoint of a function": by_value(checkpoint_in),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_state_arrives_as_it_was(way: Any, tmp_path: Path, expected: dict[str, Any]) -> None:
    with made() as saved, made(config={"changed": 5.0}) as loaded:
        saved.train(num_steps=2)
        way(saved, loaded, tmp_path)
        assert_same(looked(loaded.get_local_operator()), expected)  # type: ignore[arg-type]


def test_an_automatic_checkpoint(tmp_path: Path, expected: dict[str, Any]) -> None:
    checkpoints = AutoCheckpoint(path=tmp_path, every=2, trusted=True)
    with made(checkpoints=checkpoints) as saved:
        for _ in saved.epochs(1):
            saved.train(num_steps=2)
    with made(config={"changed": 5.0}, checkpoints=checkpoints, resume="auto") as loaded:
        assert loaded.resumed_from is not None
        assert_same(looked(loaded.get_local_operator()), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("killed", [(1,), (0, 1)], ids=["from another worker", "from a snapshot"])
def test_a_new_worker(killed: tuple[int, ...], expected: dict[str, Any]) -> None:
    how: dict[str, Any] = {"num_workers": 2, "use_ray": True, "elastic": ElasticConfig(snapshot_every=1)}
    with Cluster([Fault("kill", "forward", rank=rank, step=2) for rank in killed]) as cluster, made(**how) as trainer:
        trainer.train(num_steps=2)
        trainer.resize(2)
        assert not cluster.left
        found = trainer.apply_all_operators(looked)
    assert_same(found[1], found[0])
    for rank in killed:
        assert_same(found[rank], {**expected, "optimizer": found[0]["optimizer"]})
