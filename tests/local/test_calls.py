"""What calls return, raise and note when ranks fail, raise errors, leave and join."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, CheckpointError, ElasticConfig, TorchTrainer, TrainingFailedError, WorkerStartError
from raysgd.torch import TrainingOperator
from tests.faults import LedgerOperator, Numbered
from tests.local.ground import Fault, LocalGround
from tests.local.group import Cluster
from tests.local.group import Fault as Hit

Make = Callable[..., LocalGround]


def reasons(ground: LocalGround) -> list[str]:
    return [each.reason for each in ground.trainer.recoveries]


def epochs(ground: LocalGround, count: int = 4) -> None:
    """Train epochs, in which workers have the time to join and to leave."""
    for _ in range(count):
        assert ground.trainer.train()["num_samples"] == ground.samples
        ground.assert_epoch_exact()


# -- failures -----------------------------------------------------------------------------------------


def test_num_steps_count_each_batch_once(make: Make) -> None:
    ground = make()
    ground.trainer.train(num_steps=3)
    ground.arm(Fault(1, 4))
    assert ground.trainer.train(num_steps=10)["batch_count"] == 10
    ground.trainer.train()
    ground.assert_epoch_exact()
    assert reasons(ground) == ["worker death"]


def test_more_failures_than_max_retries_raise_an_error_that_lists_them(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ground = make()
    ground.arm(Fault(0, 3), Fault(1, 8))
    with pytest.raises(TrainingFailedError, match=r"max_retries=1.*(?s:.*)worker death in epoch \d+, batch \d+"):
        ground.trainer.train(max_retries=1)
    assert caplog.messages[-1] == "worker death: the call ends with an error; 1 worker is left (2 before)"
    assert ground.trainer.recoveries[-1].world_size_after == ground.trainer.world_size == 1
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_as_many_failures_as_max_retries_are_allowed(make: Make) -> None:
    ground = make()
    ground.arm(Fault(0, 3))
    ground.trainer.train(max_retries=1)
    ground.assert_epoch_exact()
    ground.arm(Fault(0, 3))
    with pytest.raises(TrainingFailedError, match="max_retries=0"):
        ground.trainer.train(max_retries=0)
    ground.trainer.train()
    ground.assert_epoch_exact()


class Poisoned(LedgerOperator):
    """One sample kills each process that trains on it, like a crash in native code."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if 17 in batch[0].tolist() and self.global_step > 2:
            Cluster.running.hit("kill")
        return super().train_batch(batch, batch_info)


def test_a_crash_that_repeats_names_its_batch(make: Make) -> None:
    ground = make(operator=Poisoned)
    with pytest.raises(TrainingFailedError, match="max_retries=2") as caught:
        for _ in range(2):  # in the first epoch, the sample may be in one of the first batches
            ground.trainer.train(max_retries=2)
    places = [line for line in str(caught.value).splitlines() if "worker death in epoch" in line]
    assert len(places) == 3, "the same sample each time; its batch moves a little as fewer ranks share the epoch"
    assert len({line.split(",")[0].split("worker death")[1] for line in places}) == 1


# -- errors of the user's code ------------------------------------------------------------------------


def test_all_ranks_raise_at_once(make: Make) -> None:
    ground = make()
    ground.arm(*(Fault(rank, 2, "raise") for rank in range(3)))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.train()
    ground.arm()  # a rank that another rank's error interrupted has not raised its own
    ground.trainer.train()
    ground.assert_epoch_exact()
    assert reasons(ground) == []


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0)])
def test_a_user_error_and_a_failure_at_once_raise_the_user_error(make: Make, ranks: Sequence[int]) -> None:
    ground = make()
    ground.arm(Fault(ranks[0], 4, "raise"), Fault(ranks[1], 4, "kill"))
    with pytest.raises(ZeroDivisionError) as caught:
        ground.trainer.train()
    assert vars(caught.value)["raysgd_rank"] == ranks[0]
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_an_error_in_validation(make: Make) -> None:
    # One peer has finished its part by then; the other one is interrupted in the middle of it.
    ground = make()
    ground.arm(Fault(1, 1, "raise", "validate"), Fault(0, 1, "sleep", "validate", seconds=1.0))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.validate()
    assert ground.trainer.validate()["num_samples"] == 50
    assert reasons(ground) == []


