"""Models that no worker holds alone (FSDP2): cut into shards in place, put together again for checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch.foreign import accumulated_gradients

__all__ = ["Shards", "gathered", "placed", "placed_optimizer", "shard_layers"]

Place = Callable[[nn.Module, Any], None]


class Shards:
    """Owns what sharding adds to models and optimizers. The models stay the same objects: their parameters are cut in
    place, and the optimizers' lists are exchanged with them."""

    def __init__(self, models: list[nn.Module], optimizers: list[Any], place: Place, device: torch.device) -> None:
        self._models, self._optimizers, self._place, self._device = models, optimizers, place, device
        self._hollow: list[nn.Module] = []
        self._rank_info: tuple[int, int] | None = None

    def joined(self) -> None:
        """A generation stands. The first one cuts the models; a later one must have the same ranks, since each holds
        the only copy of its part."""
        rank_info = (dist.get_rank(), dist.get_world_size())
        if self._rank_info is None:
            self._rank_info = rank_info
            self._cut()
        elif self._rank_info != rank_info:
            raise ConfigError(
                f"a shard made for rank {self._rank_info[0]} of {self._rank_info[1]} cannot become rank {rank_info[0]} of {rank_info[1]}: "
                "with parallel='fsdp', save, and load into a trainer with the other number of workers"
            )
        else:
            for module in self._roots():
                module.reset_iter_state()
            self._for_all("reshard")

    def _cut(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        exchanged: dict[int, nn.Parameter] = {}
        for model in self._models:
            for tensor in model.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    dist.broadcast(tensor, src=0)  # the shards of one model, not of several that began differently
            self._hollow.append(_hollow(model))
            before = dict(model.named_parameters(remove_duplicate=False))
            self._place(model, mesh)
            after = dict(model.named_parameters(remove_duplicate=False))
            exchanged |= {id(old): after[name] for name, old in before.items()}
        for optimizer in self._optimizers:
            _exchange(optimizer, exchanged)

    def whole_models(self, states: list[dict[str, Any]]) -> list[nn.Module]:
        """Bare models that hold these gathered states."""
        return [_filled(metadata_only, state) for metadata_only, state in zip(self._hollow, states, strict=True)]

    def held_back(self) -> list[torch.Tensor]:
        """Return the gradients of batches that did not exchange them."""
        return accumulated_gradients(list(self._modules()))

    def gather_for_validation(self) -> None:
        """Every worker holds the whole weights for a while: ranks validate different numbers of batches, and none
        may wait for another."""
        for module in self._modules():
            module.set_reshard_after_forward(False)
            module.unshard()

    def end_validation(self) -> None:
        for module in self._modules():
            module.reshard()
            module.set_reshard_after_forward(True)

    def _for_all(self, method: str) -> None:
        for module in self._modules():
            getattr(module, method)()

    def _modules(self) -> Iterator[Any]:
        return (module for model in self._models for module in model.modules() if hasattr(module, "unshard"))

    def _roots(self) -> Iterator[Any]:
        return (model for model in self._models if hasattr(model, "reset_iter_state"))


def shard_layers(model: nn.Module, mesh: Any) -> None:
    """Each layer of a list or sequence of layers by itself, so that only one is whole at a time; then the rest."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ConfigError(f"parallel='fsdp' needs torch 2.6 or newer, this is {torch.__version__}") from error
    for container in list(model.modules()):
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and container is not model:
            for layer in container:
                if next(layer.parameters(), None) is not None and not hasattr(layer, "unshard"):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(value: Any, *, keep: bool) -> Any:
    """The state with every shard made whole: all ranks must ask, in the same order. Who does not `keep` gets None. No tensor
    in it is shared with the live ones."""
    if isinstance(value, torch.Tensor):
        if not hasattr(value, "full_tensor"):
            return value.detach().to("cpu", copy=True) if keep else None
        sharded: Any = value
        whole = sharded.full_tensor()
        alone = whole.untyped_storage().data_ptr() == sharded.to_local().untyped_storage().data_ptr()  # of one rank
        return whole.to("cpu", copy=alone) if keep else None
    if isinstance(value, dict):
        return {key: gathered(each, keep=keep) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(gathered(each, keep=keep) for each in value)
    return value


def placed(saved: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """A model's state with whole tensors cut as this worker's are."""
    return {name: _as(value, mine.get(name)) for name, value in saved.items()}


def placed_optimizer(saved: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, cut like the parameters it belongs to."""
    groups = getattr(optimizer, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not any(hasattr(each, "full_tensor") for each in parameters) or "state" not in saved:
        return saved
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    owner = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {name: _as(value, owner.get(number)) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _as(value: Any, model: Any) -> Any:
    whole = isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")
    if not whole or not hasattr(model, "full_tensor") or value.shape != model.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)


def _exchange(optimizer: Any, exchanged: dict[int, nn.Parameter]) -> None:
    """The optimizer was made for the whole parameters: now it steps the shards. What it knew of them goes with them."""
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [exchanged.get(id(parameter), parameter) for parameter in old]
        for before, after in zip(old, group["params"], strict=True):
            if before in optimizer.state:
                known = optimizer.state.pop(before)
                optimizer.state[after] = {name: _as(value, after) for name, value in known.items()}


def _hollow(model: nn.Module) -> nn.Module:
    """A copy without the weights' memory, from which a bare model can be made."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
        for each in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _filled(metadata_only: nn.Module, state: dict[str, Any]) -> nn.Module:
    memo: dict[int, Any] = {
        id(each): nn.Parameter(state[name].clone(), requires_grad=each.requires_grad)
        for name, each in metadata_only.named_parameters()
    }
    model = copy.deepcopy(metadata_only, memo)
    model.load_state_dict(state)
    return model.cpu()
