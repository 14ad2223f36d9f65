"""The passes of prepared loaders belong to the run, and a commit has all that a function trains with."""

import copy
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from raysgd import ConfigError, train
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.sessions import Stopped
from tests.replicas import FunctionRank

DATA = TensorDataset(torch.arange(24))
PASSES = 5


class Reporting(FunctionRank):
    """Has the newest checkpoint as bytes."""

    payload: bytes | None = None

    def _deliver(self, message: Any, body: Any) -> None:
        if message.has_checkpoint:
            self.payload = bytes(body[message.metrics_size :])


def rows(batches: Any) -> list[int]:
    return [int(row) for (batch,) in batches for row in batch]


def save(epoch: int, folder: Path | None) -> None:
    if folder is None:
        train.report({}, checkpoint=train.Checkpoint.from_dict({"epoch": epoch}))
    elif folder.suffix:  # one file, which has a dictionary
        train.Checkpoint.from_dict({"epoch": epoch}).to_uri(folder)
        train.report({}, checkpoint=train.Checkpoint(folder))
    else:
        (folder / "epoch").write_text(str(epoch))
        train.report({}, checkpoint=train.Checkpoint.from_directory(folder))


def next_epoch() -> int:
    found = train.get_checkpoint()
    if found is None:
        return 0
    if found.get_internal_representation()[0] == "data_dict":
        return int(found.to_dict()["epoch"]) + 1
    return int(Path(str(found.path), "epoch").read_text()) + 1


def prepared(**options: Any) -> Any:
    return train.torch.prepare_data_loader(DataLoader(DATA, **{"batch_size": 3, "shuffle": True, **options}))


Passes = Callable[[Any, int, Callable[[], None]], list[int]]


