"""One rank of a run, in this process: without an engine, a process group or Ray.

    rank = torch_rank(Line, {"rows": 12}, rank=1, ranks=2, seed=7)     what follows `ranks` are a trainer's settings
    rank.train(1)
    rank.rejoin()                                                      the other one has left

A rank exchanges nothing with others. No other module of the tests makes replicas or their calls.
"""

import copy
import functools
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysgd import train
from raysgd.config import ElasticConfig
from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import FunctionReport, StartDealer
from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Interrupted
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.replica import evaluation
from raysgd.replica.calls import apply_operator
from raysgd.replica.loading import take_over
from raysgd.replica.replica_base import ReplicaBase
from raysgd.replica.settings import OperatorReplicaFactory
from raysgd.train.replica import STOP_SIGNAL, FunctionReplica
from raysgd.train.sessions import Attempt, Codec

__all__ = [
    "FunctionRank",
    "Interrupted",
    "OperatorRank",
    "Rank",
    "in_function",
    "operator_alone",
    "send_to_workers",
    "tf_rank",
    "torch_rank",
    "train_call",
]

NO_SNAPSHOTS = ElasticConfig(snapshot_every=None)


class Rank:
    """A replica, and what its worker sends to the driver.

    reports   the progress messages: (progress, partial result)
    uploads   the snapshots: (progress, content)
    looks     whether each look for an abort may rely on an earlier one
    """

    def __init__(self, factory: Callable[..., Any], rank: int = 0, ranks: int = 1, **numbers: int) -> None:
        self.reports: list[tuple[Progress, Any]] = []
        self.uploads: list[tuple[Progress, bytes]] = []
        self.looks: list[bool] = []
        self.on_report: Callable[[], Any] = lambda: None
        self.on_look: Callable[[], Any] = lambda: None
        self._rank_info = RankInfo(world_rank=rank, world_size=ranks, **numbers)
        self._control = Control(self._report)
        self._control.upload = lambda message, *data: self.uploads.append(
            (message.progress, b"".join(map(bytes, data)))
        )
        self._control.ensure_whole = self._ensure_whole
        self.replica = factory(self._rank_info, self._control)

    def _ensure_whole(self, *, unless_seen: bool = False) -> None:
        self.looks.append(unless_seen)
        self.on_look()

    def _report(self, progress: Progress, partial: Any) -> None:
        self.on_report()
        self.reports.append((progress, partial))

    @property
    def progress(self) -> Progress:
        progress: Progress = self.replica.progress
        return progress

    @property
    def phase(self) -> str:
        """Return what the worker says that it is doing."""
        return self._control.phase

    def partial(self) -> Any:
        return self.replica.partial()

    # -- the driver's requests

    def interrupt(self) -> None:
        """End the running call, as if a peer had failed."""
        self._control.interrupt()

    def clear(self) -> None:
        """Forget the requests, as a new generation does."""
        self._control.clear()

    def stop_at(self, step: int) -> None:
        """Ask for a stop at a batch boundary, to which all ranks have agreed."""
        assert self._control.propose(step)
        self._control.confirm()

    def rejoin(self, rank: int = 0, ranks: int = 1) -> None:
        """Begin a new generation."""
        self.clear()
        self._rank_info = RankInfo(world_rank=rank, world_size=ranks, generation=self._rank_info.generation + 1)
        self.replica.joined(self._rank_info)

    def outlive_driver(self) -> None:
        """Be a worker of a trainer with a name."""

    # -- state

    def pack_snapshots_when(self, ready: threading.Event) -> None:
        """Let the thread that packs and sends snapshots wait for this before it packs one."""
        copy_now = self.replica.copy

        def late(state: dict[str, Any]) -> Any:
            copied, size = copy_now(state)
            return _packed_when(copied, ready), size

        self.replica.copy = late

    def taken_over(self, make: Callable[[], Any]) -> Any:
        """Return the rank of another script, which continues in this process."""
        state = bytes(self.replica.state())
        rank = make()
        rank.replica.take_over(state)
        rank.rejoin(self._rank_info.world_rank, self._rank_info.world_size)
        return rank

    def state(self) -> bytes:
        """Return what another rank needs to continue."""
        return bytes(self.replica.state())

    def load(self, state: bytes) -> None:
        self.replica.load(state)

    def close(self) -> None:
        self.replica.close()


@contextmanager
def _packed_when(copied: Any, ready: threading.Event) -> Iterator[Any]:
    """Pack a snapshot later."""
    assert ready.wait(60)
    with copied as buffers:
        yield buffers


