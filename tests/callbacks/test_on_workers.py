"""Callbacks with several workers: the traces of two real ones, and what happens when a simulated one fails."""

import json
from collections import Counter
from pathlib import Path

import pytest

from raysgd import ElasticConfig, Recovery, TorchTrainer
from raysgd.callbacks import Callback, TorchProfilerCallback
from tests.callbacks.recording import Broken, Heard
from tests.faults import LedgerOperator
from tests.local.ground import Fault, LocalGround
from tests.local.group import Cluster


def test_traces_of_the_chosen_rank(ray_cluster: None, tmp_path: Path) -> None:
    heard, profiler = Heard(), TorchProfilerCallback(workers_to_log=1, wait=1, warmup=1, active=2)
    with TorchTrainer(
        training_operator_cls=LedgerOperator, num_workers=2, use_gpu=False, callbacks=[heard, profiler], logdir=tmp_path
    ) as trainer:
        returned = trainer.train()
        (path,) = profiler.written
        trainer.train()
        assert len(profiler.written) == 1, "only the first call is profiled"
    assert not [name for name in returned if name.startswith("__")]
    assert set(heard.named("result")[0].by_worker[1]) == set(returned), "traces are not part of results"
    assert path.parent == tmp_path / "pytorch_profiler"
    assert path.name.startswith("rank1.")
    assert path.name.endswith(".pt.trace.json"), "the name that TensorBoard expects"
    names = Counter(event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])
    steps = sorted({name for name in names if name.startswith("ProfilerStep#")})
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"], "two batches, after wait=1 and warmup=1"
    assert names["aten::addmm"] > 0


class StopsAtFailures(Callback):
    stops_training = True

    def on_recovery(self, recovery: Recovery) -> None:
        raise TimeoutError("rather not")


def ground_of(place: Path, *callbacks: Callback) -> LocalGround:
    return LocalGround(place, num_workers=2, elastic=ElasticConfig(grow=False), callbacks=list(callbacks))


def test_a_failure_is_reported_and_a_broken_callback_changes_nothing(tmp_path: Path) -> None:
    heard = Heard()
    with Cluster():
        ground = ground_of(tmp_path, Broken(), heard)
        ground.arm(Fault(0, 5))
        ground.trainer.train()
        assert ground.fired() == 1
        ground.assert_epoch_exact()
        (failure,) = ground.trainer.recoveries
        assert "1 of 2 workers" in repr(ground.trainer)
        ground.trainer.shutdown()
    assert heard.order == ["start", "recovery", "result", "end"]
    assert heard.named("recovery") == [failure]
    assert (failure.reason, failure.removed_ranks) == ("worker death", (0,))
    assert heard.named("result")[0].world_size == 1


def test_a_callback_may_stop_training_after_a_failure(tmp_path: Path) -> None:
    """The call ends after the recovery, and not during it. The next call continues with the rest of the epoch."""
    heard = Heard()
    with Cluster():
        ground = ground_of(tmp_path, heard, StopsAtFailures())
        ground.arm(Fault(1, 5))
        with pytest.raises(TimeoutError, match="rather not"):
            ground.trainer.train()
        assert ground.fired() == 1
        ground.trainer.train()
        ground.assert_epoch_exact()
        ground.trainer.shutdown()
    assert heard.order == ["start", "recovery", "error", "result", "end"]
