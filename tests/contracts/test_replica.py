"""The contract of a replica: what a worker relies on, for torch, TensorFlow and training functions, without Ray.

Each subject makes STEPS steps in one call. Its `weights` depend on every step and on their order, so a step that is
left out or made twice shows in them.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, train
from raysgd.config import ElasticConfig
from raysgd.core.measures.metrics import Measured
from raysgd.replica import snapshots
from tests.replicas import FunctionRank, Interrupted, tf_rank, torch_rank
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
        self.settings: dict[str, Any] = {}
        self.made: list[Any] = []

    def make(self) -> Any:
        replica = self.rank()
        self.made.append(replica)
        return replica

    def rank(self) -> Any:
        raise NotImplementedError

    def run(self, replica: Any, call: int = 1) -> Any:
        """Make the remaining steps. With a number that was used before, repeat that call."""
        return replica.train(call)

    def weights(self, replica: Any) -> list[float]:
        raise NotImplementedError


class Hooked:
    """The batch methods of an operator of either framework."""

    config: dict[str, Any]
    global_step: int

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.config["hooks"].fire("before", self.global_step)
        metrics = super().train_batch(batch, batch_info)  # type: ignore[misc]
        self.config["hooks"].fire("after", self.global_step)
        return metrics

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.config["hooks"].fire("validating", batch_info["batch_idx"])
        return {"first": float(batch[0][0, 0]), "num_samples": 1}

    def state_dict(self) -> dict[str, Any]:
        return {"own": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.config["hooks"].fire("loading", 0)


class HookedLine(Hooked, Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(*rows(4 * STEPS))
        return {name: DataLoader(data, batch_size=4) for name in ("train_loader", "validation_loader")}


class TorchSubject(Subject):
    def rank(self) -> Any:
        return torch_rank(HookedLine, {"hooks": self.hooks}, **self.settings)

    def weights(self, replica: Any) -> list[float]:
        flat: list[float] = torch.nn.utils.parameters_to_vector(replica.operator.model.parameters()).tolist()
        return flat


class TFSubject(Subject):
    def rank(self) -> Any:
        tf = pytest.importorskip("tensorflow")
        keras = pytest.importorskip("keras")
        from raysgd.tf import TrainingOperator

        class HookedKeras(Hooked, TrainingOperator):
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

        return tf_rank(HookedKeras, {"hooks": self.hooks}, **self.settings)

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
    def rank(self) -> Any:
        return FunctionRank()

    def run(self, replica: Any, call: int = 1) -> Any:
        """Make another attempt of the same run, because a second run would start from the beginning."""
        return replica.run(commit_steps, self.hooks, number=call)

    def weights(self, replica: Any) -> list[float]:
        content: list[float] = replica.committed()["weights"]
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
    subject = SUBJECTS[name]()
    yield subject
    for replica in subject.made:
        replica.close()


def undisturbed(subject: Subject) -> list[float]:
    """Return the weights after all steps without a fault."""
    other = type(subject)()
    replica = other.make()
    other.run(replica)
    replica.close()
    return other.weights(replica)


# -- one call -----------------------------------------------------------------------------------------


def test_the_phase_is_idle_between_calls_also_after_an_error(subject: Subject) -> None:
    replica, phases = subject.make(), []
    subject.hooks.at("before", 1, lambda: phases.append(replica.phase))
    subject.hooks.at("before", 2, fail)
    with pytest.raises(PlannedError):
        subject.run(replica)
    assert phases and phases[0] != "idle"
    assert replica.phase == replica.progress.phase == "idle"


def test_steps_are_counted_and_reported_while_they_are_made(subject: Subject) -> None:
    replica = subject.make()
    assert replica.progress.step == 0
    assert not isinstance(subject.run(replica), Interrupted)
    assert replica.progress.step == STEPS
    steps = [progress.step for progress, _ in replica.reports]
    assert steps == sorted(steps) and steps[-1] == STEPS


@pytest.mark.parametrize(("place", "committed"), [("before", 3), ("after", 4)])
def test_after_a_users_error_applied_steps_count(subject: Subject, place: str, committed: int) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    subject.hooks.at(place, 3, fail)
    with pytest.raises(PlannedError, match="planned"):
        subject.run(replica)
    assert replica.progress.step == committed
    subject.run(replica, 2)
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


# -- stops --------------------------------------------------------------------------------------------


def test_a_planned_stop_is_at_its_step_and_the_same_call_continues(subject: Subject) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    replica.stop_at(4)
    outcome = subject.run(replica)
    assert isinstance(outcome, Interrupted) and outcome.asked
    assert replica.progress.step == outcome.progress.step == 4
    replica.rejoin()
    assert not isinstance(subject.run(replica), Interrupted)
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


def test_an_interruption_ends_the_call_soon_without_losing_a_step(subject: Subject) -> None:
    expected = undisturbed(subject)
    replica = subject.make()
    subject.hooks.at("before", 2, replica.interrupt)
    outcome = subject.run(replica)
    assert isinstance(outcome, Interrupted) and not outcome.asked
    assert replica.progress.step in (2, 3)
    replica.rejoin()
    subject.run(replica)
    assert replica.progress.step == STEPS
    assert subject.weights(replica) == pytest.approx(expected)


def test_an_interruption_before_the_call_makes_no_step(subject: Subject) -> None:
    replica = subject.make()
    replica.interrupt()
    outcome = subject.run(replica)
    assert isinstance(outcome, Interrupted) and not outcome.asked
    assert replica.progress.step == 0


# -- state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "after"])
def test_another_process_continues_from_the_state(subject: Subject, place: str) -> None:
    expected = undisturbed(subject)
    first = subject.make()
    subject.hooks.at(place, 3, fail)
    with pytest.raises(PlannedError):
        subject.run(first)
    second = subject.make()
    second.load(first.state())
    assert second.progress.order == first.progress.order
    assert subject.weights(second) == pytest.approx(subject.weights(first))
    subject.run(second)
    assert second.progress.step == STEPS
    assert subject.weights(second) == pytest.approx(expected)


def test_a_state_of_which_a_part_was_loaded_is_none(operators: Subject) -> None:
    expected = undisturbed(operators)
    first, second, new = operators.make(), operators.make(), operators.make()
    first.stop_at(2)
    operators.run(first)
    operators.hooks.at("loading", 0, fail)
    with pytest.raises(PlannedError):
        second.load(first.state())
    assert second.progress.order < new.progress.order < first.progress.order, "no other worker takes it"
    third = operators.make()
    third.load(second.state())
    assert second.progress.undefined and third.progress.undefined, "nor does a worker that joins it have one"
    second.load(first.state())
    operators.run(second)
    assert operators.weights(second) == pytest.approx(expected)


def test_a_state_is_a_copy(subject: Subject) -> None:
    replica = subject.make()
    replica.stop_at(2)
    subject.run(replica)
    state, weights = replica.state(), list(subject.weights(replica))
    replica.clear()
    subject.run(replica)
    other = subject.make()
    other.load(state)
    assert subject.weights(other) == pytest.approx(weights)


def test_partial_results_can_be_read_at_any_time(subject: Subject) -> None:
    replica, found = subject.make(), []
    found.append(replica.partial())
    subject.hooks.at("before", 2, lambda: found.append(replica.partial()))
    subject.run(replica)
    found.append(replica.partial())
    assert len(found) == 3 and all(each is None or isinstance(each, Measured) for each in found)


# -- operators only -----------------------------------------------------------------------------------


def test_a_call_that_is_done_is_not_repeated(operators: Subject) -> None:
    replica = operators.make()
    result = operators.run(replica)
    weights = operators.weights(replica)
    again = operators.run(replica)
    assert (result["epoch"], again["epoch"], replica.progress.step) == (1, 1, STEPS)
    assert operators.weights(replica) == weights
    assert operators.run(replica, 2)["epoch"] == 2


def test_results_of_the_parts_of_a_call_add_up(operators: Subject) -> None:
    replica = operators.make()
    replica.stop_at(2)
    part = operators.run(replica).value.metrics
    replica.clear()
    rest = operators.run(replica)
    assert (part["batch_count"], rest["batch_count"]) == (2, STEPS - 2)
    assert part["num_samples"] + rest["num_samples"] == 4 * STEPS


def test_a_number_of_steps_continues_in_the_epoch(operators: Subject) -> None:
    replica = operators.make()
    for number, (epoch, steps) in enumerate([(1, 4), (2, 8)]):
        assert replica.train(number, 4)["epoch"] == epoch
        assert replica.progress.step == steps


@pytest.mark.parametrize("how", ["error", "interruption"])
def test_each_validation_begins_with_the_first_batch(operators: Subject, how: str) -> None:
    replica = operators.make()
    first = replica.validate(1, 2)["first"]
    operators.hooks.at("validating", 0, fail if how == "error" else replica.interrupt)
    if how == "error":
        with pytest.raises(PlannedError):
            replica.validate(2, 2)
    else:
        assert isinstance(replica.validate(2, 2), Interrupted)
    replica.clear()
    assert [replica.validate(number, 2)["first"] for number in (2, 3)] == [first, first]
    assert replica.progress.step == 0


def test_a_validation_begins_with_the_first_batch_in_another_process(operators: Subject) -> None:
    first = operators.make()
    seen = first.validate(1, 2)["first"]
    operators.hooks.at("validating", 0, first.interrupt)
    assert isinstance(first.validate(2, 2), Interrupted)
    first.clear()
    second = operators.make()
    second.load(first.state())
    assert second.validate(2, 2)["first"] == seen


@pytest.mark.parametrize(("every", "steps"), [("epoch", [STEPS]), (2, [2, 4, STEPS, STEPS]), (None, [])])
def test_snapshots_are_of_the_committed_state(operators: Subject, every: Any, steps: list[int]) -> None:
    operators.settings["elastic"] = ElasticConfig(snapshot_every=every)
    replica = operators.make()
    operators.run(replica)
    replica.close()
    taken = iter(steps)  # one that could not be uploaded before the next was taken is left out
    assert all(progress.step in taken for progress, _ in replica.uploads)
    assert [progress.step for progress, _ in replica.uploads[-1:]] == steps[-1:]
    for progress, data in replica.uploads[:1] + replica.uploads[-1:]:
        other = operators.make()
        other.load(data)
        assert other.progress.step == progress.step


def test_no_step_waits_until_a_snapshot_is_packed_which_has_the_bits_of_its_step(
    operators: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SMALL", 0)  # all count as large
    operators.settings["elastic"] = ElasticConfig(snapshot_every=2)
    replica, before = operators.make(), operators.make()
    before.train(1, 2)
    made = threading.Event()
    replica.pack_snapshots_when(made)
    operators.hooks.at("after", STEPS - 1, made.set)
    operators.run(replica)
    replica.close()
    progress, data = replica.uploads[0]
    assert progress.step == 2 and 4 not in [progress.step for progress, _ in replica.uploads], "there was no room"
    other = operators.make()
    other.load(data)
    assert operators.weights(other) == operators.weights(before) != operators.weights(replica)


def test_training_without_data_or_batches_is_an_error(operators: Subject) -> None:
    replica = operators.make()
    replica.apply(lambda operator: operator.register_data())
    for call in (replica.train, replica.validate):
        with pytest.raises(ConfigError, match=r"needs data: call self\.register_data\("):
            call(1)
    names = replica.data_names
    replica.apply(lambda op: op.register_data(**{name: [] for name in names.values()}))
    for call, name in ((replica.train, names["train"]), (replica.validate, names["validation"])):
        with pytest.raises(ConfigError, match=f"{name} returned no batch"):
            call(2)


def test_functions_run_on_the_operator(operators: Subject) -> None:
    replica = operators.make()
    assert replica.apply(lambda operator: operator.world_size) == 1
    with pytest.raises(PlannedError):
        replica.apply(lambda operator: fail())
    assert operators.run(replica)["batch_count"] == STEPS
