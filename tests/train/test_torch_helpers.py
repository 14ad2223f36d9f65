"""`train.torch`: models, loaders, mixed precision and seeds, in functions of one rank (in this process) and of two."""

import copy
import json
import math
import random
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raysgd import ConfigError, train
from raysgd.torch.step.precision import Fp16
from raysgd.train import Trainer, in_trial, loaders
from raysgd.train.sessions import OutsideSession, current
from tests.replicas import FunctionRank, in_function

DATA = TensorDataset(torch.arange(10.0).unsqueeze(1))


def test_the_model_of_one_worker_is_not_wrapped() -> None:
    model = nn.Linear(1, 1)
    assert in_function(lambda: train.torch.prepare_model(model)) is model
    assert in_function(train.torch.get_device) == torch.device("cpu")


def test_a_prepared_loader_keeps_its_options_and_reads_one_part() -> None:
    seen: list[float] = []
    for rank in range(2):
        loader = DataLoader(DATA, batch_size=2, drop_last=True, num_workers=0)
        prepared = in_function(lambda loader=loader: train.torch.prepare_data_loader(loader), rank=rank, ranks=2)
        assert (prepared.batch_size, prepared.drop_last, prepared.dataset) == (2, True, DATA)
        assert len(prepared) == 2
        batches = [batch.flatten().tolist() for (batch,) in prepared]
        assert [len(batch) for batch in batches] == [2, 2]
        seen += [value for batch in batches for value in batch]
    assert len(set(seen)) == 8


def test_items_that_are_batches_are_divided_too() -> None:
    items = DataLoader(DATA, batch_size=None)
    parts = [
        [int(row) for (row,) in in_function(lambda: train.torch.prepare_data_loader(items), rank=rank, ranks=2)]
        for rank in range(2)
    ]
    assert parts == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_a_shuffling_loader_has_another_order_in_each_epoch() -> None:
    def epochs(rank: int) -> list[list[float]]:
        loader = DataLoader(DATA, batch_size=5, shuffle=True)
        prepared = in_function(lambda: train.torch.prepare_data_loader(loader), rank=rank, ranks=2)
        return [[value for (batch,) in prepared for value in batch.flatten().tolist()] for _ in range(3)]

    first, second = epochs(0), epochs(1)
    for mine, others in zip(first, second, strict=True):
        assert Counter(mine + others) == Counter(range(10)), "each sample is on one rank"
    assert first[0] != first[1]


@pytest.mark.parametrize("transfers", [True, False])
def test_auto_transfer_sends_the_next_batch_while_one_is_used(monkeypatch: pytest.MonkeyPatch, transfers: bool) -> None:
    """With a carrier like that of a GPU."""
    events: list[str] = []

    class Carrier:
        def __init__(self, device: Any, *, ahead: bool = False, **options: Any) -> None:
            self.ahead = ahead

        def send(self, batch: Any) -> Any:
            events.append(f"send {int(batch[0][0])}")
            return batch

        def arrived(self, sent: Any) -> Any:
            return sent

    monkeypatch.setattr(loaders, "make_carrier", Carrier)
    loader = DataLoader(DATA, batch_size=5)
    prepared = in_function(lambda: train.torch.prepare_data_loader(loader, auto_transfer=transfers))
    for (batch,) in prepared:
        events.append(f"use {int(batch[0])}")
    expected = ["send 0", "send 5", "use 0", "use 5"] if transfers else ["send 0", "use 0", "send 5", "use 5"]
    assert events == expected


