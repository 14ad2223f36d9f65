"""A training function in its replica, without Ray or an engine. The control channel records the messages."""

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import CheckpointError, train
from raysgd.errors import ConfigError
from raysgd.train.elastic_state import ByReference
from raysgd.train.sessions import OutsideSession
from tests.replicas import FunctionRank, Interrupted


class Worker(FunctionRank):
    """The second of three."""

    def __init__(self, **more: Any) -> None:
        super().__init__(rank=1, ranks=3, local_rank=1, local_world_size=2, node_rank=0, **more)


def test_report_accepts_a_dict_or_keywords() -> None:
    def function() -> None:
        train.report(loss=1, step=0)
        train.report({"loss": 2})
        train.report({"loss": 3}, checkpoint=train.Checkpoint.from_dict({"epoch": 3}))
        train.report(metrics=4, checkpoint=5)

    worker = Worker()
    worker.run(function)
    assert [(m.kind, m.rank, m.run, m.attempt) for m, _, _ in worker.messages] == [("report", 1, 1, 1)] * 4
    shown = [{k: v for k, v in metrics.items() if not k.startswith("_")} for _, metrics, _ in worker.messages]
    assert shown == [{"loss": 1, "step": 0}, {"loss": 2}, {"loss": 3}, {"metrics": 4, "checkpoint": 5}]
    assert [payload and payload["epoch"] for _, _, payload in worker.messages] == [None, None, 3, None]


class Slow(FunctionRank):
    """Notes how many reports are sent at the same time."""

    sending = most = 0

    def _deliver(self, message: Any, body: Any) -> None:
        self.sending += 1
        self.most = max(self.most, self.sending)
        time.sleep(0.01)
        self.sending -= 1
        super()._deliver(message, body)