# -- no worker is left --------------------------------------------------------------------------------


class Computing(LedgerOperator):
    """Its batches need time, also on one worker, which exchanges nothing."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.here.compute()
        return super().train_batch(batch, batch_info)


def alone(make: Make, **elastic: Any) -> LocalGround:
    return make(num_workers=1, operator=Computing, elastic={"grow": True, **elastic})


@pytest.mark.parametrize(("every", "most"), [(10, 12), (1, 3)])
def test_with_frequent_snapshots_few_batches_are_repeated(make: Make, every: int, most: int) -> None:
    ground = alone(make, snapshot_every=every)
    ground.arm(Fault(0, 28))
    epochs(ground, 1)
    (failure,) = ground.trainer.recoveries
    assert failure.batches_redone <= most and not failure.in_place


def test_metrics_from_before_the_snapshot_count(make: Make) -> None:
    """One worker fails, and then the other: the snapshot's count begins at the first failure."""
    ground = make(num_workers=2, elastic={"snapshot_every": 5})
    ground.arm(Fault(1, 9), Fault(0, 25))
    result = ground.trainer.train()
    ground.assert_epoch_exact()
    assert [recovery.in_place for recovery in ground.trainer.recoveries] == [True, False]
    steps = ground.trainer.apply_all_operators(lambda operator: operator.global_step)[0]
    assert (result["num_samples"], result["batch_count"]) == (240, steps)


class Usual(TrainingOperator):
    """Has the default methods."""

    def setup(self, config: dict[str, Any]) -> None:
        model, x = torch.nn.Linear(2, 1), torch.ones(30, 2)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=2, shuffle=True))


def test_a_snapshot_counts_the_samples_of_ranks_with_unequal_shares() -> None:
    """Of three parts, rank 0 computes two."""
    faults = [Hit("kill", "forward", rank=rank, step=4) for rank in (0, 1)]
    elastic = ElasticConfig(hang_timeout_s=60, snapshot_every=1)
    with (
        Cluster(faults) as cluster,
        TorchTrainer(training_operator_cls=Usual, num_workers=3, use_gpu=False, elastic=elastic) as trainer,
    ):
        trainer.resize(2)
        assert trainer.train()["num_samples"] == 30
        assert not cluster.left and not trainer.recoveries[-1].in_place


def test_without_snapshots_training_starts_over(make: Make) -> None:
    """Each call trains again what it had trained."""
    ground = alone(make, snapshot_every=None)
    ground.trainer.train(num_steps=10)
    ground.trainer.train()
    ground.arm(Fault(0, 5))
    assert ground.trainer.train()["num_samples"] == 240
    assert ground.trainer.recoveries[-1].batches_redone >= 60
    (ledger,) = ground.trainer.apply_all_operators(lambda operator: list(operator.ledger))
    assert sorted(ledger[:240]) == sorted(ledger[240:]) == [*range(240)]


