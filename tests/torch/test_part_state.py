"""`self.part_state`: a recurrent model whose hidden state belongs to the part of the batch, on any worker."""

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, ConfigError, ElasticConfig, TorchTrainer
from raysgd.replica.snapshots import Snapshotter
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.peek import finish_saves, leave_no_checkpoint_out
from tests.replicas import torch_rank
from tests.simulation.network import NetworkError, SimBackend
from tests.torch.small import Line, inline

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")

STEPS, COLUMNS, EPOCHS = 6, 3, 2  # of time in an epoch, and on each worker
NOTES: list[tuple[int, int, int, Any]] = []  # of each part that is trained: its step, its number, and its state


@pytest.fixture(autouse=True)
def no_notes() -> None:
    NOTES.clear()


def tokens(workers: int) -> torch.Tensor:
    """Return the text: of each column one row for each step."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(STEPS + 1, COLUMNS * workers, 4, generator=generator).double()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(4, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.cell(x, hidden)
        return self.out(hidden), hidden


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Network().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, hidden = model(x, hidden)
    return nn.functional.mse_loss(out, y), hidden


def state_of(operator: Any) -> dict[str, Any]:
    state: dict[str, Any] = operator.part_state
    return state


class Hidden(TrainingOperator):
    """No method of its class shows that it uses the state."""

    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer = made()
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        text = tokens(config["columns"] // COLUMNS)
        rows = STEPS * config["columns"] - config.get("short", 0)
        data = TensorDataset(text[:-1].flatten(0, 1)[:rows], text[1:].flatten(0, 1)[:rows])
        self.register_data(
            train_loader=DataLoader(data, config.get("batch", COLUMNS)), validation_loader=DataLoader(data, COLUMNS)
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] < self.config.get("from", 0):
            return {"train_loss": 0.0}
        state = self.state()
        if batch_info["epoch_batch"] == 0:
            state["hidden"] = torch.zeros(len(batch[0]), 5).double()
        before = state.get("hidden")
        NOTES.append((batch_info["global_step"], batch_info["part"], state.get("seen", 0), before))
        before = torch.zeros(len(batch[0]), 5).double() if before is None else before
        self.zero_grad()
        loss, state["hidden"] = loss_of(self.model, *batch, before)
        state["seen"] = state.get("seen", 0) + 1
        self.backward(loss)
        self.step()
        return {"train_loss": loss}

    def state(self) -> dict[str, Any]:
        return state_of(self)


class Recurrent(Hidden):
    def state(self) -> dict[str, Any]:
        return self.part_state


def by_hand(workers: int) -> torch.Tensor:
    model, optimizer = made()
    text = tokens(workers)
    for _ in range(EPOCHS):
        hidden = torch.zeros(COLUMNS * workers, 5).double()
        for step in range(STEPS):
            optimizer.zero_grad()
            loss, hidden = loss_of(model, text[step], text[step + 1], hidden.detach())
            loss.backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def trainer(workers: int = 2, kind: type[TrainingOperator] = Recurrent, **more: Any) -> TorchTrainer:
    elastic = ElasticConfig(**{"grow": False, "hang_timeout_s": 60, **more.pop("elastic", {})})
    config = {"columns": COLUMNS * workers, **more.pop("config", {})}
    return TorchTrainer(
        training_operator_cls=kind, num_workers=workers, use_gpu=False, config=config, elastic=elastic, **more
    )


def trained(run: TorchTrainer) -> torch.Tensor:
    for _ in run.epochs(EPOCHS):
        run.train()
    return weights_of(run)


def assert_equal(found: torch.Tensor, workers: int) -> None:
    assert torch.allclose(found, by_hand(workers), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_it_is_that_of_a_loop_by_hand(workers: int) -> None:
    with Cluster(), trainer(workers) as run:
        assert_equal(trained(run), workers)
    seen = {(step, part): count for step, part, count, _ in NOTES}
    assert seen == {(step, part): step for step in range(STEPS * EPOCHS) for part in range(workers)}


def with_new_processes(*given: Any, **more: Any) -> SimBackend:
    return SimBackend(*given, **{**more, "in_place": False})


@pytest.mark.parametrize(
    ("workers", "fewer", "backend"),
    [(2, 1, SimBackend), (3, 1, SimBackend), (3, 2, SimBackend), (3, 2, with_new_processes)],
)
def test_it_goes_with_its_part_when_workers_leave_and_join(workers: int, fewer: int, backend: Any) -> None:
    with Cluster() as cluster, ExitStack() as stack:
        cluster.replace({"tests.local.group.SimBackend": backend})
        run = stack.enter_context(trainer(workers))
        for count, steps in ((workers, 2), (fewer, 2), (workers, 1), (fewer, 3), (workers, 4)):
            run.resize(count)
            run.train(num_steps=steps)
        assert_equal(weights_of(run), workers)
    assert all(count == step for step, _, count, _ in NOTES)


@pytest.mark.parametrize("grow", [False, True])
def test_it_stays_if_a_worker_leaves_in_the_middle_of_a_call(grow: bool) -> None:
    faults = [Fault("notice", "forward", rank=1, step=3)]  # the rest takes longer than the start of a replacement
    with Cluster(faults, step_s=0.5) as cluster, trainer(2, elastic={"grow": grow}) as run:
        assert_equal(trained(run), 2)
        assert not cluster.left and run.recoveries[0].reason == "preemption"
    assert all(count == step for step, _, count, _ in NOTES)


class Counting(Recurrent):
    """Counts the batches of each part whose samples count."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.part_state["seen"] = self.part_state.get("seen", 0) + 1
        self.zero_grad()
        loss, _ = loss_of(self.model, *batch, torch.zeros(len(batch[0]), 5).double())
        self.backward(loss)
        self.step()
        return {"train_loss": loss}


