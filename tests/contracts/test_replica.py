"""The contract of a replica: what a worker relies on, for torch, TensorFlow and training functions, without Ray.

Each subject makes STEPS steps in one call. Its `weights` depend on every step and on their order, so a step that is
left out or made twice shows in them.
"""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.core.messages import SnapshotUpload
from raysgd.core.outcomes import Interrupted
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.replica import TorchReplicaFactory
from raysgd.torch.settings import TorchSettings
from raysgd.train.replica import STOP_SIGNAL, FunctionReplica, FunctionReplicaFactory
from raysgd.train.run_session import Attempt
from raysgd.training.replica_base import ReplicaBase, apply_operator
from tests.torch.small import Line, rows

STEPS = 6


class PlannedError(Exception):
    """A user's own error."""


class Hooks:
    """Actions of a test, each once, before or after a step was applied."""

    def __init__(self) -> None:
        self.actions: dict[tuple[str, int], Callable[[], Any]] = {}

    def at(self, place: str, step: int, action: Callable[[], Any]) -> None:
        self.actions[place, step] = action

    def fire(self, place: str, step: int) -> None:
        self.actions.pop((place, step), lambda: None)()


def fail() -> None:
    raise PlannedError("planned")


class Subject:
    """One kind of replica, and what tests need in addition to the protocol."""

    def __init__(self) -> None:
        self.hooks = Hooks()
        self.reports: list[tuple[Progress, Any]] = []
        self.control = Control(lambda progress, partial: self.reports.append((progress, partial)))
        self.settings: dict[str, Any] = {}
        self.made: list[Any] = []

    def make(self) -> Any:
        replica = self.factory()(RankInfo(), self.control)
        self.made.append(replica)
        return replica

    def factory(self) -> Any:
        raise NotImplementedError

    def call(self, number: int = 1) -> Call:
        """Return a call that makes the remaining steps. With a number that was used before, repeat that call."""
        return Call(ReplicaBase.train, {"call": number, "num_steps": None, "profile": False, "info": None})

    def weights(self, replica: Any) -> list[float]:
        raise NotImplementedError

    def stop_at(self, step: int) -> None:
        """Ask for a stop at a batch boundary, to which all ranks have agreed."""
        assert self.control.propose(step)
        self.control.confirm()


def validation(number: int, num_steps: int | None = None) -> Call:
    return Call(ReplicaBase.validate, {"call": number, "num_steps": num_steps, "profile": False, "info": None})


class HookedLine(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(*rows(4 * STEPS))
        return {name: DataLoader(data, batch_size=4) for name in ("train_loader", "validation_loader")}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.config["hooks"].fire("before", self.global_step)
        metrics = super().train_batch(batch, batch_info)
        self.config["hooks"].fire("after", self.global_step)
        return metrics

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.config["hooks"].fire("validating", batch_info["batch_idx"])
        return {"first": float(batch[0][0, 0]), "num_samples": 1}


class TorchSubject(Subject):
    def factory(self) -> TorchReplicaFactory:
        return TorchReplicaFactory(HookedLine, {"hooks": self.hooks}, TorchSettings(**self.settings))

    def weights(self, replica: Any) -> list[float]:
        flat: list[float] = torch.nn.utils.parameters_to_vector(replica.operator.model.parameters()).tolist()
        return flat


class TFSubject(Subject):
    def factory(self) -> Any:
        tf = pytest.importorskip("tensorflow")
        keras = pytest.importorskip("keras")
        from raysgd.tf import TrainingOperator
        from raysgd.tf.replica import TFReplicaFactory
        from raysgd.tf.settings import TFSettings

        class HookedKeras(TrainingOperator):
            def setup(self, config: dict[str, Any]) -> None:
                keras.utils.set_random_seed(3)
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=keras.optimizers.SGD(0.1, momentum=0.5),
                    criterion=keras.losses.MeanSquaredError(),
                )
                data = tf.data.Dataset.from_tensor_slices(tuple(each.numpy() for each in rows(4 * STEPS))).batch(4)
                self.register_data(**dict.fromkeys(("train_dataset", "validation_dataset"), data))

            def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
                self.config["hooks"].fire("before", self.global_step)
                metrics = super().train_batch(batch, batch_info)
                self.config["hooks"].fire("after", self.global_step)
                return metrics

            def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
                self.config["hooks"].fire("validating", batch_info["batch_idx"])
                return {"first": float(batch[0][0, 0]), "num_samples": 1}

        return TFReplicaFactory(HookedKeras, {"hooks": self.hooks}, TFSettings(**self.settings))

    def weights(self, replica: Any) -> list[float]:
        return [float(number) for each in replica.operator.model.get_weights() for number in each.ravel()]


def commit_steps(hooks: Hooks) -> None:
    """Make the steps, and commit each of them."""
    state = train.elastic({"weights": []})
    while (step := len(state["weights"])) < STEPS:
        hooks.fire("before", step)
        state["weights"] = [*state["weights"], float(step)]
        state.commit()
        hooks.fire("after", step)