class Places(Usual):
    """With "per_worker", more workers make fewer steps."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        x = torch.ones(40, 2)
        self.register_data(train_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=1, shuffle=True))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.here.compute()
        Cluster.running.point("alone" if self.world_size == 1 else "together")
        return super().train_batch(batch, batch_info)


def test_a_call_that_was_run_again_with_fewer_steps_is_not_run_a_third_time() -> None:
    """No snapshot of one worker's last 37 steps arrives, so two new workers make them again, in 19. Both fail in the next epoch, at a
    step that has a smaller number than the end of those 37."""
    elastic = ElasticConfig(batch="per_worker", snapshot_every=1, grow=False, hang_timeout_s=60)
    given: dict[str, Any] = {"training_operator_cls": Places, "num_workers": 2, "use_gpu": False, "elastic": elastic}
    with Cluster([Hit("kill", "together", rank=1)]) as cluster, TorchTrainer(**given) as trainer:
        assert trainer.train(num_steps=3)["batch_count"] == 3
        cluster.workers[0].loses = True
        assert trainer.train()["batch_count"] == 37
        cluster.faults(Hit("kill", "alone", step=41), *(Hit("kill", "together", rank=rank, step=36) for rank in (0, 1)))
        result, state = trainer.train(max_retries=-1), trainer.state_dict()
        assert not cluster.left and [each.in_place for each in trainer.recoveries] == [True, False, False]
    assert (result["epoch"], result["batch_count"], state["global_step"]) == (2, 20, 3 + 19 + 20)


def test_a_save_in_which_all_workers_fail_saves_what_a_call_had_trained_that_an_error_has_ended(
    make: Make, tmp_path: Path
) -> None:
    ground = alone(make, snapshot_every=None)
    ground.arm(Fault(0, 5, "raise"))
    with pytest.raises(ZeroDivisionError):
        ground.trainer.train()
    ledgers = ground.trainer.apply_all_operators(lambda operator: operator.ledger)
    ground.arm(Fault(0, 1, where="save"))
    ground.trainer.save(tmp_path / "new.pt")
    assert ground.trainer.apply_all_operators(lambda operator: operator.ledger) == ledgers != [[]]
    ground.trainer.load(tmp_path / "new.pt")
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_a_save_in_which_all_workers_fail_saves_what_had_been_trained(make: Make, tmp_path: Path) -> None:
    ground = alone(make, snapshot_every=None)
    ground.trainer.train()
    ground.arm(Fault(0, 1, where="save"))
    ground.trainer.save(tmp_path / "new.pt")
    ground.assert_epoch_exact()


def test_a_preemption_notice_to_the_only_worker_repeats_no_batch(make: Make) -> None:
    ground = alone(make)
    ground.arm(Fault(0, 20, "term"))
    epochs(ground)
    (notice,) = ground.trainer.recoveries
    assert (notice.reason, notice.batches_redone) == ("preemption", 0)


def kill_all() -> None:
    for worker in list(Cluster.running.workers):
        worker.die("SIGKILL")


def test_new_workers_after_a_load_are_as_many_as_the_ones_that_loaded(make: Make, tmp_path: Path) -> None:
    """The file is of two workers, and was loaded by three."""
    saved = make(num_workers=2)
    saved.trainer.train(num_steps=4)
    path = saved.trainer.save(tmp_path / "two.pt")
    saved.trainer.shutdown()
    ground = make()
    ground.trainer.load(path)
    kill_all()
    assert ground.trainer.train()["num_samples"] == ground.samples - 32, "the rest of the epoch"
    ground.assert_epoch_exact()
    assert ground.trainer.apply_all_operators(lambda operator: operator.resizes) == [[]] * 3


def test_without_snapshots_a_loaded_state_is_lost_with_all_workers(make: Make, tmp_path: Path) -> None:
    """New workers start over, and the error of a call that needs the state says so."""
    ground = make(elastic={"snapshot_every": None})
    ground.trainer.train()
    ground.trainer.load(ground.trainer.save(tmp_path / "saved.pt"))
    kill_all()
    with pytest.raises(CheckpointError, match="nothing was saved"):
        ground.trainer.save(tmp_path / "again.pt")
    assert ground.trainer.apply_all_operators(lambda operator: operator.ledger) == [[]] * 3


@pytest.mark.parametrize("all_die", [False, True])
def test_a_worker_that_is_killed_during_a_save_within_an_epoch(make: Make, tmp_path: Path, all_die: bool) -> None:
    """It copies its state between two batches. If all workers die there, new ones begin at the snapshot."""
    checkpoints = AutoCheckpoint(path=tmp_path / "saves", every=4)
    ground = make(num_workers=2, config={"samples": 80}, checkpoints=checkpoints)
    ground.arm(Fault(0, 5, where="save", others=(1,) if all_die else ()))  # before the fifth batch
    for _ in ground.trainer.epochs(1):
        result = ground.trainer.train()
        ground.assert_epoch_exact()
    assert ground.fired() == 1
    assert (result["num_samples"], result["epoch"]) == (80, 1)
    (failure,) = ground.trainer.recoveries
    expected = ("worker death", 4, 4, False) if all_die else ("worker death", 4, 0, True)
    assert (failure.reason, failure.batch, failure.batches_redone, failure.in_place) == expected
    saved, weights = ground.trainer.latest_checkpoint, ground.weights()
    ground.trainer.shutdown()
    again = make(num_workers=1, config={"samples": 80})
    again.trainer.load(saved)
    for mine, theirs in zip(again.weights(), weights, strict=True):
        assert torch.equal(mine, theirs), "the newest checkpoint is that of the end"


# -- members ------------------------------------------------------------------------------------------


class Noticing(LedgerOperator):
    def on_preemption_notice(self, deadline_s: float | None) -> None:
        Cluster.running.notes.append(self.world_rank)
        self.fault("notice")


def test_an_error_at_a_notice_is_raised_and_the_trainer_continues(make: Make) -> None:
    ground = make(operator=Noticing, elastic={"grow": True})
    ground.arm(Fault(2, 3, "term"), Fault(2, 0, "raise", where="notice"))
    with pytest.raises(ZeroDivisionError, match="notice") as caught:
        ground.trainer.train()
    assert vars(caught.value)["raysgd_rank"] == 2
    ground.trainer.train()
    ground.assert_epoch_exact()
    epochs(ground)
    assert Cluster.running.notes == [2], "it is called once"
    assert reasons(ground) == ["preemption"]


def test_a_failure_while_ranks_stop_for_a_replacement(make: Make) -> None:
    ground = make(elastic={"grow": True})
    ground.arm(Fault(1, 3), Fault(0, 0, where="save"))  # the state for the replacement
    epochs(ground)
    assert ground.fired() == 2 and ground.trainer.world_size == 3


def test_growth_only_between_calls(make: Make) -> None:
    ground = make(elastic={"grow": "epoch"})
    ground.arm(Fault(1, 3))
    epochs(ground)
    assert reasons(ground) == ["worker death", "growth"] and ground.trainer.world_size == 3
    joined = ground.trainer.recoveries[1]
    assert (joined.epoch, joined.batch) == (1, 29), "the last one of the epoch with the failure"


def test_without_growth_no_replacement_is_started(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = make()
    group = Cluster.running._group
    launched, launch = list[int](), group.launch
    monkeypatch.setattr(group, "launch", lambda count: launched.append(count) or launch(count))
    ground.arm(Fault(1, 3))
    epochs(ground)
    assert reasons(ground) == ["worker death"] and launched == [] and ground.trainer.world_size == 2


class Failing(LedgerOperator):
    """Its set-up fails in workers that start while `broken`."""

    broken = False
    set_up = 0

    def setup(self, config: dict[str, Any]) -> None:
        Failing.set_up += 1
        if Failing.broken:
            raise ZeroDivisionError("planned in setup")
        super().setup(config)


def test_a_set_up_that_fails_in_all_new_workers_is_not_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error ends the call, although they do not fail at the same time."""
    ground = make(operator=Failing)
    ground.trainer.train(num_steps=2)
    monkeypatch.setattr(Failing, "broken", True)
    monkeypatch.setattr(Failing, "set_up", 0)
    kill_all()
    with pytest.raises(ZeroDivisionError, match="planned in setup"):
        ground.trainer.train()
    assert Failing.set_up <= 3
    monkeypatch.setattr(Failing, "broken", False)
    ground.trainer.train()
    ground.assert_epoch_exact()


