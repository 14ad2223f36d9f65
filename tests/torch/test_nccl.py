"""What raysgd decides about NCCL, without one: `tests/emulated` shows that it works."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TrainingOptions
from raysgd.core.ranks import RankInfo
from raysgd.environment import NCCL_ANYWHERE
from raysgd.torch import TrainingOperator, foreign
from raysgd.torch.group import nccl
from raysgd.torch.group.process_group import TorchBackend, name_for
from tests.replicas import Interrupted, OperatorRank, torch_rank


@pytest.mark.parametrize(
    ("asked", "gpus", "name"),
    [
        (None, 0, "gloo"),
        (None, 0.5, "gloo"),
        (None, 1, "nccl"),
        (None, 2, "nccl"),
        ("gloo", 1, "gloo"),
        ("nccl", 1, "nccl"),
    ],
)
def test_nccl_is_chosen_where_each_worker_has_a_gpu(asked: str | None, gpus: float, name: str) -> None:
    assert name_for(asked, gpus) == name


@pytest.mark.parametrize(("gpus", "has"), [(0, "no GPU"), (0.5, "0.5 of a GPU")])
def test_nccl_without_a_gpu_of_its_own_is_refused(gpus: float, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"and a worker has {has}: pass use_gpu=True"):
        name_for("nccl", gpus)
    monkeypatch.setenv(NCCL_ANYWHERE, "1")
    assert name_for("nccl", gpus) == "nccl"


def test_torchs_variables_are_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl.VARIABLES:
        monkeypatch.setenv(name, "1")
    nccl.set_variables()
    assert {name: nccl.os.environ[name] for name in nccl.VARIABLES} == nccl.VARIABLES


class Group:
    """A process group that counts its aborts, and that ends one when it may."""

    def __init__(self) -> None:
        self.aborts, self.may_end = 0, threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.may_end.wait()


def test_groups_are_aborted_once_and_the_control_thread_does_not_wait() -> None:
    group, ending = Group(), nccl.Abort()
    ending.wait()  # nothing was begun
    ending.begin([group], limit_s=60.0)
    ending.begin([group], limit_s=60.0)
    group.may_end.set()
    ending.wait()
    assert group.aborts == 1


def test_groups_are_aborted_at_once_because_the_end_of_one_waits_for_the_calls_of_all() -> None:
    together, ended = threading.Barrier(3), list[int]()

    class Waiting:
        def abort(self) -> None:
            ended.append(together.wait(10))

    nccl.abort_groups([Waiting() for _ in range(3)])
    assert sorted(ended) == [0, 1, 2]


def test_an_abort_while_a_group_forms_also_ends_connections_that_open_later(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, listener = TorchBackend("nccl"), socket.create_server(("127.0.0.1", 0))
    begun, aborted = threading.Event(), threading.Event()

    def form(**arguments: Any) -> None:
        begun.set()
        aborted.wait()
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            assert not connection.recv(1)
        raise dist.DistBackendError("the connection has ended")

    def abort() -> None:
        begun.wait()
        backend.abort()
        aborted.set()

    monkeypatch.setattr(nccl, "form", form)
    monkeypatch.setattr(nccl, "set_variables", lambda: None)
    threading.Thread(target=abort).start()
    with listener, pytest.raises(dist.DistBackendError, match="has ended"):
        backend.join(RankInfo(solo=True), {})


STUCK = """
import threading
from raysgd.torch.group import nccl
from tests.torch.test_nccl import Group

