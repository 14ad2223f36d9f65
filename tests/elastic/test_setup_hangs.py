"""A setup that does not end is reported with its limit, rank, node and stack, and is not tried again. tests/local/test_calls.py has
that of a replacement worker, which does not stop the others."""

import ctypes
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig, WorkerStartError
from raysgd.torch import TorchTrainer
from raysgd.train import Trainer
from tests.torch.small import Line

pytestmark = pytest.mark.elastic

SHORT_S = 8.0
SHORT = ElasticConfig(hang_timeout_s=SHORT_S)


def note(folder: str, what: str) -> None:
    (Path(folder) / f"{what}-{uuid.uuid4().hex[:8]}").touch()


def noted(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


def never_ends() -> None:
    time.sleep(3600)


def holds_the_interpreter() -> None:
    """Hold Python's lock, like native code that does not release it."""
    ctypes.PyDLL(None).sleep(3600)


class Stuck(Line):
    """Its setup does not end on rank 1."""

    def setup(self, config: dict[str, Any]) -> None:
        note(config["notes"], f"rank{self.world_rank}")
        if self.world_rank == 1:
            config["wait"]()
        torch.distributed.barrier()


class Unpickled:
    """Unpickling it never ends, as for a class whose module cannot be imported to the end."""

    def __reduce__(self) -> Any:
        return never_ends, ()


def start(notes: Path, limit_s: float = SHORT_S, **arguments: Any) -> str:
    """Return the error of a trainer that cannot start."""
    config = {"notes": str(notes), **arguments.pop("config", {})}
    given: dict[str, Any] = {"training_operator_cls": Line, "num_workers": 2, "timeout_s": limit_s, "elastic": SHORT}
    began = time.monotonic()
    with pytest.raises(WorkerStartError) as caught:
        TorchTrainer(**{**given, **arguments}, config=config)
    assert time.monotonic() - began > SHORT_S
    return str(caught.value)


def check(text: str, function: str, *, rank: int = 1, limit_s: float = SHORT_S) -> None:
    assert f"rank {rank} on node " in text and f"within {limit_s:g} s" in text, text
    assert f"{function}" in text and Path(__file__).name in text, f"the stack of the user's code: {text}"
    assert (
        "increase timeout_s (of training functions, ElasticConfig(hang_timeout_s=...))" in text
        and "did not try again" in text
    ), text
    assert "actor.py" not in text and "replica_host.py" not in text, f"our own frames are left out: {text}"


def test_a_hang_in_setup_of_one_rank(ray_cluster: None, tmp_path: Path) -> None:
    text = start(tmp_path, training_operator_cls=Stuck, config={"wait": never_ends})
    check(text, "never_ends")
    assert "rank 0" not in text, "the rank that only waited for it is not named"
    assert (noted(tmp_path, "rank0"), noted(tmp_path, "rank1")) == (1, 1), "it was tried twice"


@pytest.mark.more
def test_a_hang_in_setup_that_holds_the_interpreter(ray_cluster: None, tmp_path: Path) -> None:
    text = start(tmp_path, 60.0, training_operator_cls=Stuck, config={"wait": holds_the_interpreter})
    assert "rank 1 on node " in text and "has not answered" in text and "interpreter lock" in text, text
    assert "more time, increase ElasticConfig(hang_timeout_s=...)" in text, f"timeout_s does not limit this: {text}"
    assert noted(tmp_path, "rank1") == 1


@pytest.mark.more
def test_a_hang_in_the_initialization_hook(ray_cluster: None, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def hook() -> None:
        note(folder, "hook")
        never_ends()

    text = start(tmp_path, initialization_hook=hook)
    check(text, "never_ends", rank=0)
    check(text, "never_ends", rank=1)
    assert "the initialization hook" in text and noted(tmp_path, "hook") == 2


@pytest.mark.more
def test_a_hang_while_the_class_is_imported(ray_cluster: None, tmp_path: Path) -> None:
    check(start(tmp_path, config={"value": Unpickled()}), "never_ends")


class Remote:
    def __init__(self) -> None:
        never_ends()


@pytest.mark.parametrize(
    "given", [{"initialization_hook": never_ends}, pytest.param({"train_cls": Remote}, marks=pytest.mark.nightly)]
)
def test_a_hang_in_the_setup_of_functions(ray_cluster: None, tmp_path: Path, given: Any) -> None:
    trainer = Trainer("torch", num_workers=1, logdir=tmp_path, elastic=SHORT)
    with pytest.raises(WorkerStartError) as caught:
        trainer.start(**given)
    check(str(caught.value), "never_ends", rank=0)