class FunctionSubject(Subject):
    def factory(self) -> FunctionReplicaFactory:
        return FunctionReplicaFactory()

    def call(self, number: int = 1) -> Call:
        """Return an attempt of the same run, because a second run would start from the beginning."""
        attempt = Attempt(run=1, number=number)
        task = (commit_steps, (self.hooks,))
        return Call(FunctionReplica.function, {"task": task, "attempt": attempt, "checkpoint": None})

    def weights(self, replica: Any) -> list[float]:
        content: list[float] = replica._commit.content["weights"]
        return content


SUBJECTS = {"torch": TorchSubject, "tf": TFSubject, "function": FunctionSubject}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from opened(request.param)


# A training function has no epochs, no validation, and no snapshots except its checkpoints, which it sends itself.
@pytest.fixture(params=["torch", "tf"])
def operators(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from opened(request.param)


def opened(name: str) -> Iterator[Subject]:
    handler = None if STOP_SIGNAL is None else signal.getsignal(STOP_SIGNAL)
    subject = SUBJECTS[name]()
    yield subject
    for replica in subject.made:
        replica.close()
    if STOP_SIGNAL is not None:
        signal.signal(STOP_SIGNAL, handler)


def undisturbed(subject: Subject) -> list[float]:
    """Return the weights after all steps without a fault."""
    other = type(subject)()
    replica = other.make()
    replica.run(other.call())
    replica.close()
    return other.weights(replica)


# -- one call -----------------------------------------------------------------------------------------


def test_a_call_makes_all_steps_and_counts_them(subject: Subject) -> None:
    replica = subject.make()
    assert replica.progress.step == 0
    assert not isinstance(replica.run(subject.call()), Interrupted)
    assert replica.progress.step == STEPS


def test_the_phase_is_idle_between_calls_also_after_an_error(subject: Subject) -> None:
    replica, phases = subject.make(), []
    subject.hooks.at("before", 1, lambda: phases.append(subject.control.phase))
    subject.hooks.at("before", 2, fail)
    with pytest.raises(PlannedError):
        replica.run(subject.call())
    assert phases and phases[0] != "idle"
    assert subject.control.phase == replica.progress.phase == "idle"


def test_steps_are_reported_while_they_are_made(subject: Subject) -> None:
    replica = subject.make()
    replica.run(subject.call())
    steps = [progress.step for progress, _ in subject.reports]
    assert steps == sorted(steps) and steps[-1] == STEPS


@pytest.mark.parametrize(("place", "committed"), [("before", 3), ("after", 4)])
def test_after_a_users_error_applied_steps_count(subject: Subject, place: str, committed: int) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    subject.hooks.at(place, 3, fail)
    with pytest.raises(PlannedError, match="planned"):
        replica.run(subject.call())
    assert replica.progress.step == committed
    replica.run(subject.call(2))
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


# -- stops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 4])
def test_a_planned_stop_is_at_its_step_and_the_same_call_continues(subject: Subject, step: int) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    subject.stop_at(step)
    outcome = replica.run(subject.call())
    assert isinstance(outcome, Interrupted) and outcome.asked
    assert replica.progress.step == outcome.progress.step == step
    subject.control.clear()
    replica.joined(RankInfo(generation=2))
    assert not isinstance(replica.run(subject.call()), Interrupted)
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


def test_an_interruption_ends_the_call_soon_without_losing_a_step(subject: Subject) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    subject.hooks.at("before", 2, subject.control.interrupt)
    outcome = replica.run(subject.call())
    assert isinstance(outcome, Interrupted) and not outcome.asked
    assert replica.progress.step in (2, 3)
    subject.control.clear()
    replica.joined(RankInfo(generation=2))
    replica.run(subject.call())
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


def test_an_interruption_before_the_call_makes_no_step(subject: Subject) -> None:
    replica = subject.make()
    subject.control.interrupt()
    outcome = replica.run(subject.call())
    assert isinstance(outcome, Interrupted) and not outcome.asked
    assert replica.progress.step == 0


# -- state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "after"])
def test_another_process_continues_from_the_state(subject: Subject, place: str) -> None:
    expected = undisturbed(subject)
    first = subject.make()
    subject.hooks.at(place, 3, fail)
    with pytest.raises(PlannedError):
        first.run(subject.call())
    second = subject.make()
    second.load(bytes(first.state()))
    assert second.progress.order == first.progress.order
    assert subject.weights(second) == pytest.approx(subject.weights(first))
    second.run(subject.call())
    assert second.progress.step == STEPS
    assert subject.weights(second) == pytest.approx(expected)


def test_a_state_is_a_copy(subject: Subject) -> None:
    replica = subject.make()
    subject.stop_at(2)
    replica.run(subject.call())
    state, weights = bytes(replica.state()), list(subject.weights(replica))
    subject.control.clear()
    replica.run(subject.call())
    other = subject.make()
    other.load(state)
    assert subject.weights(other) == pytest.approx(weights)


def test_partial_results_can_be_read_at_any_time(subject: Subject) -> None:
    replica, found = subject.make(), []
    found.append(replica.partial())
    subject.hooks.at("before", 2, lambda: found.append(replica.partial()))
    replica.run(subject.call())
    found.append(replica.partial())
    assert len(found) == 3 and all(each is None or isinstance(each, dict) for each in found)


def test_closing_twice_is_harmless(subject: Subject) -> None:
    replica = subject.make()
    replica.run(subject.call())
    replica.close()
    replica.close()


# -- operators only -----------------------------------------------------------------------------------


def test_a_call_that_is_done_is_not_repeated(operators: Subject) -> None:
    replica = operators.make()
    result = replica.run(operators.call())
    weights = operators.weights(replica)
    again = replica.run(operators.call())
    assert (result["epoch"], again["epoch"], replica.progress.step) == (1, 1, STEPS)
    assert operators.weights(replica) == weights
    assert replica.run(operators.call(2))["epoch"] == 2


def test_results_of_the_parts_of_a_call_add_up(operators: Subject) -> None:
    replica = operators.make()
    operators.stop_at(2)
    part = replica.run(operators.call()).value
    operators.control.clear()
    rest = replica.run(operators.call())
    assert (part["batch_count"], rest["batch_count"]) == (2, STEPS - 2)
    assert part["num_samples"] + rest["num_samples"] == 4 * STEPS


def test_a_number_of_steps_continues_in_the_epoch(operators: Subject) -> None:
    replica = operators.make()
    for number, (epoch, steps) in enumerate([(1, 4), (2, 8)]):
        given = {"call": number, "num_steps": 4, "profile": False, "info": None}
        assert replica.run(Call(ReplicaBase.train, given))["epoch"] == epoch
        assert replica.progress.step == steps


@pytest.mark.parametrize("how", ["error", "interruption"])
def test_a_validation_is_repeated_from_where_it_began(operators: Subject, how: str) -> None:
    replica = operators.make()
    first = replica.run(validation(1, 2))["first"]
    operators.hooks.at("validating", 0, fail if how == "error" else operators.control.interrupt)
    if how == "error":
        with pytest.raises(PlannedError):
            replica.run(validation(2, 2))
    else:
        assert isinstance(replica.run(validation(2, 2)), Interrupted)
    operators.control.clear()
    second = replica.run(validation(2, 2))["first"]
    assert second - first == pytest.approx(0.8), "the second one is eight rows later, and each row adds 0.1"
    assert replica.progress.step == 0


def test_a_validation_that_was_interrupted_is_repeated_in_another_process(operators: Subject) -> None:
    first = operators.make()
    seen = first.run(validation(1, 2))["first"]
    operators.hooks.at("validating", 0, operators.control.interrupt)
    assert isinstance(first.run(validation(2, 2)), Interrupted)
    operators.control.clear()
    second = operators.make()
    second.load(bytes(first.state()))
    assert second.run(validation(2, 2))["first"] - seen == pytest.approx(0.8)


@pytest.mark.parametrize(("every", "steps"), [("epoch", [STEPS]), (2, [2, 4, STEPS, STEPS]), (None, [])])
def test_snapshots_are_of_the_committed_state(operators: Subject, every: Any, steps: list[int]) -> None:
    operators.settings["snapshot_every"] = every
    sent: list[tuple[SnapshotUpload, bytes]] = []
    operators.control.upload = lambda message, *data: sent.append((message, b"".join(map(bytes, data))))
    replica = operators.make()
    replica.run(operators.call())
    replica.close()
    taken = iter(steps)  # one that could not be uploaded before the next was taken is left out
    assert all(message.progress.step in taken for message, _ in sent)
    assert [message.progress.step for message, _ in sent[-1:]] == steps[-1:]
    for message, data in sent[:1] + sent[-1:]:
        other = operators.make()
        other.load(data)
        assert other.progress.step == message.progress.step


def test_training_without_data_or_batches_is_an_error(operators: Subject) -> None:
    replica = operators.make()
    replica.run(Call(apply_operator, {"function": lambda operator: operator.register_data()}))
    for call in (operators.call(), validation(1)):
        with pytest.raises(ConfigError, match=r"needs data: call self\.register_data\("):
            replica.run(call)
    names = replica.data_names
    replica.run(
        Call(apply_operator, {"function": lambda op: op.register_data(**{name: [] for name in names.values()})})
    )
    for call, name in ((operators.call(2), names["train"]), (validation(2), names["validation"])):
        with pytest.raises(ConfigError, match=f"{name} returned no batch"):
            replica.run(call)


def test_functions_run_on_the_operator(operators: Subject) -> None:
    replica = operators.make()
    assert replica.run(Call(apply_operator, {"function": lambda operator: operator.world_size})) == 1
    with pytest.raises(PlannedError):
        replica.run(Call(apply_operator, {"function": lambda operator: fail()}))
    assert replica.run(operators.call())["batch_count"] == STEPS