@pytest.mark.parametrize("workers", [4, 3, 2, 1])
def test_a_part_without_samples_keeps_it(workers: int) -> None:
    """The last step of an epoch has samples for two of four parts."""
    with Cluster(), trainer(4, Counting, config={"short": 10}) as run:
        run.train(num_steps=1)
        run.resize(workers)
        for _ in range(2):
            run.train()
        states = run.state_dict()["part_states"]
    assert {part: each["seen"] for part, each in states.items()} == {0: 12, 1: 12, 2: 10, 3: 10}


@pytest.mark.parametrize(("workers", "fewer"), [(2, 2), (2, 1), (3, 2)])
def test_a_checkpoint_has_those_of_all_parts(tmp_path: Path, workers: int, fewer: int) -> None:
    path = str(tmp_path / "half.pt")
    with Cluster(), trainer(workers) as run:
        run.train(num_steps=2)
        run.save(path)
        run.train(num_steps=1)
    for loads in (1, 2):
        with Cluster(), trainer(workers) as run:
            run.resize(fewer)
            for _ in range(loads):
                run.load(path)
                run.train(num_steps=2)
            run.train(num_steps=STEPS * EPOCHS - 4)
            assert_equal(weights_of(run), workers)
    with Cluster(), trainer(workers) as run, pytest.raises(Exception, match="part_states is"):
        run.load_state_dict({**torch.load(path), "part_states": {"a": {}}})


