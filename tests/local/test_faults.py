"""A fault at every point of every step, and in every other call: the run ends with the weights of an undisturbed one."""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CheckpointError, ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.peek import loads_of
from tests.storage.damage import flipped
from tests.tiers import NIGHTLY

pytestmark = pytest.mark.usefixtures("quiet")

ROWS, BATCH, WORKERS, STEPS = 26, 2, 3, 5
HIT = range(STEPS) if NIGHTLY else (0, 2, 4)
POINTS = ("begun", "forward", "reduced", "applied", "stepped", "logged")


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7)).double()
    return x, (3 * x).sin().sum(1, keepdim=True)


class Curve(TrainingOperator):
    """In double precision, so that rounding cannot hide a wrong weight. It notes which samples its weights have seen."""

    refuses: int | None = None  # the rank that loads no state

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if config.get("norm") else nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.double().parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.criterion, self.schedule = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=schedule
        )
        x, y = samples()
        data, size = TensorDataset(torch.arange(ROWS), x, y), config.get("batch", BATCH)
        self.register_data(
            train_loader=DataLoader(data, batch_size=size, shuffle=True, drop_last="norm" in config),
            validation_loader=DataLoader(data, batch_size=BATCH),
        )
        self.seen: list[int] = []
        self.step_of, self.together = -1, set[int]()
        self.optimizer.register_step_post_hook(lambda *_: self.seen.extend(sorted(self.together)))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.point("begun")
        if batch_info["global_step"] != self.step_of:  # otherwise it is a further piece, or the batch is trained again
            self.step_of, self.together = batch_info["global_step"], set()
        self.together |= {each for part in Cluster.running.together(batch[0].tolist()) for each in part}
        result = super().train_batch(batch[1:], batch_info)
        Cluster.running.point("stepped")
        Cluster.running.together(None)  # as code that logs the mean over the ranks does
        Cluster.running.point("logged")
        return {**result, "row": float(batch[0].double().mean())}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        Cluster.running.point("validate")
        return super().validate_batch(batch[1:], batch_info)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Cluster.running.point("load_state_dict")
        if Curve.refuses == self.world_rank:
            raise ValueError("this rank refuses")
        self.seen = list(state["seen"])


def trainer(
    batch: str = "auto", operator: type[TrainingOperator] = Curve, **given: Any
) -> AbstractContextManager[TorchTrainer]:
    elastic = {"hang_timeout_s": 60, "snapshot_every": 1, **given.pop("elastic", {})}
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=WORKERS,
        use_gpu=False,
        seed=5,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(batch=batch, **elastic),  # type: ignore[arg-type]
        **given,
    )


def seen(trainer: TorchTrainer) -> list[int]:
    every = trainer.apply_all_operators(lambda operator: list(operator.seen))
    assert all(each == every[0] for each in every)
    return every[0]


def epoch(*faults: Fault, error: type[Exception] | None = None) -> tuple[torch.Tensor, dict[str, Any], list[str]]:
    """Return the weights, the result and the reasons of recoveries of an epoch, whose samples are used once."""
    with Cluster(faults) as cluster, trainer() as run:
        if error is not None:
            with pytest.raises(error):
                run.train(max_retries=-1)
        result = run.train(max_retries=-1)
        assert len(cluster.left) < max(len(faults), 1)  # a rank that others' failures interrupt does not get so far
        assert Counter(seen(run)) == Counter(range(ROWS))
        reasons = [each.reason for each in run.recoveries]
        return weights_of(run), {**result, **run.validate()}, reasons


@pytest.fixture(scope="module")
def undisturbed() -> tuple[torch.Tensor, dict[str, Any]]:
    weights, result, reasons = epoch()
    assert not reasons and result["num_samples"] == ROWS and result["row"] == pytest.approx((ROWS - 1) / 2)
    return weights, result


