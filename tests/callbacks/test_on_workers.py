"""Callbacks with two real workers: the profiler's traces, and what happens when a worker fails."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysgd
from raysgd import ElasticConfig, Recovery
from raysgd.callbacks import Callback, TorchProfilerCallback
from tests.callbacks.recording import Broken, Heard
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


class StopsAtFailures(Callback):
    """Stops training after a worker failure, if it is switched on."""

    stops_training = True
    on = False

    def on_recovery(self, recovery: Recovery) -> None:
        if self.on and recovery.reason == "worker death":
            raise TimeoutError("rather not")


class Callbacks(Ground):
    """A trainer with several callbacks."""

    def __init__(self, place: Path) -> None:
        self.heard, self.stops = Heard(), StopsAtFailures()
        self.profiler = TorchProfilerCallback(workers_to_log=1, wait=2, warmup=1, active=2)
        super().__init__(
            place / "marks",
            num_workers=2,
            elastic=ElasticConfig(grow=False, hang_timeout_s=60),
            callbacks=[Broken(), self.heard, self.stops, self.profiler],
            logdir=place / "logs",
        )


@pytest.fixture(scope="module")
def callbacks(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callbacks]:
    made = Callbacks(tmp_path_factory.mktemp("callbacks"))
    yield made
    made.trainer.shutdown()


def test_traces_of_the_chosen_rank(callbacks: Callbacks) -> None:
    result = callbacks.trainer.train()
    callbacks.assert_epoch_exact()
    assert not [name for name in result if name.startswith("__")]
    measured = set(result) - {"callback_errors"}  # a broken callback is among them
    assert set(callbacks.heard.named("result")[-1].by_worker[1]) == measured, "traces are not part of results"
    (path,) = callbacks.profiler.written
    assert path.parent == callbacks.trainer.logdir / "pytorch_profiler"
    assert path.name.startswith("rank1.")
    assert path.name.endswith(".pt.trace.json"), "the name that TensorBoard expects"
    events = json.loads(path.read_text())["traceEvents"]
    names = Counter(event.get("name", "") for event in events)
    steps = sorted({name for name in names if name.startswith("ProfilerStep#")})
    assert steps == ["ProfilerStep#3", "ProfilerStep#4"], "two batches, after wait=2 and warmup=1"
    assert names["aten::addmm"] > 0
    callbacks.trainer.train()
    assert len(callbacks.profiler.written) == 1, "only the first call is profiled"
    callbacks.trained()


def test_a_failure_is_reported_and_a_broken_callback_changes_nothing(callbacks: Callbacks) -> None:
    callbacks.arm(Fault(0, 5))
    before = len(callbacks.heard.calls)
    callbacks.trainer.train()
    assert callbacks.fired() == 1
    callbacks.assert_epoch_exact()
    calls = [(name, what) for name, what in callbacks.heard.calls[before:] if name != "progress"]
    assert [name for name, _ in calls] == ["recovery", "result"]
    recovery, result = calls[0][1], calls[1][1]
    assert recovery == callbacks.trainer.recoveries[-1]
    assert (recovery.reason, recovery.removed_ranks) == ("worker death", (0,))
    assert result.world_size == 1
    assert "1 of 2 workers" in repr(callbacks.trainer)


def test_a_callback_may_stop_training_after_a_failure(callbacks: Callbacks) -> None:
    """The call ends after the recovery, and not during it. The next call continues with the rest of the epoch."""
    callbacks.whole_again(2)
    callbacks.trained()
    callbacks.arm(Fault(1, 5))
    callbacks.stops.on = True
    with pytest.raises(TimeoutError, match="rather not"):
        callbacks.trainer.train()
    callbacks.stops.on = False
    assert callbacks.fired() == 1
    assert isinstance(callbacks.heard.named("error")[-1], TimeoutError)
    callbacks.trainer.train()
    seen = callbacks.trained()
    assert set(seen) == set(range(callbacks.samples))
    assert set(seen.values()) <= {1, 2}, "one epoch, or the rest of one and the next"


def test_tensorflow_refuses_the_torch_profiler() -> None:
    pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match="work with PyTorch only"):
        raysgd.TFTrainer(lambda config: None, lambda config: None, callbacks=[TorchProfilerCallback()])