class Stuck(Computing):
    """Its set-up does not end in workers that start while `stuck`."""

    stuck = False

    def setup(self, config: dict[str, Any]) -> None:
        if Stuck.stuck:
            Cluster.running.here.sleep(1e9)
        super().setup(config)


def test_a_set_up_that_hangs_in_a_replacement_stops_no_other_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`resize` raises an error that says so, and so does a call for which no worker is left. Nothing is lost."""
    ground = make(operator=Stuck, num_workers=2, timeout_s=20, elastic={"grow": True})
    ground.trainer.train(num_steps=2)
    said = "a replacement worker on node"
    with monkeypatch.context() as patch:
        patch.setattr(Stuck, "stuck", True)
        ground.arm(Fault(1, 3))
        while not any("did not finish" in message for message in caplog.messages):
            ground.trainer.train()
        warned = [place for place, message in enumerate(caplog.messages) if "has been in its set-up" in message]
        ended = next(place for place, message in enumerate(caplog.messages) if "did not finish" in message)
        assert warned[0] < ended and all(place > ended for place in warned[1:]), "one for each replacement"
        with pytest.raises(WorkerStartError, match=said):
            ground.trainer.resize(2)
        assert ground.trainer.world_size == 1 and ground.trainer.validate()["num_samples"] == 50
        kill_all()
        with pytest.raises(WorkerStartError, match=said):
            ground.trainer.train()
    ground.trainer.train()
    assert reasons(ground)[0] == "worker death"
    assert len(set(ground.trained().values())) == 1


def test_a_set_up_that_hangs_at_the_start_is_shown_before_its_limit(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a tenth of `timeout_s`, which is the limit also if `hang_timeout_s` is larger."""
    monkeypatch.setattr(Stuck, "stuck", True)
    with pytest.raises(WorkerStartError, match=r"(?s)within 20 s.*increase timeout_s"):
        make(operator=Stuck, num_workers=2, timeout_s=20)
    warnings = [message for message in caplog.messages if "for 2 s (limit 20 s)" in message]
    assert len(warnings) == 2 and all("has been in its set-up" in each for each in warnings)