def test_traces_are_written_on_the_worker_too(tmp_path: Path) -> None:
    def profiled() -> dict[str, Any]:
        profiler = train.torch.TorchWorkerProfiler(trace_dir=tmp_path / "traces")
        with torch.profiler.profile(on_trace_ready=profiler.trace_handler):
            torch.ones(3, 3) @ torch.ones(3, 3)
        return profiler.get_and_clear_profile_traces()

    assert in_function(profiled)
    (path,) = (tmp_path / "traces").iterdir()
    assert "aten::mm" in {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_loaders_that_are_not_divided() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(4))

    stream = DataLoader(Stream(), batch_size=2)
    assert [batch.tolist() for batch in in_function(lambda: train.torch.prepare_data_loader(stream), ranks=2)] == [
        [0, 1],
        [2, 3],
    ]
    complete = DataLoader(DATA, batch_size=5)
    prepared = in_function(lambda: train.torch.prepare_data_loader(complete, add_dist_sampler=False), ranks=2)
    assert len(prepared) == 2
    some = RandomSampler(DATA, replacement=True, num_samples=4), SequentialSampler(range(4))
    samplers = SubsetRandomSampler([1, 2]), WeightedRandomSampler([1.0] * 10, 5), *some
    in_batches = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=False))
    for own in (in_batches, *(DataLoader(DATA, batch_size=5, sampler=sampler) for sampler in samplers)):
        with pytest.raises(ValueError, match="add_dist_sampler=False"):
            in_function(lambda own=own: train.torch.prepare_data_loader(own), ranks=2)
    with pytest.raises(ValueError, match="takes a torch DataLoader"):
        in_function(lambda: train.torch.prepare_data_loader([1, 2]))


