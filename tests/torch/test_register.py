"""`register` returns its arguments in the same containers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from raysgd import ConfigError, TrainingOperator, TrainingOptions
from tests.replicas import operator_alone
from tests.torch.small import Line

Register = Callable[..., Any]


class Bare(TrainingOperator):
    """Calls `config["body"](self)` as its setup."""

    def setup(self, config: dict[str, Any]) -> None:
        self.answer = config["body"](self) if "body" in config else None


def registered(freq: str | None = "batch", **parts: Any) -> Any:
    body = {"body": lambda operator: operator.register(**parts)}
    return operator_alone(Bare, body, scheduler_step_freq=freq).answer


def model() -> nn.Linear:
    return nn.Linear(2, 1)


def sgd(of: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(of.parameters(), lr=0.1)


class Many(torch.optim.SGD):
    """An optimizer that can be iterated, as wrappers around several optimizers can."""

    def __iter__(self) -> Any:
        return iter(self.param_groups)


class Duck:
    """Can step and be iterated, but is not a subclass of torch's Optimizer."""

    param_groups: tuple[Any, ...] = ()

    def step(self) -> None:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter([1, 2])


def test_parts_are_returned_as_they_are_passed() -> None:
    first, second = model(), model()
    for container in (list, tuple):
        optimizers = container([sgd(first), sgd(second)])
        schedulers = container([StepLR(optimizer, 1) for optimizer in optimizers])
        answer = registered(models=container([first, second]), optimizers=optimizers, schedulers=schedulers)
        assert answer == (container([first, second]), optimizers, schedulers)
        assert [type(part) for part in answer] == [container] * 3
    optimizer = sgd(first)
    assert registered(models=[first], optimizers=(optimizer,)) == ([first], (optimizer,))
    answer = registered(models=(each for each in (first, second)), optimizers=optimizer)
    assert answer == ([first, second], optimizer), "other iterables become lists"


def test_what_can_be_iterated_and_is_one_part_is_returned_single() -> None:
    one = model()
    for kind in (nn.Sequential(model(), model()), nn.ModuleList([model(), model()])):
        assert registered(models=kind, optimizers=sgd(kind))[0] is kind
    for optimizer in (Many(one.parameters(), lr=0.1), Duck()):
        assert registered(models=one, optimizers=optimizer) == (one, optimizer)


def test_parts_that_are_not_passed_are_not_returned() -> None:
    one = model()
    optimizer = sgd(one)
    required, criterion, schedulers = {"models": one, "optimizers": optimizer}, torch.dist, StepLR(optimizer, 1)
    assert registered(**required, criterion=criterion) == (one, optimizer, criterion)
    assert registered(**required, schedulers=schedulers) == (one, optimizer, schedulers)
    assert registered(**required, criterion=criterion, schedulers=schedulers)[2:] == (criterion, schedulers)


def test_the_module_inside_a_model() -> None:
    class Two(TrainingOperator):
        def setup(self, config: dict[str, Any]) -> None:
            first, second = nn.Linear(1, 1), nn.Linear(1, 1)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
            (self.first, self.second), _ = self.register(models=[first, second], optimizers=optimizers)
            self.made = [first, second]

    operator = Two({})
    assert [operator.unwrapped(each) for each in (operator.first, operator.second)] == operator.made
    with pytest.raises(ConfigError, match=r"2 models are registered: pass one of them, unwrapped\(model\)"):
        operator.unwrapped()
    with pytest.raises(ConfigError, match=r"takes a model that register\(\) returned, got Linear"):
        operator.unwrapped(nn.Linear(1, 1))


def wrapped() -> nn.Module:
    """Return a model in DistributedDataParallel, whose constructor needs a process group."""
    made = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(made)
    made.module = model()
    return made


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"models": None}, "models must be a torch.nn.Module"),
        ({"models": {"net": nn.Linear(1, 1)}}, "list or tuple"),
        ({"models": [nn.Linear(1, 1), 3]}, "list or tuple"),
        ({"models": wrapped()}, "Register the module inside: models=model.module"),
        ({"models": nn.Sequential(wrapped())}, "is, or holds, a DistributedDataParallel"),
        ({"ddp_args": [1]}, "ddp_args must be a dict"),
        ({"apex_args": "O1"}, "apex_args must be a dict"),
    ],
)
def test_register_refuses(parts: dict[str, Any], says: str) -> None:
    one = model()
    with pytest.raises(ConfigError) as caught:
        registered(**{"models": one, "optimizers": sgd(one), **parts})
    assert says in str(caught.value)


def test_a_model_that_the_user_wraps_is_registered_as_it_is() -> None:
    body = {"body": lambda operator: operator.register(models=given, optimizers=sgd(given))}
    given, options = wrapped(), TrainingOptions(parallel=None)
    assert operator_alone(Bare, body, options=options).answer[0] is given


def test_register_data_refuses_objects_that_cannot_be_iterated() -> None:
    for name in ("train_loader", "validation_loader"):
        with pytest.raises(ConfigError, match=f"{name} must be a DataLoader or another iterable"):
            Bare({"body": lambda operator, name=name: operator.register_data(**{name: 7})})


def test_properties_of_a_single_worker() -> None:
    operator = Line({"lr": 0.5})
    assert (operator.world_rank, operator.local_rank, operator.world_size) == (0, 0, 1)
    assert operator.device == torch.device("cpu")
    assert operator.device_ids is None
    assert (operator.use_gpu, operator.use_fp16, operator.use_tqdm) == (False, False, False)
    assert operator.config == {"lr": 0.5}
    assert operator._is_distributed is False


def test_a_second_call_of_register_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def twice(operator: Any) -> None:
        for each in (model(), model()):
            operator.register(models=each, optimizers=sgd(each))

    operator_alone(Bare, {"body": twice})
    assert [each.partition(". ")[0] for each in caplog.messages] == ["setup calls self.register() a second time"]
