"""Models that are sharded over the workers with FSDP2, and gathered for checkpoints. Worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.core.tree import mapped
from raysgd.errors import ConfigError
from raysgd.torch import foreign

ShardModel = Callable[[nn.Module, Any], None]  # shards a model in place, over a device mesh
DIVIDED = ("models", "optimizers")  # the parts of a state that have shards


class Shards:
    """Owns what sharding adds to models and optimizers. The models stay the same objects: their
    parameters are sharded in place, and replaced in the optimizers' lists."""

    def __init__(
        self, models: list[nn.Module], optimizers: list[Any], shard_model: ShardModel, device: torch.device
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._models = models
        self._metadata_only: list[nn.Module] = []
        self._resharding: list[tuple[Any, str, Any]] = []  # before a validation
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        replaced: dict[int, nn.Parameter] = {}
        for model in models:
            for tensor in model.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    dist.broadcast(tensor, src=0)  # so that the shards are those of one model
            self._metadata_only.append(_without_memory(model))
            before = dict(model.named_parameters(remove_duplicate=False))
            shard_model(model, mesh)
            after = dict(model.named_parameters(remove_duplicate=False))
            _check_mesh(after, mesh)
            replaced |= {id(old): after[name] for name, old in before.items()}
        for optimizer in optimizers:
            _replace_parameters(optimizer, replaced)
        self.full_parameters()  # here, because only some ranks may have gradients to weigh in the first batch

    def full_models(self, states: list[dict[str, Any]]) -> list[nn.Module]:
        """Make bare models with these gathered states."""
        return [_filled(metadata_only, state) for metadata_only, state in zip(self._metadata_only, states, strict=True)]

    def unexchanged_gradients(self) -> list[torch.Tensor]:
        return foreign.accumulated_gradients(list(self._modules()))

    def full_parameters(self) -> list[torch.Tensor]:
        """The parameters that the forward pass uses. All ranks must call this, because the first
        forward pass, or this method, creates them."""
        modules = list(self._modules())
        if not foreign.full_parameters(modules):
            for module in modules:
                module.unshard()
                module.reshard()
        return foreign.full_parameters(modules)

    def gather_for_validation(self) -> None:
        """Give every worker the full weights. Ranks validate different numbers of batches, so no
        forward pass may wait for another rank."""
        modules = list(self._modules())
        self._resharding = foreign.resharding(modules)
        for module in modules:
            module.set_reshard_after_forward(False)
            module.unshard()

    def end_validation(self) -> None:
        for module in self._modules():
            module.reshard()
        for owner, name, value in self._resharding:
            setattr(owner, name, value)

    def _modules(self) -> Iterator[Any]:
        return (module for model in self._models for module in model.modules() if hasattr(module, "unshard"))


def shard_layers(model: nn.Module, mesh: Any) -> None:
    """Shard each layer of a list or sequence of layers by itself, so that only one layer is
    gathered at a time, and then the rest of the model."""
    from torch.distributed.fsdp import fully_shard

    for container in list(model.modules()):
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and container is not model:
            for layer in container:
                if next(layer.parameters(), None) is not None and not hasattr(layer, "unshard"):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gathered(value: Any, *, keep: bool) -> Any:
    """The state with full tensors in place of shards; None instead of each tensor unless `keep`.
    All ranks must call this, in the same order. No tensor shares memory with the live ones."""
    return mapped(lambda leaf, *path: _gathered_leaf(leaf, keep=keep), value)


def _gathered_leaf(value: Any, *, keep: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "full_tensor"):
        return value.detach().to("cpu", copy=True) if keep else None
    sharded: Any = value
    full = sharded.full_tensor()
    shared = full.untyped_storage().data_ptr() == sharded.to_local().untyped_storage().data_ptr()  # with one rank
    return full.to("cpu", copy=shared) if keep else None


def placed(saved: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """A model's state with full tensors sharded like this worker's."""
    return foreign.with_module_versions(
        {name: _sharded_like(mine.get(name), value) for name, value in saved.items()}, saved
    )


def placed_optimizer(saved: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, sharded like the parameters to which it belongs."""
    groups = getattr(optimizer, "param_groups", [])
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not any(hasattr(each, "full_tensor") for each in parameters) or "state" not in saved:
        return saved
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    owner = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {name: _sharded_like(owner.get(number), value) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _sharded_like(parameter: Any, value: Any) -> Any:
    is_full = isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")
    if not is_full or not hasattr(parameter, "full_tensor") or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _replace_parameters(optimizer: Any, replaced: dict[int, nn.Parameter]) -> None:
    """Let the optimizer step shards instead of full parameters, and shard its state."""
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in old]
        for before, after in zip(old, group["params"], strict=True):
            if before in optimizer.state:
                state = optimizer.state.pop(before)
                optimizer.state[after] = {name: _sharded_like(after, value) for name, value in state.items()}


def _check_mesh(parameters: dict[str, nn.Parameter], mesh: Any) -> None:
    """Raise ConfigError if a user's `_configure_fsdp` has used another mesh."""
    for name, each in parameters.items():
        if hasattr(each, "device_mesh") and each.device_mesh != mesh:
            raise ConfigError(
                f"_configure_fsdp has sharded {name} over {each.device_mesh}, and not over the mesh that it was given, {mesh}: pass "
                "this one to fully_shard(..., mesh=mesh)"
            )


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy whose weights have no memory, from which a bare model can be made."""
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