def test_threads_send_one_report_after_the_other() -> None:
    """A round has one report of each rank."""

    def function() -> None:
        threads = [threading.Thread(target=train.report, kwargs={"step": step}) for step in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    worker = Slow()
    worker.run(function)
    assert (worker.most, sorted(metrics["step"] for _, metrics, _ in worker.messages)) == (1, [0, 1, 2, 3])


def test_detailed_values_are_added_to_reports() -> None:
    worker = Worker()
    worker.run(lambda: train.report(), detailed=True)
    assert {"_date", "_hostname", "_node_ip", "_pid", "_time_total_s"} <= set(worker.messages[0][1])


def test_a_saved_checkpoint_is_a_copy() -> None:
    def function() -> Any:
        weights = [1]
        train.save_checkpoint(weights=weights)
        weights.append(2)
        found = train.load_checkpoint()
        assert found is not None
        return found["weights"]

    assert Worker().run(function) == [1]


@pytest.mark.parametrize("given", [None, 1])
def test_a_rank_that_reports_no_checkpoint_has_that_from_the_beginning(given: int | None) -> None:
    def function() -> Any:
        mine = train.Checkpoint.from_dict({"epoch": 2}) if train.world_rank() == 0 else None
        train.report({}, checkpoint=mine)
        return train.load_checkpoint()

    began = None if given is None else train.Checkpoint.from_dict({"epoch": given}).to_bytes()
    first, second = (FunctionRank(rank, 2).run(function, checkpoint=began) for rank in range(2))
    assert first["epoch"] == 2 and (second and second["epoch"]) == given


def commits() -> None:
    train.elastic({"number": 0}).commit()


@pytest.mark.parametrize("kept", ["nothing", "a checkpoint", "a commit"])
def test_a_function_that_begins_again_says_so(kept: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = train.Checkpoint.from_dict({"epoch": 1}).to_bytes() if kept == "a checkpoint" else None
    worker = FunctionRank()
    worker.run(commits if kept == "a commit" else print)
    worker.run(print, checkpoint=saved, number=2)
    said = "starts again from its beginning, because it has saved no checkpoint"
    assert [said in each for each in caplog.messages] == [True] * (kept == "nothing")


def test_dataset_shards() -> None:
    shards = tuple({"train": [rank], "test": [-rank]} for rank in range(3))
    assert Worker().run(lambda: train.get_dataset_shard("test"), shards=shards) == [-1]
    assert Worker().run(lambda: train.get_dataset_shard(), shards=({}, {"train": [5]}, {})) == [5]
    assert Worker().run(lambda: train.get_dataset_shard("train")) is None
    for name in ("valid", None):
        with pytest.raises(ValueError, match="test, train"):
            Worker().run(lambda name=name: train.get_dataset_shard(name), shards=shards)


@pytest.mark.parametrize(
    "call",
    [
        lambda: train.report(a=1),
        lambda: train.save_checkpoint(a=1),
        train.load_checkpoint,
        train.get_checkpoint,
        train.world_rank,
        train.local_rank,
        train.world_size,
        train.get_dataset_shard,
        train.get_context,
        lambda: train.elastic({"a": 1}),
        lambda: train.once(lambda: 1),
    ],
)
def test_calls_outside_a_training_function_warn(call: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="outside a training function") as caught:
        call()
    assert [Path(each.filename) for each in caught] == [Path(__file__)], "at the line of the call"


def test_after_a_function_no_session_is_left() -> None:
    worker = Worker()
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 / 0)
    assert train.world_rank() == 0


def test_a_function_can_be_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a test of the function: it is the only worker, and what it reports goes nowhere."""
    monkeypatch.setattr(OutsideSession, "_kept", (None, None))  # the function turns mixed precision on

    def function(config: dict[str, Any]) -> Any:
        found = train.load_checkpoint()
        start = 0 if found is None else found["epoch"] + 1
        train.torch.accelerate(amp=True)
        model = train.torch.prepare_model(torch.nn.Linear(2, 1))
        loader = train.torch.prepare_data_loader(torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
        state = train.elastic({"model": model, "batches": 0})
        for batch in loader:
            train.torch.backward(model(batch).sum())
            state["batches"] += 1
            state.commit()
        train.report(loss=0.5)
        train.save_checkpoint(epoch=start)
        return start, state["batches"], train.world_rank(), train.world_size(), train.get_dataset_shard("train")

    for _ in range(2):
        assert function({}) == (0, 3, 0, 1, None), "the second call does not resume the first one"
    with pytest.raises(TypeError, match="loss"):
        train.report(loss=threading.Lock())


def test_the_session_of_air() -> None:
    from raysgd.air import Checkpoint, session

    def function() -> tuple[Any, ...]:
        session.report({"loss": 1}, checkpoint=Checkpoint.from_dict({"epoch": 3}))
        found = session.get_checkpoint()
        assert found is not None
        ranks = session.get_world_rank(), session.get_world_size(), session.get_local_rank()
        node = session.get_local_world_size(), session.get_node_rank()
        names = session.get_trial_name(), session.get_trial_id(), session.get_trial_dir(), session.get_experiment_name()
        more = session.get_trial_resources(), session.get_metadata()
        return found.to_dict()["epoch"], ranks, node, names, more, session.get_dataset_shard("train")

    worker = Worker()
    trial = {"trial_name": "t", "trial_id": "1", "trial_dir": "/there", "experiment_name": "e", "trial_resources": {}}
    shards = ({"train": "0"}, {"train": "1"}, {"train": "2"})
    found = worker.run(function, trial=trial, metadata={"a": 1}, shards=shards)
    assert found == (3, (1, 3, 1), (2, 0), ("t", "1", "/there", "e"), ({}, {"a": 1}), "1")
    assert [(message.kind, metrics["loss"]) for message, metrics, _ in worker.messages] == [("report", 1)]
    assert train.session.report is session.report


def test_a_thread_of_the_function_can_report() -> None:
    def function() -> None:
        thread = threading.Thread(target=train.report, kwargs={"a": 1})
        thread.start()
        thread.join()

    worker = Worker()
    worker.run(function)
    assert len(worker.messages) == 1


def test_a_function_has_one_elastic_state() -> None:
    def function() -> None:
        train.elastic({"first": 0}).commit()
        train.elastic({"second": 0})

    with pytest.raises(ConfigError, match=r"has called train.elastic\(\) twice"):
        Worker().run(function)


# -- stopping and resuming ----------------------------------------------------------------------------


def interrupted_once_begun(worker: Worker) -> Callable[[], None]:
    """Return what a function calls when it has begun. The worker is interrupted then."""
    begun = threading.Event()
    threading.Thread(target=lambda: begun.wait(60) and worker.interrupt()).start()
    return begun.set


def test_an_interrupt_stops_a_function_that_makes_no_raysgd_calls_and_catches_exceptions() -> None:
    worker = Worker()
    say_begun, began = interrupted_once_begun(worker), time.monotonic()

    def function() -> str:
        try:
            say_begun()
            time.sleep(30)
        except Exception:
            return "swallowed"
        return "slept"

    outcome = worker.run(function)
    assert isinstance(outcome, Interrupted)
    assert not outcome.asked
    assert time.monotonic() - began < 20


def test_a_function_that_is_stopped_while_torch_changes_its_modes_begins_again_with_those_from_before() -> None:
    worker, modes, layer = Worker(), [], torch.nn.Linear(1, 1, bias=False)

    def function() -> None:
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        for weight in (1.0, 2.0):  # a copy of the first one would stay, if torch took a block for an inner one
            torch.nn.init.constant_(layer.weight, weight)
            with torch.autocast("cpu", torch.bfloat16):
                modes.append(float(layer(torch.ones(1))))
        say_begun = interrupted_once_begun(worker)
        torch.no_grad().__enter__()  # as if it was stopped before the block began
        torch.autocast("cpu", torch.float16).__enter__()
        say_begun()
        time.sleep(30)

    for _ in range(2):
        assert isinstance(worker.run(function), Interrupted)
        worker.clear()
    assert modes == [(True, False, torch.bfloat16), 1.0, 2.0] * 2


@pytest.mark.parametrize(
    ("module", "seen"), [("ray.cloudpickle.cloudpickle", "Stopped"), ("ray.data", "KeyboardInterrupt")]
)
def test_an_interrupt_in_code_of_ray_is_no_exit_of_the_function(module: str, seen: str) -> None:
    """Lightning ends its process after a KeyboardInterrupt, which is meant for `ray.get` only: not for a function that is pickled."""
    worker, raised = Worker(), list[str]()
    place: dict[str, Any] = {"__name__": module, "time": time}
    exec("def wait():\n    time.sleep(30)", place)

    def function() -> None:
        threading.Timer(0.2, worker.interrupt).start()
        try:
            place["wait"]()
        except BaseException as error:
            raised.append(type(error).__name__)
            if isinstance(error, KeyboardInterrupt):
                sys.exit(1)
            raise

    assert isinstance(worker.run(function), Interrupted)
    assert raised == [seen]


def test_an_interrupt_that_the_function_catches_is_raised_again_at_the_next_report() -> None:
    worker = Worker()
    say_begun = interrupted_once_begun(worker)

    def function() -> None:
        try:
            say_begun()
            time.sleep(30)
        except BaseException:
            train.report(a=1)

    assert isinstance(worker.run(function), Interrupted)
    assert worker.messages == []


def test_an_interrupt_does_not_truncate_a_message() -> None:
    worker, published = Worker(), []

    def publish() -> None:
        worker.interrupt()
        time.sleep(0.2)
        published.append(1)

    worker.on_report = publish
    assert isinstance(worker.run(lambda: train.save_checkpoint(a=1)), Interrupted)
    assert published == [1]


def test_an_interrupt_between_calls_stops_nothing() -> None:
    worker = Worker()
    worker.interrupt()
    worker.clear()
    assert worker.run(lambda: 5) == 5


def test_another_run_begins_without_the_commits_of_the_one_before() -> None:
    def function() -> Any:
        state = train.elastic({"epoch": 0})
        state["epoch"] += 1
        state.commit()
        return state["epoch"]

    worker = Worker()
    assert [worker.run(function, run=run, number=number) for run, number in ((1, 1), (1, 2), (2, 1))] == [1, 2, 1]


def counts_itself(state: Any) -> None:
    for epoch in range(2):
        state["epoch"] = epoch
        state.commit()


def begins_with_it(state: Any) -> None:
    state.sync()
    while state["epoch"] < 2:
        state["epoch"] += 1
        state.commit()
    state.commit()


def counts_nothing(state: Any) -> None:
    state["loss"] = 0.5
    state.commit()


@pytest.mark.parametrize(
    ("loop", "given", "lines"),
    [
        (counts_itself, {"epoch": 0}, 1),
        (begins_with_it, {"epoch": 0}, 0),
        (counts_nothing, {"loss": 1.0}, 0),
        (lambda state: state.commit(), {"model": torch.nn.Linear(1, 1)}, 0),
    ],
)
def test_a_function_that_does_not_begin_where_its_state_is_is_named_once(
    loop: Any, given: dict[str, Any], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker = FunctionRank()
    for number in range(1, 3):
        worker.run(lambda: loop(train.elastic(given)), number=number)
        said = "commits without having read state['epoch']: if it counts in variables of its own, it repeats"
        assert [said in each for each in caplog.messages] == [True] * (lines * (number - 1))


@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_reported_after_the_last_commit_is_not_reported_again(replaced: bool) -> None:
    def function(until: int) -> None:
        train.report(epoch=-1)
        state = train.elastic({"epoch": 0, "batch": 0})
        while state["epoch"] < until:
            for _ in range(state["batch"], 2):
                state["batch"] += 1
                state.commit()
            state["batch"], state["epoch"] = 0, state["epoch"] + 1
            train.report(epoch=state["epoch"])

    worker = again = Worker()
    worker.run(function, 2)
    reported = len(worker.messages)
    if replaced:  # its state goes to a new process
        again = Worker()
        again.load(worker.state())
        again.messages = worker.messages
    again.run(function, 4, number=2, reports=reported)
    assert [metrics["epoch"] for _, metrics, _ in again.messages] == [-1, 1, 2, -1, 3, 4]
    assert [metrics["_training_iteration"] for _, metrics, _ in again.messages] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("every", [False, True], ids=["at the top", "in every epoch"])
def test_a_sync_that_changes_nothing_leaves_the_reports_to_repeat(every: bool) -> None:
    def function(until: int) -> None:
        model = torch.nn.Linear(1, 1)
        data = DataLoader(TensorDataset(torch.zeros(2)), shuffle=True)
        loader = train.torch.elastic_data_loader(data)
        state = train.elastic({"model": model, "loader": loader, "epoch": 0})
        state.sync()
        while state["epoch"] < until:
            if every:
                state.sync()
            for _ in loader:
                with torch.no_grad():
                    model.weight.add_(1)
            train.report(epoch=state["epoch"])
            state["epoch"] += 1
            if state["epoch"] < until:
                state.commit()

    first, again = FunctionRank(), FunctionRank()
    first.run(function, 2)  # ends between a report and its commit
    again.load(first.state())
    again.run(function, 4, number=2, reports=2)
    assert [metrics["epoch"] for _, metrics, _ in first.messages + again.messages] == [0, 1, 2, 3]


def test_a_report_after_the_next_commit_is_new() -> None:
    def function(until: int) -> None:
        state = train.elastic({"batch": 0})
        while state["batch"] < until:
            state["batch"] += 1
            state.commit()
            train.report(batch=state["batch"])

    worker = Worker()
    worker.run(function, 2)
    worker.run(function, 3, number=2, reports=len(worker.messages))
    assert [metrics["batch"] for _, metrics, _ in worker.messages] == [1, 2, 3]


def test_a_checkpoint_of_one_rank_is_no_boundary_between_commits() -> None:
    """Otherwise that rank would stop for a new worker at an earlier commit than the others."""

    def function() -> None:
        train.save_checkpoint(epoch=0)
        state = train.elastic({"batch": 0})
        for _ in range(2):
            state.commit()
            train.report({}, checkpoint=train.Checkpoint.from_dict({}) if train.world_rank() == 0 else None)

    ranks = [FunctionRank(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.run(function)
    assert [rank.progress.step for rank in ranks] == [3, 3]


def test_content_by_reference_is_copied_when_the_function_ends() -> None:
    weights = torch.zeros(2)

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"weights": ByReference({"one": weights}), "steps": [1]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state["weights"].content["one"].tolist())

    def function() -> None:
        state = train.elastic({"part": Part()})
        state.commit()
        weights.add_(1)  # as `optimizer.step()` does

    loaded: list[list[float]] = []
    worker, replacement = Worker(), Worker()
    worker.run(function)
    weights.add_(5)
    replacement.load(worker.state())
    for rank in (worker, replacement):
        rank.run(lambda: train.elastic({"part": Part()}) and None, number=2)
    assert loaded == [[1, 1], [1, 1]]


def makes_at_the_second_try() -> Any:
    def fail() -> None:
        raise OSError("the network drive was away")

    with suppress(OSError):
        train.once(fail, "tried")
    return train.once(lambda: "made", "tried")


def test_an_object_is_made_once_for_all_attempts_of_a_run() -> None:
    made: list[str] = []

    def load() -> list[str]:
        made.append("load")
        return made

    def function() -> Any:
        assert train.once(load) is made
        return train.once(lambda: made.append("other") or "other", "other")

    worker = Worker()
    for run, number in ((1, 1), (1, 2), (2, 1)):
        assert worker.run(function, run=run, number=number) == "other"
    assert made == ["load", "other"] * 2
    with pytest.raises(ValueError, match="twice with the name 'one'"):
        worker.run(lambda: [train.once(lambda: 1, "one") for _ in range(2)])
    assert worker.run(makes_at_the_second_try) == "made"
    with pytest.raises(ValueError, match="takes a function"):
        worker.run(lambda: train.once(5))  # type: ignore[arg-type]


def test_accelerate_forgets_the_ranks_before_each_attempt() -> None:
    pytest.importorskip("accelerate")

    def function() -> bool:
        from accelerate.state import PartialState

        known = bool(PartialState._shared_state)
        PartialState(cpu=True)
        return known

    worker = Worker()
    assert [worker.run(function, number=number) for number in range(2)] == [False, False]


def test_a_commit_has_the_versions_of_a_models_modules() -> None:

    class Newer(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *args: Any) -> None:
            loaded.append(local.get("version"))
            super()._load_from_state_dict(state, prefix, local, *args)

    loaded: list[int | None] = []
    replacement = Worker()
    worker = Worker()
    worker.run(lambda: train.elastic({"model": Newer(1, 1)}).commit())
    replacement.load(worker.state())
    replacement.run(lambda: train.elastic({"model": Newer(1, 1)}) and None, number=2)
    assert loaded == [2]


def test_restore_discards_uncommitted_changes() -> None:
    def function() -> list[int]:
        state = train.elastic({"numbers": [1]})
        state["numbers"].append(2)
        state.commit()
        state["numbers"].append(3)
        state.restore()
        return list(state["numbers"])

    assert Worker().run(function) == [1, 2]


class Uncopied(dict[str, Any]):
    """A dictionary that cannot be copied or pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


def test_a_commit_keeps_the_classes_of_dictionaries() -> None:
    weights = torch.zeros(1)

    def function(until: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        schedules = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2]) for _ in range(2)]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[3])
        own = {"labels": Counter(a=1), "lists": defaultdict(list, a=[weights]), "other": Uncopied(a=weights)}
        state = train.elastic({**own, "schedule": schedule, "steps": 0})
        while state["steps"] < until:
            state["labels"][state["steps"]] += 1
            state["lists"][state["steps"]].append(1)
            optimizer.step()
            schedule.step()
            state["steps"] += 1
            state.commit()
            weights.add_(1)
        return len(state["labels"]), len(state["lists"]), float(state["lists"]["a"][0]), float(state["other"]["a"])

    worker, again = Worker(), Worker()
    worker.run(function, 2)
    again.load(worker.state())
    assert again.run(function, 4, number=2) == (5, 5, 1.0, 1.0)