class OperatorRank(Rank):
    """Calls have numbers. A call with the number of the one before repeats that, or continues it.

    measured   what the last call has measured, with what users do not see
    """

    measured = Measured()

    @property
    def operator(self) -> Any:
        return self.replica.operator

    @property
    def data_names(self) -> dict[str, str]:
        """Return how `register_data` names the data of each phase."""
        names: dict[str, str] = self.replica.data_names
        return names

    def train(self, call: int = 1, num_steps: int | None = None, **more: Any) -> Any:
        """Train the rest of an epoch. Return its metrics, or `Interrupted`."""
        return self._metrics(ReplicaBase.train, call, num_steps, **more)

    def validate(self, call: int = 1, num_steps: int | None = None, **more: Any) -> Any:
        return self._metrics(evaluation.validate, call, num_steps, **more)

    def test(self, call: int = 1, num_steps: int | None = None) -> Any:
        return self._metrics(evaluation.test, call, num_steps)

    def _metrics(self, method: Callable[..., Any], call: int, num_steps: int | None, **more: Any) -> Any:
        found = self.replica.run(train_call(call, num_steps, method, **more))
        if not isinstance(found, Measured):
            return found
        self.measured = found
        return found.metrics

    def apply(self, function: Callable[[Any], Any]) -> Any:
        return self.replica.run(Call(apply_operator, {"function": function}))

    def checkpoint(self) -> dict[str, Any]:
        """Return what `save` would write."""
        state: dict[str, Any] = copy.deepcopy(self.replica.full_state())
        return state

    def resume(self, checkpoint: dict[str, Any]) -> "OperatorRank":
        """Load it, as the first `load` of a trainer does."""
        here = self._rank_info
        self.replica.joined(RankInfo())  # there is no process group, in which several ranks would agree
        take_over(self.replica, lambda: copy.deepcopy(checkpoint), 1)
        self.replica.joined(here)
        return self


def torch_rank(
    operator: type[Any], config: dict[str, Any] | None = None, rank: int = 0, ranks: int = 1, **settings: Any
) -> OperatorRank:
    """Return a rank of a TorchTrainer, which works alone and takes no snapshots unless its settings say otherwise."""
    from raysgd.torch.replica import TorchReplica
    from raysgd.torch.settings import TorchSettings

    given = TorchSettings(**{"num_workers": ranks, "alone": True, "elastic": NO_SNAPSHOTS, **settings})
    return OperatorRank(OperatorReplicaFactory(TorchReplica, operator, config or {}, given), rank, ranks)


def train_call(
    call: int, num_steps: int | None = None, method: Callable[..., Any] = ReplicaBase.train, **more: Any
) -> Call:
    """Return the call of a driver that trains the rest of an epoch, or another one with its arguments."""
    return Call(method, {"call": call, "num_steps": num_steps, "profile": False, "info": None, **more})


def send_to_workers(operator: type[Any], config: dict[str, Any]) -> None:
    """Pickle what a TorchTrainer sends to its workers."""
    from raysgd.torch.replica import TorchReplica
    from raysgd.torch.settings import TorchSettings
    from raysgd.workers.serialization import pack

    pack(OperatorReplicaFactory(TorchReplica, operator, config, TorchSettings()))


def operator_alone(operator: type[Any], config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return an operator for PyTorch that no replica trains."""
    from raysgd.torch.settings import TorchSettings

    return operator(config or {}, settings=TorchSettings(**{"alone": True, **settings}))


def tf_rank(
    operator: Any, config: dict[str, Any] | None = None, rank: int = 0, ranks: int = 1, **settings: Any
) -> OperatorRank:
    """Return a rank of a TFTrainer with this operator, or with a pair of creators, in a group of one: TensorFlow would wait for
    others, unless the test replaces the channel's collective."""
    from raysgd.replica.settings import ReplicaSettings
    from raysgd.tf.compiled import operator_from_creators
    from raysgd.tf.replica import TFReplica

    operator = operator_from_creators(*operator) if isinstance(operator, tuple) else operator
    given = ReplicaSettings(**{"elastic": NO_SNAPSHOTS, **settings})
    return OperatorRank(OperatorReplicaFactory(TFReplica, operator, config or {}, given), rank, ranks)


class FunctionRank(Rank):
    """A rank of a Trainer. `messages` is what the function has reported: (message, metrics, checkpoint). `codec` is how the backend
    encodes and decodes."""

    def __init__(self, rank: int = 0, ranks: int = 1, codec: dict[str, Any] | None = None, **numbers: int) -> None:
        self._handler = signal.getsignal(STOP_SIGNAL)
        super().__init__(functools.partial(FunctionReplica, Codec(**(codec or {})), None), rank, ranks, **numbers)
        self.messages: list[tuple[FunctionReport, dict[str, Any], dict[str, Any] | None]] = []
        self._control.deliver = self._deliver

    def _deliver(self, message: FunctionReport | StartDealer, body: Any) -> None:
        assert isinstance(message, FunctionReport)
        split = message.metrics_size
        payload = train.Checkpoint.from_bytes(body[split:], trusted=True).to_dict() if message.has_checkpoint else None
        self.messages.append((message, pickle.loads(body[:split]), payload))

    def run(
        self, function: Callable[..., Any], *arguments: Any, checkpoint: bytes | None = None, **attempt: Any
    ) -> Any:
        """Make one attempt to run the function. Return its result, or `Interrupted`."""
        given = {
            "task": (function, arguments),
            "attempt": Attempt(**{"run": 1, "number": 1, **attempt}),
            "checkpoint": None if checkpoint is None else Blob(checkpoint),
            "call": 1,
        }
        value = self.replica.run(Call(FunctionReplica.function, given))
        return pickle.loads(value) if isinstance(value, bytes) else value

    def committed(self) -> dict[str, Any]:
        """Return the values of the last commit of `train.elastic`."""
        content: dict[str, Any] = self.replica._commit.kept[0]
        return content

    def close(self) -> None:
        super().close()
        signal.signal(STOP_SIGNAL, self._handler)


def in_function(function: Callable[[], Any], there: FunctionRank | None = None, **numbers: int) -> Any:
    """Call it in a training function. Return its result without pickling."""
    results: list[Any] = []
    (there or FunctionRank(**numbers)).run(lambda: results.append(function()))
    return results[0]