def test_mixed_precision() -> None:
    def function() -> tuple[Any, ...]:
        train.torch.accelerate(amp=True)
        types: list[torch.dtype] = []
        model = train.torch.prepare_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        model[0].register_forward_hook(lambda module, args, output: types.append(output.dtype))
        optimizer = train.torch.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = model[0].weight.detach().clone()
        output = model(torch.ones(2, 4))
        train.torch.backward(output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return (
            types,
            output.dtype,
            model[0].weight.dtype,
            bool((model[0].weight != before).any()),
            list(model.state_dict()),
        )

    types, output, weights, moved, names = in_function(function)
    assert types == [torch.bfloat16]
    assert output == weights == torch.float32
    assert moved
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def type_inside(amp: bool | None) -> torch.dtype:
    """Return the type in which a prepared model computes."""
    types: list[torch.dtype] = []
    if amp is not None:
        train.torch.accelerate(amp)
    model = train.torch.prepare_model(nn.Sequential(nn.Linear(2, 1)))
    model[0].register_forward_hook(lambda module, args, output: types.append(output.dtype))
    model(torch.ones(1, 2))
    return types[0]


@pytest.mark.filterwarnings("ignore:train.torch.* was called outside a training function")
@pytest.mark.parametrize("in_trials", [False, True], ids=["called directly", "run by Tune"])
def test_mixed_precision_without_a_trainer(in_trials: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = {"trial_id": "1"}
    monkeypatch.setattr(OutsideSession, "_kept", (None, None))
    monkeypatch.setattr(in_trial, "is_trial", lambda: in_trials)
    monkeypatch.setattr(in_trial, "describe", lambda: {**trial})
    assert [type_inside(amp) for amp in (True, True, False, True)] == [
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]
    trial["trial_id"] = "2"  # in the same process
    assert type_inside(None) == (torch.float32 if in_trials else torch.bfloat16)
    assert in_function(lambda: type_inside(None)) == torch.float32


class Output(OrderedDict[str, Any]):
    """Its items are attributes, too, as in outputs of the models of transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_an_output_in_mixed_precision_keeps_its_class() -> None:
    class Model(nn.Linear):
        def forward(self, rows: torch.Tensor) -> Any:
            output = Output()
            output["logits"] = super().forward(rows)
            return output

    def function() -> tuple[Any, ...]:
        train.torch.accelerate(amp=True)
        output = train.torch.prepare_model(Model(4, 1))(torch.ones(2, 4))
        return type(output), output.logits.dtype, output["logits"].dtype

    assert in_function(function) == (Output, torch.float32, torch.float32)


class OwnWrapper(DistributedDataParallel):
    """As programs have it that read attributes of the model through the wrapper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@pytest.mark.parametrize("hidden", [[nn.Linear(1, 1)], {"first": nn.Linear(1, 1)}, (1, [nn.Linear(1, 1)])])
def test_a_model_within_a_container_is_refused(hidden: Any) -> None:
    """A copy of it would be restored, and not the one that the function trains."""
    with pytest.raises(ConfigError, match=r"got a Linear inside of 'models'.*name of its own"):
        in_function(lambda: train.elastic({"models": hidden, "epoch": 0}))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loader_without_a_position_is_refused(prepared: bool) -> None:
    def function() -> None:
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
        train.elastic({"loader": train.torch.prepare_data_loader(loader) if prepared else loader, "epoch": 0})

    with pytest.raises(ConfigError, match=r"which has no position to commit.*elastic_data_loader"):
        in_function(function)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "a subclass of DDP": OwnWrapper,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item]
    "DDP around a compiled model": lambda model: OwnWrapper(torch.compile(model, backend="eager")),
    "compiled DDP": lambda model: torch.compile(OwnWrapper(model), backend="eager"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_commit_of_a_wrapped_model_is_that_of_the_model(wrapper: str) -> None:
    """A commit of several workers, which wrap their models, is loaded by one, which does not."""
    wrapped, bare = nn.Linear(2, 1), nn.Linear(2, 1)
    survivor, alone = FunctionRank(), FunctionRank()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        in_function(lambda: train.elastic({"model": WRAPPED[wrapper](wrapped)}).commit(), survivor)
    finally:
        dist.destroy_process_group()
    alone.load(survivor.state())
    in_function(lambda: train.elastic({"model": bare}) and None, alone)
    assert torch.equal(bare.weight, wrapped.weight)


class Results(NamedTuple):
    model: Any
    losses: Any


def test_a_returned_model_leaves_its_wrapper_and_containers_stay() -> None:
    model, losses = nn.Linear(1, 1), Counter(a=1)

    def function() -> Any:
        wrapped = DistributedDataParallel(model)
        return Results(wrapped, losses), Output(model=wrapped), losses, [torch.Size([2])]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        results, output, *rest = FunctionRank().run(function)
    finally:
        dist.destroy_process_group()
    assert [type(each) for each in (results, output, output.model)] == [Results, Output, nn.Linear]
    assert (results.model, results.losses) == (output["model"], losses)
    assert [type(each) for each in (*rest, rest[1][0])] == [Counter, list, torch.Size]


@pytest.mark.parametrize("own_forward", [False, True], ids=["forward of the class", "forward of the object"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: AveragedModel(model).module], ids=["deep", "averaged"])
def test_a_copy_in_mixed_precision_computes_with_its_own_weights(
    copied: Callable[[Any], Any], own_forward: bool
) -> None:
    """Such as a teacher, whose weights are an average of the student's."""

    def function() -> tuple[float, float]:
        train.torch.accelerate(amp=True)
        model = nn.Linear(2, 1, bias=False)
        if own_forward:
            model.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), model)
        student = train.torch.prepare_model(model)
        teacher = copied(student)
        nn.init.constant_(student.weight, 1.0)
        nn.init.constant_(teacher.weight, 3.001)  # in bfloat16 it is 3
        return student(torch.ones(1, 2)).item(), teacher(torch.ones(1, 2)).item()

    assert in_function(function) == (2.0, 6.0)


class Overflowing:
    """Two models that share one scale on the CPU: the gradients of the first one are infinite."""

    def __init__(self) -> None:
        current("").precision = self.precision = Fp16(torch.device("cpu"))
        self.models = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.first, self.second = (
            train.torch.prepare_optimizer(torch.optim.SGD(each.parameters(), lr=1.0)) for each in self.models
        )
        for each in self.models:
            nn.init.zeros_(each.weight)

    def step(self) -> None:
        loss: torch.Tensor = sum(each(torch.ones(1, 1)).sum() for each in self.models)  # type: ignore[assignment]
        train.torch.backward(loss)
        self.models[0].weight.grad.fill_(math.inf)
        for each in (self.first, self.second):
            each.step()
            each.zero_grad()