def assert_same(mine: tuple[torch.Tensor, dict[str, Any], Any], other: tuple[torch.Tensor, dict[str, Any]]) -> None:
    torch.testing.assert_close(mine[0], other[0], rtol=1e-12, atol=1e-12)
    assert mine[1]["val_loss"] == pytest.approx(other[1]["val_loss"], rel=1e-12)
    assert mine[1]["num_samples"] == ROWS and mine[1]["epoch"] == 1


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        *(("kill", at) for at in POINTS),
        ("freeze", "begun"),
        ("freeze", "reduced"),
        ("notice", "begun"),
        ("notice", "logged"),
    ],
)
@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_rank_at_each_point_of_each_step(kind: str, rank: int, at: str, undisturbed: Any) -> None:
    for step in HIT:
        found = epoch(Fault(kind, at, rank=rank, step=step))
        assert_same(found, undisturbed)
        if kind != "notice":
            assert found[2][0] == {"kill": "worker death", "freeze": "hang"}[kind]


@pytest.mark.parametrize("at", POINTS)
def test_all_ranks_at_each_point_of_each_step(at: str, undisturbed: Any) -> None:
    """New workers start from a snapshot, or from the beginning."""
    for step in HIT:
        found = epoch(*(Fault("kill", at, rank=rank, step=step) for rank in range(WORKERS)))
        assert_same(found, undisturbed)


def test_two_faults_one_after_the_other(undisturbed: Any) -> None:
    for one, other in itertools.product(POINTS[::2], POINTS[1::2]):
        assert_same(epoch(Fault("kill", one, rank=0, step=1), Fault("kill", other, rank=1, step=2)), undisturbed)


def test_a_validation_is_repeated() -> None:
    with Cluster() as cluster, trainer() as run:
        expected = run.validate()
        for rank in range(WORKERS):
            cluster.faults(Fault("kill", "validate", rank=rank))
            found = run.validate()
            assert not cluster.left and found["num_samples"] == ROWS
            assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-12)
            run.resize(WORKERS)


def test_states_that_are_saved_and_loaded(tmp_path: Path, undisturbed: Any) -> None:
    """In the middle of an epoch; in the background; by a run of another size; and beside a fault in the load."""
    with Cluster() as cluster, trainer() as run:
        run.train(num_steps=2)
        run.save(tmp_path / "a.pt")
        handle = run.save(tmp_path / "b.pt", blocking=False)
        run.save(tmp_path / "c", sharded=True)
        state = run.state_dict()
        run.train(num_steps=1)  # in the time of the background save, which must not see it
        handle.result()
        for load in (
            lambda: run.load(tmp_path / "a.pt"),
            lambda: run.load(tmp_path / "b.pt"),
            lambda: run.load(tmp_path / "c", trusted=True),
            lambda: run.load_state_dict(state),
        ):
            load()
            assert len(seen(run)) == 2 * BATCH * WORKERS
            run.train()
            assert Counter(seen(run)) == Counter(range(ROWS))
            torch.testing.assert_close(weights_of(run), undisturbed[0], rtol=1e-12, atol=1e-12)
        cluster.faults(Fault("kill", "load_state_dict", rank=1))
        run.load(tmp_path / "a.pt")
        assert not cluster.left
        run.train()
        assert Counter(seen(run)) == Counter(range(ROWS))
        torch.testing.assert_close(weights_of(run), undisturbed[0], rtol=1e-12, atol=1e-12)


def test_each_file_of_a_sharded_checkpoint_is_verified(tmp_path: Path) -> None:
    """Each rank verifies some of them."""
    with Cluster(), trainer() as run:
        folder = Path(run.save(tmp_path / "parts", sharded=True))
        run.train(num_steps=1)
        before = weights_of(run)
        files = sorted(folder.glob("*/*"))
        assert len(files) > WORKERS
        for path in files:
            content = path.read_bytes()
            path.write_bytes(flipped(content, 4 * len(content)))
            with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
                run.load(folder, trusted=True)
            path.write_bytes(content)
        assert torch.equal(weights_of(run), before)
        run.load(folder, trusted=True)


