"""An operator from creator functions, as RaySGD described models before it had operators. Both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from raysgd.errors import ConfigError
from raysgd.storage.durable import private_folder, private_place
from raysgd.torch.operator import TrainingOperator

Creator = Callable[..., Any]


class CreatorOperator(TrainingOperator):
    """Calls the creators of data, model, optimizer, scheduler and loss; registers the results."""

    creators: ClassVar[dict[str, Creator]]  # the user's functions
    one_at_a_time: ClassVar[bool]

    def setup(self, config: dict[str, Any]) -> None:
        creators = self.creators
        if "data_creator" in creators:
            with _one_at_a_time() if self.one_at_a_time else contextlib.nullcontext():
                train, validation = _loaders(creators["data_creator"](config))
            self.register_data(train_loader=train, validation_loader=validation)
        models = creators["model_creator"](config)
        optimizers = creators["optimizer_creator"](models, config)
        parts: dict[str, Any] = {"models": models, "optimizers": optimizers}
        if "scheduler_creator" in creators:
            parts["schedulers"] = creators["scheduler_creator"](optimizers, config)
        if "loss_creator" in creators:
            parts["criterion"] = _loss(creators["loss_creator"], config)
        self.register(**parts)

    @property
    def models(self) -> list[nn.Module]:
        return self._registered.wrapped

    @property
    def model(self) -> nn.Module:
        model: nn.Module = _first(self._registered.wrapped, "model")
        return model

    @property
    def optimizers(self) -> list[Any]:
        return self._registered.optimizers

    @property
    def optimizer(self) -> Any:
        return _first(self._registered.optimizers, "optimizer")

    @property
    def schedulers(self) -> list[Any]:
        return self._registered.schedulers

    @property
    def scheduler(self) -> Any:
        return _first(self._registered.schedulers, "scheduler")

    @property
    def criterion(self) -> Any:
        if self._registered.criterion is None:
            raise AttributeError("there is no criterion: pass a loss_creator, or override train_batch")
        return self._registered.criterion


def operator_from_creators(
    model_creator: Creator,
    optimizer_creator: Creator,
    data_creator: Creator | None = None,
    loss_creator: Creator | None = None,
    scheduler_creator: Creator | None = None,
    serialize_data_creation: bool = True,
) -> type[CreatorOperator]:
    """Make a subclass of `CreatorOperator` with these functions. With `serialize_data_creation`,
    the workers of one machine call `data_creator` one after the other."""
    creators = {"model_creator": model_creator, "optimizer_creator": optimizer_creator}
    optional = {"data_creator": data_creator, "loss_creator": loss_creator, "scheduler_creator": scheduler_creator}
    creators |= {name: creator for name, creator in optional.items() if creator is not None}
    for name, creator in creators.items():
        if not callable(creator) or isinstance(creator, nn.Module):
            raise ConfigError(
                f"{name} must be a function that makes its part, such as `lambda config: ...`, got {creator!r}"
            )
    members = {"creators": creators, "one_at_a_time": serialize_data_creation}
    return type("CustomCreatorOperator", (CreatorOperator,), members)


def _loaders(loaders: Any) -> tuple[Any, Any]:
    """The training and the validation loader from what `data_creator` returned."""
    if not isinstance(loaders, Sequence):
        return loaders, None
    if not 1 <= len(loaders) <= 2:
        raise ConfigError(f"data_creator must return one loader or (train, validation), got {len(loaders)} values")
    return loaders[0], loaders[1] if len(loaders) == 2 else None


def _loss(creator: Creator, config: dict[str, Any]) -> Any:
    is_loss_class = isinstance(creator, type) and issubclass(creator, nn.Module)
    return creator() if is_loss_class else creator(config)


def _first(parts: list[Any], name: str) -> Any:
    if not parts:
        raise AttributeError(f"there is no {name}: the {name}_creator returned none")
    return parts[0]


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """A context for one worker of a machine at a time: others find downloaded data."""
    import fcntl  # Windows does not have it

    descriptor = os.open(private_folder(private_place("data")), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for processes that the function has started
    finally:
        os.close(descriptor)