class StuckData(Numbered):
    """Loading one sample never ends, once."""

    def __init__(self, size: int, marks: str) -> None:
        super().__init__(size)
        self.fault, self.marks = Fault(0, 0, "sleep", "loading", seconds=1e9), marks

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            self.fault.fire(self.marks)
        return super().__getitem__(index)


class StuckLoader(LedgerOperator):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=DataLoader(StuckData(240, config["marks"]), batch_size=4))


def test_a_data_loader_that_hangs_on_one_rank(make: Make) -> None:
    ground = make(operator=StuckLoader)
    epochs(ground, 1)
    (hang,) = ground.trainer.recoveries
    assert hang.reason == "hang" and len(hang.removed_ranks) == 1 and "loading data" in hang.detail


# -- num_samples --------------------------------------------------------------------------------------


class Tokens(LedgerOperator):
    """Counts 5 tokens in each sample."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        found = super().train_batch(batch, batch_info)
        return {**found, "num_samples": 5 * len(batch[0]), "five": (5.0, 5 * len(batch[0]))}


class TokensOfLoop(Tokens):
    each = 5

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        rows = 0
        for batch in iterator:
            self.train_batch(batch, info)
            self.global_step += 1
            rows += len(batch[0])
        return {"num_samples": self.each * rows, "five": 5.0}


class RowsOfLoop(TokensOfLoop):
    each = 1


FAULTS = {"none": (), "one": (Fault(1, 6),), "two": (Fault(1, 6), Fault(0, 11)), "the last": (Fault(1, 19),)}


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize(("operator", "each"), [(Tokens, 5), (TokensOfLoop, 5), (RowsOfLoop, 1), (LedgerOperator, 1)])
def test_the_sum_of_samples_is_complete_or_not_there(
    make: Make, operator: type[TrainingOperator], each: int, faults: str, caplog: pytest.LogCaptureFixture
) -> None:
    ground = make(operator=operator)
    ground.arm(*FAULTS[faults])
    result = ground.trainer.train()
    ground.assert_epoch_exact()
    assert len(ground.trainer.recoveries) == len(FAULTS[faults])
    lacks = "num_samples" not in result
    assert lacks or result["num_samples"] == 240 * each
    if each == 1 or faults == "none":
        assert not lacks
    assert sum("lacks num_samples" in each for each in caplog.messages) == lacks
    assert result.get("five", 5.0) == 5.0
    assert ground.trainer.train()["num_samples"] == 240 * each


@pytest.mark.parametrize("every", [5, "epoch"])
def test_tokens_after_all_workers_have_failed(make: Make, every: Any) -> None:
    """The snapshot has those of rank 0 only. The one before the call has none, so that all are counted again."""
    ground = make(num_workers=2, operator=Tokens, elastic={"snapshot_every": every})
    ground.arm(Fault(1, 9), Fault(0, 25))
    result = ground.trainer.train()
    ground.assert_epoch_exact()
    assert not ground.trainer.recoveries[-1].in_place and result["five"] == 5.0
    assert result.get("num_samples", 240 * 5) == 240 * 5
    assert every == 5 or "num_samples" in result


def test_tokens_are_complete_if_no_worker_fails(make: Make) -> None:
    ground = make(operator=Tokens)
    ground.arm(Fault(1, 8, "term"))
    assert ground.trainer.train()["num_samples"] == 240 * 5
    assert reasons(ground) == ["preemption"]


def test_tokens_are_complete_if_each_batch_was_reported(make: Make) -> None:
    class Slow(Tokens):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            Cluster.running.here.compute()
            return super().train_batch(batch, batch_info)

    ground = make(operator=Slow)
    ground.arm(Fault(1, 6))
    assert ground.trainer.train()["num_samples"] == 240 * 5
    assert reasons(ground) == ["worker death"]