ending = nccl.Abort()
ending.begin([Group()], limit_s=0.1)
ending.wait()
"""


def test_a_process_whose_abort_does_not_end_ends_itself() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert ended.returncode == nccl.STUCK and "This process ends now" in ended.stderr


def backend_with(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[TorchBackend, list[int], Callable[[int], None]]:
    """Return a backend in a generation of so many ranks, the waits for the device, and a way to make calls."""
    backend, waits, made = TorchBackend("nccl"), list[int](), [0]
    backend._rank_info = RankInfo(world_size=ranks)
    monkeypatch.setattr(nccl, "wait_for_device", lambda: waits.append(made[0]))
    monkeypatch.setattr(foreign, "calls_made", lambda: made[0])
    return backend, waits, lambda count: made.__setitem__(0, made[0] + count)


def test_a_look_waits_for_the_device_and_then_for_nothing_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, waits, call = backend_with(monkeypatch, 2)
    call(1)
    backend.ensure_whole()
    backend.ensure_whole(unless_seen=True)
    assert waits == [1]
    call(1)
    backend.ensure_whole(unless_seen=True)
    backend.ensure_whole()
    assert waits == [1, 2, 2]


def test_after_an_abort_nothing_is_whole_but_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, waits, call = backend_with(monkeypatch, 2)
    call(1)
    backend.ensure_whole()
    backend.abort()
    backend.ensure_whole(unless_seen=True)
    call(1)
    with pytest.raises(dist.DistBackendError):
        backend.ensure_whole(unless_seen=True)
    backend.leave()
    backend.ensure_whole()
    alone, waits, _ = backend_with(monkeypatch, 1)
    alone.abort()
    alone.ensure_whole()
    assert waits == []


# -- steps --------------------------------------------------------------------------------------------


class Line(TrainingOperator):
    """`config["makes"]` is how it makes its step."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        kind = torch.optim.LBFGS if config.get("makes") == "closure" else torch.optim.SGD
        optimizers: Any = kind(model.parameters(), lr=0.1)
        if config.get("makes") == "two":
            optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizers, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        makes = self.config.get("makes", "")
        if not makes:
            return super().train_batch(batch, batch_info)
        self.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        if makes == "closure":
            self.optimizer.step(lambda: self._loss(batch))
        elif makes == "two":
            for each in self.optimizer:
                each.step()
        elif makes == "direct":
            self.optimizer.step()
        return {"train_loss": loss.detach()}

    def _loss(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        return loss


def rank_with(makes: str = "", **settings: Any) -> OperatorRank:
    given = {"alone": False, "wrap_ddp": False, "asynchronous": True, **settings}
    return torch_rank(Line, {"makes": makes}, ranks=2, **given)


def weights(rank: OperatorRank) -> list[float]:
    return [float(each) for p in rank.operator.unwrapped().parameters() for each in p.detach().flatten()]


@pytest.mark.parametrize(("makes", "waits"), {"": 1, "direct": 1, "two": 2, "none": 0}.items())
def test_each_step_looks_once_before_an_optimizer_acts(makes: str, waits: int) -> None:
    rank = rank_with(makes)
    rank.train(1, num_steps=1)
    rank.looks.clear()
    rank.train(2, num_steps=1)
    assert rank.looks.count(False) == waits + 1, "and when the call ends"
    assert rank.looks[-2:] == [True, False], "again at the commit, if calls were made since"


def test_a_closure_computes_gradients_again_and_each_time_they_are_looked_at() -> None:
    rank = rank_with("closure")
    rank.train(1, num_steps=1)
    assert rank.looks.count(False) > 2


BROKEN = [
    *((makes, {}) for makes in ("", "direct", "two", "none")),
    *(("", options) for options in ({"clip_norm": 0.1}, {"on_nonfinite": "skip"}, {"accumulate": 2})),
]


@pytest.mark.parametrize(("makes", "options"), BROKEN, ids=str)
def test_a_step_with_broken_gradients_changes_nothing(makes: str, options: dict[str, Any]) -> None:
    rank = rank_with(makes, options=TrainingOptions(**options))
    rank.train(1, num_steps=1)
    before = weights(rank), rank.progress.step, rank.progress.applied

    def cut() -> None:
        raise dist.DistBackendError("a part may be missing")

    rank.on_look = cut
    with pytest.raises(dist.DistBackendError):
        rank.train(2, num_steps=1)
    assert (weights(rank), rank.progress.step, rank.progress.applied) == before
    rank.on_look = lambda: None
    rank.rejoin(ranks=2)
    assert not isinstance(rank.train(2, num_steps=1), Interrupted) and rank.progress.step == before[1] + 1


def test_gloo_registers_nothing() -> None:
    rank = rank_with(asynchronous=False)
    rank.train(1, num_steps=2)
    assert rank.looks == [False, False], "when the epoch begins, and when the call ends"
    assert not any("whole" in type(each).__name__.lower() for each in rank.operator._internals.policies.every)


class Duck(TrainingOperator):
    """Its optimizer is not torch's."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Linear(2, 1)

        class Plain:
            param_groups = torch.optim.SGD(model.parameters(), lr=0.1).param_groups

            def step(self) -> None: ...
            def zero_grad(self) -> None: ...
            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        self.register(models=model, optimizers=Plain())


def test_an_optimizer_that_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a Plain, which has no register_step_pre_hook.*or pass backend='gloo'"):
        torch_rank(Duck, {}, ranks=2, alone=False, wrap_ddp=False, asynchronous=True)