def whole(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    found = rows(loader)
    at_end()
    return found


def ended_early(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    found = rows(itertools.islice(loader, 2))
    for _ in loader:
        break
    at_end()
    return found


def counted(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    """Save in the last batch, as a loop does that counts them."""
    found: list[int] = []
    for number, (batch,) in enumerate(loader, start=1):
        found += [int(row) for row in batch]
        if number == len(loader):
            at_end()
    return found


def with_own_epochs(loader: Any, epoch: int, at_end: Callable[[], None]) -> list[int]:
    loader.sampler.set_epoch(2 * (PASSES - epoch))
    return whole(loader, epoch, at_end)


class Run:
    """A function on one of the ranks, which is stopped in the middle of some passes."""

    def __init__(self, passes: Passes, stops: tuple[int, ...], folder: Path | None = None, **options: Any) -> None:
        self.passes, self.stops, self.folder, self.options = passes, [*stops], folder, options
        self.orders: dict[int, list[int]] = {}

    def __call__(self) -> None:
        torch.manual_seed(0)
        loader = prepared(**self.options)
        for epoch in range(next_epoch(), PASSES):
            if epoch in self.stops:
                self.stops.remove(epoch)
                next(iter(loader))
                raise Stopped(asked=False)
            self.orders[epoch] = self.passes(loader, epoch, lambda epoch=epoch: save(epoch, self.folder))  # type: ignore[misc]

    def all_attempts(self, ranks: int = 2, later: int = 2, **attempt: Any) -> list[list[int]]:
        payload, number = None, 0
        while number <= 3 and len(self.orders) < PASSES:
            number += 1
            rank = Reporting(0, ranks if number == 1 else later)
            rank.run(self, checkpoint=payload, number=number, **attempt)
            payload = rank.payload or payload
            rank.close()
        return [self.orders[epoch] for epoch in range(PASSES)]


@pytest.mark.parametrize("kind", ["dictionary", "file", "folder"])
@pytest.mark.parametrize("passes", [whole, ended_early, counted, with_own_epochs])
def test_a_function_that_continues_from_a_checkpoint_has_the_orders_of_the_run(
    passes: Passes, kind: str, tmp_path: Path
) -> None:
    folder = {"dictionary": None, "file": tmp_path / "one.zip", "folder": tmp_path}[kind]
    undisturbed = Run(passes, (), folder).all_attempts()
    assert Run(passes, (3, 4), folder).all_attempts() == undisturbed
    assert len({*map(tuple, undisturbed)}) == PASSES
    if kind == "folder":
        assert [each.name for each in tmp_path.iterdir()] == ["epoch"], "the user's folder stays as it is"


def test_the_last_worker_of_several_has_their_orders() -> None:
    alone = Run(whole, (3,)).all_attempts(later=1, workers=2)
    assert [alone[each][::2] for each in (3, 4)] == Run(whole, ()).all_attempts()[3:]


def test_a_generator_that_one_worker_restores_draws_its_orders() -> None:
    def function(*restored: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        loader = prepared(generator=generator)
        if restored:
            generator.set_state(restored[0])
        for _ in range(2):
            states.append(generator.get_state())
            orders.append(rows(loader))
            train.report({}, checkpoint=train.Checkpoint.from_dict({"epoch": 0}))

    states: list[Any] = []
    orders: list[list[int]] = []
    rank = Reporting()
    rank.run(function)
    rank.run(function, states[1], checkpoint=rank.payload, number=2)
    assert orders[2] == orders[1] != orders[0]


class Unsized:
    """A batch sampler without a length."""

    def __init__(self, *given: Any, **options: Any) -> None:
        self.batches = BatchSampler(*given, **options)
        self.sampler = self.batches.sampler

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize("kind", [BatchSampler, Unsized])
def test_a_sampler_within_a_batch_sampler_has_another_order_in_each_pass(kind: Any) -> None:
    class Fresh(Run):
        def __call__(self) -> None:
            sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
            batches = kind(sampler, 3, drop_last=False)
            self.options = {"batch_size": 1, "shuffle": False, "batch_sampler": batches}
            super().__call__()

    assert Fresh(whole, (3,)).all_attempts() == Fresh(whole, ()).all_attempts()


@pytest.mark.parametrize("saved", [None, 1])
def test_two_loaders_have_counts_of_their_own(saved: int | None) -> None:
    """The second one makes two passes in each epoch, and a checkpoint comes within the first pass."""
    orders: list[Any] = []

    def function(stop: int) -> None:
        loaders, others = prepared(), prepared(batch_size=2)
        for epoch in range(next_epoch(), PASSES):
            first = iter(loaders)
            batch = rows([next(first)])
            if epoch - 1 == saved:
                save(saved, None)
            if epoch == stop:
                raise Stopped(asked=False)
            orders.append((epoch, batch + rows(first), rows(others), rows(others)))

    rank = Reporting(0, 2)
    rank.run(function, -1)
    undisturbed, orders = orders, []
    rank.run(function, 2)
    rank.run(function, -1, checkpoint=rank.payload, number=2)
    expected = undisturbed[:2] + undisturbed[0 if saved is None else 2 :]
    assert orders == expected


def test_a_function_that_continues_from_a_commit_has_the_orders_of_the_run() -> None:
    orders: list[Any] = []

    def function(stop: int) -> None:
        loader, state = prepared(), train.elastic({"epoch": 0})
        while state["epoch"] < PASSES:
            if state["epoch"] == stop:
                next(iter(loader))
                raise Stopped(asked=False)
            orders.append(rows(loader))
            state["epoch"] += 1
            state.commit()

    FunctionRank(0, 2).run(function, -1)
    undisturbed, orders = orders, []
    first, replacement = FunctionRank(0, 2), FunctionRank(0, 2)
    first.run(function, 3)
    replacement.load(first.state())
    replacement.run(function, -1, number=2)
    assert orders == undisturbed


@pytest.mark.parametrize("kind", ["dictionary", "folder"])
def test_a_stored_checkpoint_has_the_count_of_passes(kind: str, tmp_path: Path) -> None:
    """As another script and `fit()` load it, also after the function has reported it once more."""
    folder = None if kind == "dictionary" else tmp_path / "own"
    if folder is not None:
        folder.mkdir()
    undisturbed = Run(whole, (), folder).all_attempts()
    first, again = Run(whole, (3,), folder), Run(whole, (), folder)
    rank, manager = Reporting(0, 2), CheckpointManager(tmp_path / "kept")
    rank.run(first)
    for number in range(1, 3):
        assert rank.payload is not None
        manager.store(number, rank.payload, {})
        stored = train.Checkpoint(manager.place_of(number))
        rank.run(lambda stored=stored: train.report({}, checkpoint=stored))
    rank.run(again, checkpoint=stored.to_bytes(), run=2)
    assert [again.orders[each] for each in (3, 4)] == undisturbed[3:]


# -- what a commit lacks ------------------------------------------------------------------------------


class Parts:
    """What a function may give to `train.elastic`."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.Adam, shuffle: bool = True) -> None:
        self.model = nn.Linear(1, 1)
        train.torch.prepare_model(self.model, wrap_ddp=False)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.loader = train.torch.elastic_data_loader(DataLoader(DATA, batch_size=3, shuffle=shuffle))

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(batch[0].float().unsqueeze(1)).square().mean().backward()
        self.optimizer.step()

    def loop(self, state: Any, *, commit_first: bool = False) -> None:
        if commit_first:
            state.commit()
        for batch in self.loader:
            self.step(batch)
            state.commit()


NAMES = ("model", "optimizer", "loader")
LEFT_OUT = [each for count in (1, 2, 3) for each in itertools.combinations(NAMES, count)]


@pytest.mark.parametrize("commit_first", [False, True])
@pytest.mark.parametrize("left_out", LEFT_OUT, ids=" ".join)
def test_a_commit_without_what_is_trained_is_refused(left_out: tuple[str, ...], commit_first: bool) -> None:
    def function() -> None:
        parts = Parts()
        given = {name: getattr(parts, name) for name in NAMES if name not in left_out}
        parts.loop(train.elastic({**given, "epoch": 0}), commit_first=commit_first)

    with pytest.raises(ConfigError, match=r"train\.elastic has not got the") as caught:
        FunctionRank().run(function)
    for name in NAMES:
        assert (f'"{name}": {name}' in str(caught.value)) == (name in left_out)


def test_a_second_optimizer_that_makes_its_first_step_later_is_refused_then() -> None:
    def function() -> None:
        parts, other = Parts(), Parts()
        state = train.elastic({**{name: getattr(parts, name) for name in NAMES}, "other": other.model})
        for number, batch in enumerate(parts.loader):
            parts.step(batch)
            if number == 3:
                other.step(batch)
            numbers.append(number)
            state.commit()

    numbers: list[int] = []
    with pytest.raises(ConfigError, match=r'"optimizer": optimizer\}'):
        FunctionRank().run(function)
    assert numbers[-1] == 3


def test_a_model_whose_optimizers_are_gone_is_refused() -> None:
    def function() -> None:
        parts = Parts(plain)
        state = train.elastic({"loader": parts.loader})
        parts.step((DATA.tensors[0],))
        del parts.optimizer
        state.commit()

    with pytest.raises(ConfigError, match=r'"model": model\}'):
        FunctionRank().run(function)


def test_optimizers_of_copies_are_not_kept_and_cause_no_check() -> None:
    """As Reptile and MAML make one for each step."""

    class Counting(nn.Linear):
        asked = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            Counting.asked += self is outer
            return super().named_parameters(*args, **kwargs)

    def function() -> None:
        train.torch.prepare_model(outer, wrap_ddp=False)
        state = train.elastic({"model": outer})
        for _ in range(4):
            inner = copy.deepcopy(outer)
            optimizer = torch.optim.Adam(inner.parameters())
            inner(torch.ones(1)).sum().backward()
            optimizer.step()
            made = weakref.ref(optimizer)
            del optimizer
            assert made() is None
            before = Counting.asked
            state.commit()
            checks.append(Counting.asked > before)

    outer = Counting(1, 1)
    checks: list[bool] = []
    FunctionRank().run(function)
    assert checks == [True, False, False, False]


class Own:
    """A user's object with the state of others. `copies`: of copies of them."""

    def __init__(self, *parts: Any, copies: bool = False) -> None:
        self.parts, self.copies = {str(number): each for number, each in enumerate(parts)}, copies
        if copies:
            vars(self).update(zip("abc", parts, strict=False))

    def state_dict(self) -> dict[str, Any]:
        found = {name: each.state_dict() for name, each in self.parts.items()}
        return {**found, "0": {name: each.clone() for name, each in found["0"].items()}} if self.copies else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in self.parts.items():
            each.load_state_dict(state[name])


class Sized(torch.optim.Adam):
    """Has a size in its state, as an optimizer of the user's may."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["size"] = parameter.shape
        return result


class Rounds(Parts):
    """Makes an optimizer for each step."""

    def step(self, batch: Any) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters())
        super().step(batch)
        del self.optimizer


class Counted(Parts):
    """Reads a loader without shuffle, and counts its batches. The loop commits after them."""

    def loop(self, state: Any, *, commit_first: bool = False) -> None:
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            self.step(next(batches))
        state.commit()


def scheduled(parts: Parts) -> Any:
    return torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)


def plain(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=lr)


COMPLETE: dict[str, Callable[[], tuple[Parts, dict[str, Any]]]] = {
    "an optimizer without a state": lambda: (parts := Parts(plain), {"model": parts.model, "loader": parts.loader}),
    "a scheduler": lambda: (
        parts := Parts(plain),
        {name: getattr(parts, name) for name in NAMES} | {"scheduler": scheduled(parts)},
    ),
    "an object of the user's": lambda: (
        parts := Parts(),
        {"own": Own(parts.model, parts.optimizer), "loader": parts.loader},
    ),
    "an object with a dictionary": lambda: (parts := Parts(), {"own": Own(*vars(parts).values())}),
    "sizes": lambda: (parts := Parts(Sized), {**vars(parts), "size": torch.Size([1])}),
    "optimizers that are gone": lambda: (
        parts := Rounds(),
        {"model": parts.model, "loader": parts.loader},
    ),
    "a whole epoch without shuffle": lambda: (
        parts := Counted(shuffle=False),
        {"model": parts.model, "optimizer": parts.optimizer},
    ),
    "an object that copies": lambda: (parts := Parts(), {"own": Own(*vars(parts).values(), copies=True)}),
    "a module around the model": lambda: (
        parts := Parts(),
        {"all": nn.ModuleList([parts.model]), "optimizer": parts.optimizer, "loader": parts.loader},
    ),
    "compiled": lambda: (
        parts := Parts(),
        {**vars(parts), "model": torch.compile(parts.model, backend="eager")},
    ),
    "mixed precision": lambda: (
        parts := Parts(),
        {**vars(parts), "optimizer": train.torch.prepare_optimizer(parts.optimizer)},
    ),
}


@pytest.mark.parametrize("kind", COMPLETE)
def test_a_commit_that_has_it_in_another_form_is_made(kind: str) -> None:
    def function() -> int:
        parts, given = COMPLETE[kind]()
        state = train.elastic({**given, "epoch": 0})
        parts.loop(state)
        return parts.loader.epochs_begun

    assert FunctionRank().run(function) == 1


def unused() -> None:
    """Models and loaders that are not trained: a frozen one, one for inference, and a validation."""
    parts, frozen = Parts(), nn.Linear(1, 1).requires_grad_(False)
    for model in (frozen, nn.Linear(1, 1)):
        train.torch.prepare_model(model)
    validation = train.torch.elastic_data_loader(DataLoader(DATA, batch_size=3))
    state = train.elastic({name: getattr(parts, name) for name in NAMES})
    for _ in range(2):
        parts.loop(state)
        assert len(rows(validation)) == 24
        state.commit()


def a_schedule_without_its_optimizer() -> None:
    parts = Parts(plain)
    parts.loop(train.elastic({"model": parts.model, "loader": parts.loader, "scheduler": scheduled(parts)}))


def test_what_is_not_trained_may_be_left_out() -> None:
    FunctionRank().run(unused)
    with pytest.raises(ConfigError, match='"optimizer": optimizer'):
        FunctionRank().run(a_schedule_without_its_optimizer)


def test_after_the_function_no_hook_is_left() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks  # type: ignore[attr-defined]

    def function() -> int:
        parts = Parts()
        state = train.elastic({name: getattr(parts, name) for name in NAMES})
        parts.step((DATA.tensors[0],))
        state.commit()
        return len(hooks)

    before = len(hooks)
    assert FunctionRank().run(function) == before, "a later step calls no function of raysgd"
    FunctionRank().run(unused)
    assert len(hooks) == before