@pytest.mark.parametrize("rank", range(WORKERS))
def test_after_an_error_of_one_rank_in_a_load_only_a_load_is_accepted(
    rank: int, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(), trainer() as run:
        good = run.save(tmp_path / "good.pt")
        run.load(good)
        run.train(num_steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(Curve, "refuses", rank)
            with pytest.raises(
                CheckpointError, match=rf"rank {rank}: .*this rank refuses.*Now the state of this trainer"
            ):
                run.load(good)
        assert loads_of(run) == {-1}
        for call in (run.train, run.validate, run.state_dict, lambda: run.resize(1)):
            with pytest.raises(CheckpointError, match="the state of this trainer is undefined"):
                call()
        run.load(good)
        assert loads_of(run) == {3}, "the load that failed counts, too"
        run.train()
        assert not run.recoveries and Counter(seen(run)) == Counter(range(ROWS))
        torch.testing.assert_close(weights_of(run), undisturbed[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", range(WORKERS))
@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_fails_in_a_load_that_follows_an_error(
    rank: int, joins: bool, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank has a state. One that joins gets what the others have, and not its own initial one, until all have loaded."""
    with Cluster() as cluster, trainer(elastic={"grow": joins}) as run:
        good = run.save(tmp_path / "good.pt")
        run.train(num_steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(Curve, "refuses", 1)
            with pytest.raises(CheckpointError, match="Now the state of this trainer is undefined"):
                run.load(good)
            cluster.faults(Fault("kill", "load_state_dict", rank=rank))
            with pytest.raises(CheckpointError, match=r"this rank refuses.*Now the state of this trainer is undefined"):
                run.load(good)
        assert not cluster.left and len(run.recoveries) == 1 and loads_of(run) == {-1}
        run.load(good)
        run.train()
        assert Counter(seen(run)) == Counter(range(ROWS))
        torch.testing.assert_close(weights_of(run), undisturbed[0], rtol=1e-12, atol=1e-12)


def test_after_such_an_error_new_workers_do_not_train_on_an_older_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if they were started by a load, which was then refused before it changed anything."""
    (tmp_path / "bad.pt").write_bytes(b"bad")
    with Cluster() as cluster, trainer() as run:
        good = run.save(tmp_path / "good.pt")
        run.train(num_steps=2)
        with monkeypatch.context() as patch:
            patch.setattr(Curve, "refuses", 1)
            with pytest.raises(CheckpointError, match="Now the state of this trainer is undefined"):
                run.load(good)
        for worker in cluster.workers:
            worker.die("SIGKILL")
        with pytest.raises(CheckpointError, match=r"bad\.pt: .*Now the state of this trainer is undefined"):
            run.load(tmp_path / "bad.pt")
        assert len(run.recoveries) == 1 and not run.recoveries[0].in_place
        with pytest.raises(CheckpointError, match="the state of this trainer is undefined"):
            run.train()
        run.load(good)
        run.train()
        assert Counter(seen(run)) == Counter(range(ROWS))


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_load_in_which_a_rank_fails_is_repeated(rank: int, tmp_path: Path, undisturbed: Any) -> None:
    """Some ranks have changed their state, and some have not."""
    with Cluster() as cluster, trainer() as run:
        good = run.save(tmp_path / "good.pt")
        run.train(num_steps=2)
        cluster.faults(Fault("kill", "load_state_dict", rank=rank))
        run.load(good)
        assert not cluster.left and len(run.recoveries) == 1 and run.recoveries[0].in_place
        assert loads_of(run) == {1} and not seen(run)
        run.train()
        torch.testing.assert_close(weights_of(run), undisturbed[0], rtol=1e-12, atol=1e-12)


def test_calls_train_their_epochs_if_all_workers_are_lost_after_one() -> None:
    """They are lost before the snapshot of the epoch's end has arrived."""
    with Cluster(seed=1) as cluster, trainer() as run:
        run.train()
        before = weights_of(run)
        cluster.faults(*(Fault("kill", "begun", rank=rank) for rank in range(WORKERS)))
        run.train()
        assert not cluster.left and Counter(seen(run)) == Counter([*range(ROWS)] * 2)
        after = weights_of(run)
        redone = [each.batches_redone for each in run.recoveries]
    with Cluster(), trainer() as run:
        run.train()
        assert torch.equal(weights_of(run), before)
        run.train()
        torch.testing.assert_close(weights_of(run), after, rtol=1e-12, atol=1e-12)
    assert redone == [1], "the snapshot was there: another seed is needed"


def test_a_change_by_hand_is_saved(tmp_path: Path) -> None:
    """All workers fail in a save before the snapshot of the epoch's end has arrived, and the end of the epoch is trained again."""
    with Cluster(seed=1) as cluster, trainer() as run:
        run.train()
        run.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(lr=0.5))
        for worker in cluster.workers:
            worker.die("SIGKILL")
        run.save(tmp_path / "new.pt")
        assert Counter(seen(run)) == Counter(range(ROWS))
        run.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(lr=0.1))
        run.load(tmp_path / "new.pt")
        assert run.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"]) == [0.5, 0.5, 0.5]
        redone = [each.batches_redone for each in run.recoveries]
    assert redone == [1], "the snapshot was there: another seed is needed"


def test_evaluations_are_those_of_rank_0s_model() -> None:
    """Each rank's BatchNorm has seen other samples."""
    with Cluster(), trainer(config={"norm": True, "batch": 4}) as run:
        run.train()
        alone, (x, y) = run.get_model().eval(), samples()
        assert run.validate()["val_loss"] == pytest.approx(nn.functional.mse_loss(alone(x), y).item(), rel=1e-12)


@pytest.mark.parametrize("at", ["begun", "forward", "stepped", "logged"])
def test_an_error_of_the_users_code_ends_the_call(at: str, undisturbed: Any) -> None:
    from tests.simulation.replica import UserError

    for rank in range(WORKERS):
        weights, _, reasons = epoch(Fault("raise", at, rank=rank, step=2), error=UserError)
        assert not reasons
        torch.testing.assert_close(weights, undisturbed[0], rtol=1e-12, atol=1e-12)


# Each breaks what one part promises to the others; its name says what is broken.
MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a save lacks the optimizers": (
        "torch.optim.Adam.state_dict",
        lambda original: lambda self: {**original(self), "state": {}},
    ),
    "a state lacks what the operator adds": (
        "tests.local.test_faults.Curve.load_state_dict",
        lambda original: lambda self, state: None,
    ),
    "the ranks do not agree on an order": (
        "raysgd.torch.data.sampling.agree",
        lambda original: lambda order, recipe, *, first: (order if first else order.flip(0), None),
    ),
    "a batch counts before its step": (
        "raysgd.replica.steps.step.Step.counts",
        lambda original: lambda self, *, failed: self.closing,
    ),
    "a schedule forgets the batch that an error ends": (
        "raysgd.torch.step.schedules.LoopSchedule.end_part",
        lambda original: lambda self, *, failed=False: None if failed else original(self),
    ),
    "unequal shares weigh the same": (
        "raysgd.torch.step.weights.GradientWeights._arriving",
        lambda original: lambda self, gradients: None,
    ),
    "calls do not finish those before them": (
        "raysgd.engine.call_loop.CallLoop._run_again",
        lambda original: lambda self, running: None,
    ),
    "each rank keeps its own buffers": (
        "raysgd.torch.state.buffers.RestoreBuffers._send",
        lambda original: lambda self: None,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_detected(name: str, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, change = MUTANTS[name]
    monkeypatch.setattr(target, change(resolve_name(target)))
    with pytest.raises(AssertionError):
        for at in ("forward", "reduced", "stepped"):
            assert_same(epoch(Fault("kill", at, rank=0, step=1)), undisturbed)
        test_states_that_are_saved_and_loaded(tmp_path, undisturbed)
        test_calls_train_their_epochs_if_all_workers_are_lost_after_one()
        test_evaluations_are_those_of_rank_0s_model()
