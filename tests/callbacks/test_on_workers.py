"""Two real workers: what the profiler brings from them, and what callbacks hear, and may do, when one is lost."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysgd import ElasticConfig, Recovery, TFTrainer
from raysgd.callbacks import Callback, TorchProfilerCallback
from tests.callbacks.listening import Broken, Heard
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


class StopsAtLosses(Callback):
    """When it is told to."""

    stops_training = True
    on = False

    def on_recovery(self, recovery: Recovery) -> None:
        if self.on and recovery.reason == "worker death":
            raise TimeoutError("rather not")


class Party(Ground):
    """A trainer with all its listeners."""

    def __init__(self, place: Path) -> None:
        self.heard, self.stops = Heard(), StopsAtLosses()
        self.profiler = TorchProfilerCallback(workers_to_log=1, wait=2, warmup=1, active=2)
        super().__init__(
            place / "marks",
            num_workers=2,
            elastic=ElasticConfig(grow=False, hang_timeout_s=60),
            callbacks=[Broken(), self.heard, self.stops, self.profiler],
            logdir=place / "logs",
        )


@pytest.fixture(scope="module")
def party(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Party]:
    made = Party(tmp_path_factory.mktemp("party"))
    yield made
    made.trainer.shutdown()


def test_traces_of_the_chosen_rank(party: Party) -> None:
    result = party.trainer.train()
    party.assert_epoch_exact()
    assert not [name for name in result if name.startswith("__")]
    assert set(party.heard.named("result")[-1].by_worker[1]) == set(result), "nobody else gets to see traces"
    (path,) = party.profiler.written
    assert path.parent == party.trainer.logdir / "pytorch_profiler"
    assert path.name.startswith("rank1.")
    assert path.name.endswith(".pt.trace.json"), "what TensorBoard's profiler looks for"
    events = json.loads(path.read_text())["traceEvents"]
    names = Counter(event.get("name", "") for event in events)
    steps = sorted({name for name in names if name.startswith("ProfilerStep#")})
    assert steps == ["ProfilerStep#3", "ProfilerStep#4"], "two batches, after two and one more"
    assert names["aten::addmm"] > 0
    party.trainer.train()
    assert len(party.profiler.written) == 1, "the first call only"
    party.trained()


def test_a_loss_is_told_and_a_broken_listener_changes_nothing(party: Party) -> None:
    party.arm(Fault(0, 5))
    before = len(party.heard.calls)
    party.trainer.train()
    assert party.fired() == 1
    party.assert_epoch_exact()
    told = [(name, what) for name, what in party.heard.calls[before:] if name != "progress"]
    assert [name for name, _ in told] == ["recovery", "result"]
    recovery, result = told[0][1], told[1][1]
    assert recovery == party.trainer.recoveries[-1]
    assert (recovery.reason, recovery.lost_ranks) == ("worker death", (0,))
    assert result.world_size == 1
    assert "1 of 2 workers" in repr(party.trainer)


def test_a_listener_may_stop_training_at_a_loss(party: Party) -> None:
    """The call ends after the recovery, not in it: the trainer goes on with the rest of the epoch when asked."""
    party.whole_again(2)
    party.trained()
    party.arm(Fault(1, 5))
    party.stops.on = True
    with pytest.raises(TimeoutError, match="rather not"):
        party.trainer.train()
    party.stops.on = False
    assert party.fired() == 1
    assert isinstance(party.heard.named("error")[-1], TimeoutError)
    party.trainer.train()
    seen = party.trained()
    assert set(seen) == set(range(party.samples))
    assert set(seen.values()) <= {1, 2}, "an epoch, or the rest of one and the next"


def test_tensorflow_takes_no_torch_profiler() -> None:
    pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match="cannot profile TensorFlow"):
        TFTrainer(lambda config: None, lambda config: None, callbacks=[TorchProfilerCallback()])