def test_the_scale_stays_until_all_optimizers_have_made_their_steps() -> None:
    def function() -> list[float]:
        overflowing = Overflowing()
        overflowing.step()
        overflowing.step()
        return [each.weight.item() for each in overflowing.models]

    assert in_function(function) == [0.0, -2.0]


def test_the_scale_is_in_the_state_of_an_optimizer() -> None:
    def overflow() -> Any:
        overflowing = Overflowing()
        overflowing.step()
        state = overflowing.second.state_dict()
        torch.optim.SGD(overflowing.models[1].parameters(), lr=0.1).load_state_dict(state)  # of a plain one, too
        return state

    def continued(state: Any) -> float:
        continues = Overflowing()
        continues.second.load_state_dict(state)
        return continues.first.scaler.get_scale()

    state = in_function(overflow)
    assert in_function(lambda: continued(state)) == 2.0**15


def test_gradients_are_clipped_once_they_are_unscaled() -> None:
    def function() -> tuple[float, float]:
        current("").precision = Fp16(torch.device("cpu"))
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = train.torch.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        train.torch.backward(model(torch.full((1, 1), 4.0)).sum())
        train.torch.unscale(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        train.torch.unscale(torch.optim.SGD(model.parameters(), lr=1.0))  # does nothing
        return norm.item(), model.weight.item()

    assert in_function(function) == (4.0, pytest.approx(-1.0, abs=1e-5))


def test_without_mixed_precision_the_helpers_change_nothing() -> None:
    def function() -> Any:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train.torch.backward(train.torch.prepare_model(model)(torch.ones(1, 1)).sum())
        assert model.weight.grad is not None
        return train.torch.prepare_optimizer(optimizer) is optimizer

    assert in_function(function)


def test_accelerate_can_be_called_once_per_run() -> None:
    replica = FunctionRank()

    def twice() -> None:
        train.torch.accelerate(amp=True)
        train.torch.accelerate(amp=True)

    with pytest.raises(RuntimeError, match="called twice"):
        in_function(twice, replica)
    in_function(lambda: train.torch.accelerate(amp=True), replica)


def test_reproducibility(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # the function sets it in this process

    def function() -> tuple[float, float, float, bool]:
        train.torch.enable_reproducibility(seed=3)
        return (
            torch.rand(1).item(),
            float(numpy.random.rand()),
            random.random(),
            torch.are_deterministic_algorithms_enabled(),
        )

    try:
        first, second = in_function(function), in_function(function)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first == second
    assert first[3]


@pytest.mark.parametrize("name", ["get_device", "accelerate", "enable_reproducibility"])
def test_calls_outside_a_training_function_act_as_on_one_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # enable_reproducibility sets it
    try:
        with pytest.warns(UserWarning, match=rf"train.torch.{name}\(\) was called outside a training function"):
            result = getattr(train.torch, name)()
    finally:
        torch.use_deterministic_algorithms(False)
    assert result == (torch.device("cpu") if name == "get_device" else None)


def test_an_elastic_loader_resumes_from_its_state() -> None:
    def make(rank: int = 0, ranks: int = 1) -> Any:
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True, generator=torch.Generator())
        return in_function(lambda: train.torch.elastic_data_loader(loader), rank=rank, ranks=ranks)

    complete = make()
    assert len(complete) == 7 and len(make(1, 2)) == 4
    iterator = iter(complete)
    seen = [value for _ in range(3) for value in next(iterator)[0].tolist()]
    state = complete.state_dict()
    rest: list[int] = []
    for rank in range(2):
        part = make(rank, 2)
        part.load_state_dict(state)
        assert len(part) == 2
        rest += [value for (batch,) in part for value in batch.tolist()]
    assert sorted(seen + rest) == list(range(20))
    assert complete.epochs_begun == part.epochs_begun == 1
    with pytest.raises(ValueError, match="map-style"):
        in_function(lambda: train.torch.elastic_data_loader([1]))


def test_an_elastic_loader_of_a_loop_that_counts_batches() -> None:
    """Such as those of other libraries' trainers, which never ask for the end of an epoch."""

    def make() -> Any:
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, shuffle=True)
        return in_function(lambda: train.torch.elastic_data_loader(loader))

    def counted(loader: Any) -> list[int]:
        size = len(loader)
        batches = iter(loader)
        return sorted(value for _ in range(size) for value in next(batches)[0].tolist())

    loader = make()
    for epoch in range(3):
        assert counted(loader) == list(range(20))
        assert loader.epochs_begun == epoch + 1
    again = make()
    again.load_state_dict(loader.state_dict())  # committed after the last step: the loop has not seen the end
    assert [list(again), counted(again)] == [[], list(range(20))]
    again.load_state_dict(loader.state_dict())
    assert [counted(again), counted(again)] == [[], list(range(20))]
    assert again.epochs_begun == 4
    again.load_state_dict(loader.state_dict())
    rest = iter(again)  # before the length
    assert [len(again), len(again), list(rest), len(again)] == [0, 7, [], 7]