class Ends(Recurrent):
    """Ends the script, as an error does, when it has seen so many steps."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] == self.config["end"]:
            raise InterruptedError
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("every", [2, "epoch"])
def test_a_script_that_is_started_again_has_it(tmp_path: Path, every: Any) -> None:
    for end in (STEPS + 3, 2 * STEPS - 1, -1):
        NOTES.clear()
        given: dict[str, Any] = {"checkpoints": AutoCheckpoint(path=tmp_path, every=every), "resume": "auto"}
        with Cluster(), trainer(2, Ends, config={"end": end}, **given) as run, suppress(InterruptedError):
            leave_no_checkpoint_out(run)
            for _ in run.epochs(EPOCHS):
                run.train()
            assert end == -1
            assert_equal(weights_of(run), 2)
        finish_saves(run)
        assert NOTES and all(count == step for step, _, count, _ in NOTES)


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("at", ["forward", "reduced", "applied"])
def test_that_of_a_worker_that_fails_is_empty_and_the_others_continue(
    at: str, grow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Cluster(), trainer(2) as run:
        trained(run)
        expected = {note[:2]: note for note in NOTES}
    caplog.clear(), NOTES.clear()
    with Cluster([Fault("kill", at, rank=1, step=3)]) as cluster, trainer(2, elastic={"grow": grow}) as run:
        trained(run)
        assert not cluster.left
    lost = [(step, part) for step, part, count, _ in NOTES if count == 0 and step]
    assert lost == [(2 if at == "forward" else 3, 1)]
    seen: dict[Any, Any] = {note[:2]: note for note in NOTES}
    for step in range(lost[0][0] + 1):  # a batch that is trained again begins with what the first try had
        assert seen[step, 0][2] == step and torch.equal(seen[step, 0][3], expected[step, 0][3])
    assert all(seen[step, 0][2] == step for step in range(STEPS * EPOCHS)), "none is lost, none is counted twice"
    said = [each for each in caplog.messages if "self.part_state" in each]
    assert [each[:57] for each in said] == ["part 1 of the batch continues with an empty self.part_sta"]


class Behind(Recurrent):
    """In the third step, rank 1 fails when one peer has made the step, and the other has not."""

    def backward(self, loss: torch.Tensor, optimizer: Any = None, **more: Any) -> None:
        super().backward(loss, optimizer, **more)
        if self.world_rank in (1, self.config["behind"]) and self.world_size == 3 and self.global_step == 2:
            Cluster.running.here.sleep(1.0)
            Cluster.running.point("late")
            raise NetworkError("a peer has left")


@pytest.mark.parametrize("behind", [0, 2])
def test_a_rank_that_takes_the_newest_step_from_a_peer_keeps_its_own(behind: int) -> None:
    with Cluster(), trainer(3) as run:
        trained(run)
        expected = {note[:2]: note for note in NOTES}
    NOTES.clear()
    kill, config = Fault("kill", "late", rank=1, step=3), {"behind": behind}
    with Cluster([kill]) as cluster, trainer(3, Behind, config=config) as run:
        trained(run)
        assert not cluster.left and [each.batches_redone for each in run.recoveries] == [0]
    after = [note for note in NOTES if note[0] >= 3]
    assert [(step, part) for step, part, count, _ in after if count == 0] == [(3, 1)]
    assert all(count == step for step, part, count, _ in after if part != 1)
    assert all(torch.equal(each[3], expected[each[:2]][3]) for each in after if each[0] == 3 and each[1] != 1)


def test_those_of_others_go_to_the_ranks_that_have_their_parts_now() -> None:
    with Cluster([Fault("kill", "forward", rank=3, step=3)]), trainer(4) as run:
        trained(run)
    seen = {(step, part): count for step, part, count, _ in NOTES}
    assert all(seen[step, part] == step for step in range(STEPS * EPOCHS) for part in range(3))


def test_it_goes_with_its_part_when_parts_are_dealt_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The two workers are fast in turn."""
    monkeypatch.setattr("raysgd.core.decisions.dealing.EVERY", 1)
    monkeypatch.setattr("raysgd.core.decisions.dealing.MOST_DOUBLED", 0)

    def seconds(*_: Any) -> float:
        worker = Cluster.running.here
        return 1.0 + 3 * ((worker.host.rank + worker.client.control.begun) % 2)

    monkeypatch.setattr("raysgd.torch.step.parts.dealing.OwnSeconds.of_part", seconds)
    config = {"columns": COLUMNS * 4, "batch": COLUMNS * 2}
    with Cluster(), trainer(2, parts=4, config=config, elastic={"shares": "speed"}) as run:
        assert_equal(trained(run), 4)
    said = [each.split(". ")[0] for each in caplog.messages if "are dealt to ranks" in each]
    deals = ["(1, 3)", "(3, 1)"] * len(said)
    assert said == [f"the 4 parts of a batch are dealt to ranks by their speed: {each}" for each in deals[: len(said)]]
    assert len(said) > 2
    assert all(count == step for step, _, count, _ in NOTES)