def test_invalid_arguments_of_elastic_are_refused() -> None:
    def changed() -> None:
        train.elastic({"other": 1})

    worker = Worker()
    worker.run(lambda: train.elastic({"a": 1}).commit())
    with pytest.raises(ValueError, match="pass the same names each time"):
        worker.run(changed, number=2)
    with pytest.raises(ValueError, match="takes a dict"):
        Worker().run(lambda: train.elastic([1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not one of the plain values"):
        Worker().run(lambda: train.elastic({"a": 1}).__setitem__("b", 2))


def test_sync_of_several_workers_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        Worker().run(lambda: train.elastic({"a": 1}).sync())
    assert FunctionRank().run(lambda: train.elastic({"a": 1}).sync()) is None


def test_a_folder_is_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("mine")
    payload = train.Checkpoint.from_directory(tmp_path).to_bytes()

    def function() -> list[Any]:
        found = [train.get_checkpoint() for _ in range(2)]
        return [each and (each.path, Path(str(each.path), "words").read_text()) for each in found]

    worker = Worker()
    first, second = worker.run(function, checkpoint=payload)
    assert first == second and first[1] == "mine"
    worker.close()


class Custom:
    """A type that needs trust."""


def test_a_checkpoint_from_a_file_is_checked_before_it_is_reported(tmp_path: Path) -> None:
    foreign, plain = tmp_path / "foreign", tmp_path / "plain"
    train.Checkpoint.from_dict({"own": Custom()}).to_uri(foreign)
    train.Checkpoint.from_dict({"epoch": 3}).to_uri(plain)

    def function(path: Path, trusted: bool) -> None:
        train.report({}, checkpoint=train.Checkpoint(path, trusted=trusted))

    worker = Worker()
    with pytest.raises(CheckpointError, match=r"Custom.*trusted=True"):
        worker.run(function, foreign, False)
    assert worker.messages == [], "the checkpoint was not sent"
    worker.run(function, foreign, True)
    worker.run(function, plain, False, metadata={"who": "me"})
    assert [payload and payload.get("epoch") for _, _, payload in worker.messages] == [None, 3]
