"""A device "late" in pure Python: as a GPU, it computes later, in streams, while the host runs ahead.

    from tests.emulated.late_device import stream

    x = torch.ones(3, device="late")     # returns at once
    x.sum().item()                       # waits for the device: `stream.waits` has the operation, and who waited
    torch.late.current_stream().synchronize()
    with torch.late.stream(torch.late.Stream()):
        y = x + 1                        # in another stream, and perhaps before `x`: only an event orders them

Importing it registers a device in torch (2.10 or newer) until the process ends: only scripts and Ray workers do that.

A tensor of this device is a plain `torch.Tensor` that shares its memory with one on the CPU, on which the thread of the
stream computes. So contents, strides, views and storages are real, and results are those of the CPU. A view costs no
launch; an operation on lists of tensors costs one, or one for each tensor if the types in a list differ, as on CUDA. An
operation on tensors of two devices is refused. It has no pinned memory, and uses the CPU's random numbers. A backward pass
computes in the first stream, and memory that was freed is not used again before all streams are done with it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.emulated.late_stream import DeviceModule, Stream

__all__ = ["DEVICE", "is_late", "module", "on_cpu", "stream"]

aten: Any = torch.ops.aten
stream = Stream()
module = DeviceModule(stream)  # `torch.late`
_setup_privateuseone_for_python_backend("late", module)
DEVICE = torch.device("late:0")

# -- tensors ------------------------------------------------------------------------------------------

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_memory: dict[int, torch.UntypedStorage] = {}  # by address
_NOTHING = torch.UntypedStorage(0)
_known: dict[str, Any] = {}  # results without contents
_NAMES = {"aten::_local_scalar_dense": "item"}  # of operations that wait


def is_late(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "late"


def on_cpu(value: Any) -> Any:
    """Return the CPU's tensor with the memory of a late one, or what was passed. For the stream's thread."""
    if not is_late(value):
        return value
    place = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype).set_(_memory.get(value.untyped_storage().data_ptr(), _NOTHING), *place)


def _on_late(tensor: Any, storage: Any = None) -> torch.Tensor:
    """Return the late tensor with the memory of one on the CPU, of which there may be a `storage` already."""
    if storage is None:
        memory = tensor.untyped_storage()
        address = memory.data_ptr()
        storage = torch._C._construct_storage_from_data_pointer(address, DEVICE, memory.nbytes())
        _memory[address] = memory
        weakref.finalize(storage, _memory.pop, address, None)
    made: torch.Tensor = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return _set_(made, storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _shapes(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation without contents. Some take torch milliseconds: they are remembered."""
    key = f"{op}{tree_map(lambda each: _shape(each) if isinstance(each, torch.Tensor) else each, (args, kwargs))}"
    if key not in _known:
        _known[key] = op(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
    return _known[key]


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


# -- operations ---------------------------------------------------------------------------------------


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch an operation, and return its results, whose contents come later."""
    name, current = op._schema.name, module.current_stream()
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    others = [each for each in tensors if not is_late(each)]
    if any(each.dim() for each in others):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got late:0 and {others[0].device}")
    returns, writes = op._schema.returns, [a for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    passed = dict(zip([each.name for each in op._schema.arguments], args, strict=False)) | kwargs
    if any(each.is_out for each in writes):
        _resize([passed[each.name] for each in writes], op, args, kwargs)
    # The host may change a number of its own before the device reads it.
    own = {id(each): each.clone() for each in others}
    given, named = tree_map(lambda each: own.get(id(each), on_cpu(each)), (args, kwargs))
    if returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        storage = tensors[0].untyped_storage()  # a view
        return tree_map(lambda each: _on_late(each, storage), op(*given, **named))
    if all(each.alias_info is not None for each in returns):
        current.launch(lambda: op(*given, **named), _launches(name, args))
        changed = [passed[each.name] for each in writes][: len(returns)]
        return changed[0] if len(changed) == 1 else tuple(changed) or None
    try:
        shapes = _shapes(op, args, kwargs)
    except RuntimeError:  # the shapes depend on the contents, or it returns a number
        current.wait(_NAMES.get(name, name.removeprefix("aten::")))
        return tree_map(lambda each: _on_late(each) if isinstance(each, torch.Tensor) else each, op(*given, **named))
    made = tree_map(lambda each: None if each is None else _empty_as(each), shapes)

    def compute() -> None:
        for into, each in zip(tree_leaves(made), tree_leaves(op(*given, **named)), strict=True):
            if each is not None and each.numel():  # batch_norm in a validation leaves out on the CPU what CUDA returns
                into.copy_(each)

    current.launch(compute, _launches(name, args))
    return tree_map(lambda each: None if each is None else _on_late(each), made)


def _empty_as(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)


def _resize(results: list[torch.Tensor], op: Any, args: Any, kwargs: Any) -> None:
    """Give the results that are passed empty the memory that the operation needs."""
    if not all(each.numel() for each in results):
        shapes = _shapes(op, args, kwargs)
        for each, shape in zip(results, tree_leaves(shapes), strict=True):
            _resize_one(each, shape.size())


def _resize_one(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Resize a tensor, which loses its content if it needs more memory."""
    made = torch.empty(size, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    if made.numel() * made.element_size() > storage.nbytes():
        storage = _on_late(made).untyped_storage()
    return _set_(tensor, storage, 0, made.size(), made.stride())


def _set_(tensor: torch.Tensor, *given: Any) -> torch.Tensor:
    """Let a tensor have another storage, of which this may be a part."""
    op = aten.set_.source_Storage_storage_offset if given[1:] else aten.set_.source_Storage
    op.redispatch(_CPU, tensor, *given)
    return tensor


def _launches(name: str, args: tuple[Any, ...]) -> int:
    """Return how many kernels CUDA launches: for lists of tensors, one if each list has tensors of one type."""
    if not name.startswith("aten::_foreach_"):
        return 1
    lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], torch.Tensor)]
    alike = all(len({each.dtype for each in some}) == 1 for some in lists)
    return 1 if alike else len(lists[0])


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy to, from or on the device. Memory of the host is not pinned: it is copied before this returns."""
    into, content = on_cpu(target), on_cpu(source) if is_late(source) else source.clone()
    current = module.current_stream()
    current.launch(lambda: into.copy_(content))
    if not is_late(target) and not non_blocking:
        current.wait("copy to the host")
    elif not is_late(source) and not non_blocking:
        current.wait("copy to the device")
    return target


def _convolution_backward(gradient: Any, features: Any, weight: Any, *given: Any) -> Any:
    return _run(aten.convolution_backward.default, gradient, features, weight, [weight.shape[0]], *given)


# -- what torch calls ---------------------------------------------------------------------------------


def _clone(storage: Any) -> Any:
    """Return a copy of a storage, as a deep copy of a tensor needs. Torch itself has no allocator for the device."""
    if storage.device != DEVICE:
        return _usual_clone(storage)
    return torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage).clone().untyped_storage()


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Move a module, which keeps its parameters, as with CUDA."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _usual_to(self, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


_library, _aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_library.fallback(_run, "PrivateUse1")
_OWN: dict[str, Callable[..., Any]] = {
    "empty.memory_format": lambda size, *, dtype=None, memory_format=None, **_: _on_late(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    ),
    "empty_strided": lambda size, stride, *, dtype=None, **_: _on_late(torch.empty_strided(size, stride, dtype=dtype)),
    "set_.source_Storage": _set_,
    "set_.source_Storage_storage_offset": _set_,
    "resize_": _resize_one,
    "_copy_from": _copy_from,
    "convolution_overrideable": lambda *given: _run(aten.convolution.default, *given),
    "convolution_backward_overrideable": _convolution_backward,
}
_usual_clone: Any = torch.UntypedStorage.clone
_usual_to = nn.Module.to
torch.UntypedStorage.clone, nn.Module.to = _clone, _to  # type: ignore[assignment,method-assign]
torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]  # a stream is none of torch's
for _name, _function in _OWN.items():
    _aten.impl(_name, _function, "PrivateUse1")
# Torch would compose the former of one operation for each tensor, and the latter of those with `out`.
_has = torch._C._dispatch_has_kernel_for_dispatch_key
for _full in torch._C._dispatch_get_all_op_names():
    _name, _, _overload = _full.removeprefix("aten::").partition(".")
    _lists = _name.startswith("_foreach_") and _has(_full, "CompositeExplicitAutograd")
    if _lists or (_full.startswith("aten::") and _has(_full, "CompositeExplicitAutogradNonFunctional")):
        _aten.impl(_full, functools.partial(_run, getattr(getattr(aten, _name), _overload or "default")), "PrivateUse1")

# -- autocast -----------------------------------------------------------------------------------------

_key: Any = torch._C.DispatchKey
_AUTOCAST = torch._C.DispatchKeySet(_key.AutocastPrivateUse1)
_LOWER = ("linear", "matmul", "mm", "addmm", "bmm", "conv1d", "conv2d")
_FLOAT32 = ("mse_loss", "nll_loss", "cross_entropy_loss", "layer_norm")


def _autocast(op: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return an operation as autocast calls it, in this type or by default in the lower precision."""

    def call(*args: Any, **kwargs: Any) -> Any:
        to = dtype or torch.get_autocast_dtype("late")
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return op(*(each.to(to) if is_late(each) and each.is_floating_point() else each for each in args), **kwargs)

    return call


_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in (*_LOWER, *_FLOAT32):
    _op = getattr(aten, _name).default
    _aten.impl(_name, _autocast(_op, torch.float32 if _name in _FLOAT32 else None), "AutocastPrivateUse1")