class Reading(Recurrent):
    """Looks for a state that nothing sets."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        assert self.part_state.get("hidden") is None
        return Plain.train_batch(self, batch, batch_info)  # type: ignore[arg-type]


def test_a_program_that_only_reads_it_has_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster([Fault("kill", "forward", rank=1, step=3)]) as cluster, trainer(2, Reading) as run:
        trained(run)
        assert not cluster.left
    assert not [each for each in caplog.messages if "self.part_state" in each]


ALL = [Fault("kill", "forward", rank=rank, step=4) for rank in (0, 1)]


def due_by_its_own_clock(snapshots: Snapshotter, step: int, *, before: int) -> bool:
    return step % (2 + Cluster.running.here.host.rank) == 0


@pytest.mark.parametrize(("every", "redone"), [(2, 1), ("epoch", 3), (60.0, 1)])
def test_a_snapshot_has_those_of_all_parts(every: Any, redone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if every == 60.0:
        monkeypatch.setattr(Snapshotter, "due_after_batch", due_by_its_own_clock)
    with Cluster(ALL) as cluster, trainer(2, elastic={"snapshot_every": every, "grow": True}) as run:
        assert_equal(trained(run), 2)
        assert not cluster.left and [each.batches_redone for each in run.recoveries] == [redone]
    assert all(count == step for step, _, count, _ in NOTES)


@pytest.mark.parametrize(("kind", "again"), [(Recurrent, []), (Hidden, ["batch"])])
def test_it_can_be_used_later_than_in_the_first_step(kind: Any, again: list[str]) -> None:
    with Cluster(), trainer(2, kind, config={"from": STEPS}) as run:
        trained(run)
        assert [each.reason for each in run.recoveries] == again
    counted = {(step, part): count for step, part, count, _ in NOTES}
    assert counted == {(step, part): step - STEPS for step in range(STEPS, STEPS * EPOCHS) for part in range(2)}


class Failing(Recurrent):
    def backward(self, loss: torch.Tensor, optimizer: Any = None, **more: Any) -> None:
        if self.world_rank == 1 and self.config.pop("fails", False):
            raise LookupError
        super().backward(loss, optimizer, **more)


def test_an_error_undoes_it_with_the_step() -> None:
    with Cluster(), trainer(2, Failing, config={"fails": True}) as run:
        with pytest.raises(LookupError):
            run.train()
        assert_equal(trained(run), 2)


def test_with_per_worker_it_is_that_of_a_rank() -> None:
    with Cluster(), trainer(3, elastic={"batch": "per_worker"}) as run:
        run.train(num_steps=2)
        run.resize(2)
        run.train(num_steps=1)
        run.resize(3)
        run.train(num_steps=1)
    assert [note[:3] for note in sorted(NOTES, key=lambda note: note[:2])][-5:] == [
        (2, 0, 2),
        (2, 1, 2),
        (3, 0, 3),
        (3, 1, 3),
        (3, 2, 0),
    ]


class Plain(Hidden):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        loss, _ = loss_of(self.model, *batch, torch.zeros(len(batch[0]), 5).double())
        self.backward(loss)
        self.step()
        return {"train_loss": loss}


def test_without_it_ranks_exchange_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gathered_objects", "summed"):
        monkeypatch.delattr(f"raysgd.torch.step.parts.part_states.{name}")
    with Cluster(), trainer(2, Plain, elastic={"snapshot_every": 1}) as run:
        run.train()
        assert "part_states" not in run.state_dict()
        with pytest.raises(ConfigError, match="only while train_batch runs"):
            run.apply_all_operators(lambda operator: operator.part_state)


class Remembering(Recurrent):
    """Sets an attribute in its first batch, and needs it in later ones."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if batch_info["global_step"] == 0:
            self.first = batch
        assert len(self.first) == 2
        return super().train_batch(batch, batch_info)


def test_a_replacement_that_lacks_an_attribute_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster([Fault("kill", "forward", rank=1, step=3)]), trainer(2, Remembering, elastic={"grow": True}) as run:
        run.train(num_steps=4)
        run.resize(2)
        with pytest.raises(AttributeError) as caught:
            run.train()
    text = str(caught.value)
    assert "object has no attribute 'first'. This worker joined at step 4. It has what setup makes" in text
    assert len([each for each in caplog.messages if "train_batch has changed self.first, which" in each]) == 1


def test_a_script_that_takes_over_has_it() -> None:
    first, second = (torch_rank(Recurrent, {"columns": 6}, rank=rank, ranks=2) for rank in (0, 1))
    for rank in (first, second):
        rank.train(1, 3)
        later = rank.taken_over(lambda: torch_rank(Recurrent, {"columns": 6}, num_workers=2))
        later.train(2, 1)
    assert [note[:3] for note in NOTES if note[0] == 3] == [(3, 0, 3), (3, 1, 3)]


def late_use(operator: Any, step: int) -> None:
    """Use it outside the class, whose methods do not show it."""
    if step == 2:
        operator.part_state["seen"] = True


def test_a_lone_worker_may_use_it_late() -> None:
    """It need not agree with others, so no batch is trained twice."""

    class Late(Line):
        calls = 0

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.calls += 1
            late_use(self, batch_info["global_step"])
            return super().train_batch(batch, batch_info)

    with inline(Late) as trainer:
        for _ in range(2):
            trainer.train()
        assert trainer.apply_all_operators(lambda operator: operator.calls) == [6]