def test_a_loop_continues_from_the_commit_that_it_restores() -> None:
    def function() -> list[int]:
        loader = train.torch.elastic_data_loader(DataLoader(TensorDataset(torch.arange(40)), batch_size=4))
        state, seen, restores = train.elastic({"loader": loader, "epoch": 0}), list[int](), [0, 12, 12, 36, -1]
        while state["epoch"] < 1:
            for (batch,) in loader:
                if len(seen) == restores[0]:
                    del restores[0]
                    state.restore()
                    continue
                seen += batch.tolist()
                state.commit()
            state["epoch"] += 1
        return seen

    assert in_function(function) == list(range(40))


@pytest.mark.parametrize("every_epoch", [False, True], ids=["at the top", "in every epoch"])
def test_a_seeded_function_continues_with_other_orders(every_epoch: bool) -> None:
    def function(until: int) -> list[tuple[int, ...]]:
        torch.manual_seed(0)
        loader = train.torch.elastic_data_loader(DataLoader(TensorDataset(torch.arange(20)), shuffle=True))
        state, orders = train.elastic({"loader": loader}), []
        while loader.epochs_begun < until:
            if every_epoch:
                torch.manual_seed(loader.epochs_begun)
            orders.append(tuple(int(row) for (row,) in loader))
            state.commit()
        return orders

    ranks = [FunctionRank() for _ in range(3)]
    orders = ranks[0].run(function, 2)
    for number, rank in enumerate(ranks[1:], 2):
        rank.load(ranks[number - 2].state())
        orders += rank.run(function, 2 * number, number=number)
    assert len(set(orders)) == 6
    if every_epoch:
        assert orders == FunctionRank().run(function, 6)


def trained(config: dict[str, Any]) -> tuple[list[float], Any, str]:
    train.torch.enable_reproducibility()
    model = train.torch.prepare_model(nn.Linear(1, 1), ddp_kwargs={"broadcast_buffers": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[float] = []
    for (batch,) in train.torch.prepare_data_loader(DataLoader(DATA, batch_size=1, shuffle=True)):
        seen += batch.flatten().tolist()
        optimizer.zero_grad()
        train.torch.backward((model(batch) - 2 * batch).square().mean())
        optimizer.step()
    assert isinstance(model, DistributedDataParallel)
    train.report({}, checkpoint=train.Checkpoint.from_dict({"weights": model.module.state_dict()}))
    return seen, model, str(train.torch.get_device())


def test_two_ranks_train_one_model(ray_cluster: None, tmp_path: Path) -> None:
    with Trainer("torch", num_workers=2, logdir=tmp_path) as trainer:
        (seen, model, device), (others, twin, _) = trainer.run(trained)
        found = trainer.latest_checkpoint
    assert type(model) is nn.Linear, "a wrapped one cannot be loaded here"
    weights, same = ([each.item() for each in one.parameters()] for one in (model, twin))
    assert Counter(seen + others) == Counter(range(10))
    assert weights == same
    assert weights[0] > 0.5, "it learns"
    assert device == "cpu"
    assert found is not None
    assert found["weights"]["weight"].item() == pytest.approx(weights[0])
