"""All private names of torch, Lightning and accelerate that raysgd uses. Worker.

Checked with torch 2.10, 2.13 and 2.15, and with Lightning 2.6; 2.1 has the same names. Of
accelerate with 1.15. `tests/package/test_foreign.py` (and `tests/torch/test_fsdp.py`,
`tests/torch/lightning`) call every function here, and name the first private name that a new
version no longer has. Names in a checkpoint's pickle are not among them, because they are part of
the file format.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import DataLoader, _DatasetKind, _MultiProcessingDataLoaderIter

from raysgd.errors import described

logger = logging.getLogger("raysgd")

Loader = TypeVar("Loader")

# -- data loaders -------------------------------------------------------------------------------------


def live_iterator(loader: Any) -> Any:
    """The iterator that a loader with `persistent_workers` keeps, or None."""
    return getattr(loader, "_iterator", None)


def loader_with(loader: Loader, **attributes: Any) -> Loader:
    """Make a copy of a DataLoader, also of a subclass, with these attributes. It refuses to assign
    some, such as another sampler, because its `__init__` derives others from them."""
    twin = copy.copy(loader)
    vars(twin).update(attributes, _iterator=None)
    return twin


def forget_iterator(loader: Any) -> None:
    """Let a loader's next pass start with new processes."""
    loader._iterator = None


def keep_iterator(loader: Any, iterator: Any) -> None:
    """Let the processes of a running iterator of torch make the loader's next pass (`begin_pass`),
    also without `persistent_workers`. Do nothing if there are none, or if the loader's class has an
    `__iter__` of its own."""
    if _begins_as_usual(loader) and type(iterator) is _MultiProcessingDataLoaderIter and not iterator._shutdown:
        loader._iterator = iterator


def begin_pass(loader: Any) -> Any:
    """Begin a loader's next pass, with the processes that it keeps. What they have read in advance
    is dropped."""
    iterator = live_iterator(loader)
    if iterator is None or not _begins_as_usual(loader) or loader.persistent_workers:
        return iter(loader)
    forget_iterator(loader)  # they make one pass only
    iterator._reset(loader)
    return iterator


def _begins_as_usual(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def processes_of(iterator: Any) -> Sequence[Any]:
    """The loader processes of one of torch's iterators; none if it is another iterator."""
    return cast("Sequence[Any]", getattr(iterator, "_workers", ()))


def lost_processes(iterator: Any) -> list[Any]:
    """Find the loader processes of one of torch's iterators that have ended although it needs them.
    It does not need those of an iterable data set that have sent all their batches."""
    if getattr(iterator, "_shutdown", True):
        return []
    lost = [process for process in iterator._workers if process.exitcode is not None]
    if lost and iterator._dataset_kind == _DatasetKind.Iterable:
        status = getattr(iterator, "_workers_status", ())  # there is none while they start
        needed = dict(zip(iterator._workers, status, strict=False))
        lost = [process for process in lost if process.exitcode or needed.get(process, True)]
    return lost


def end_processes(iterator: Any) -> None:
    """End the loader processes of one of torch's iterators. Do nothing if it has none."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def is_loaders_signal_handler(handler: Any) -> bool:
    """Whether this is torch's handler of SIGCHLD, which reports ended processes."""
    return getattr(handler, "__module__", "") == signal_handling.__name__


def worker_info(**fields: Any) -> Any:
    """Make an object as `torch.utils.data.get_worker_info` returns it."""
    return torch_worker.WorkerInfo(**fields)


@contextlib.contextmanager
def worker_info_seen_as(info: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` return `info`."""
    original = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = original


# -- process groups -----------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks_asked() -> Iterator[list[Any]]:
    """Return a context whose list is not empty once code in it has asked torch.distributed for a
    rank or a number of ranks, in this thread."""
    module, thread, asked = dist.distributed_c10d, threading.get_ident(), []
    original = module._rank_not_in_group  # which `get_rank` and `get_world_size` call first

    def noted(group: Any) -> bool:
        if threading.get_ident() == thread and sys._getframe(1).f_code.co_name in ("get_rank", "get_world_size"):
            asked.append(group)
        return original(group)

    module._rank_not_in_group = noted
    try:
        yield asked
    finally:
        module._rank_not_in_group = original


def set_collective_limit(seconds: float) -> None:
    """Set how long a collective call of the default group may take."""
    limit = datetime.timedelta(seconds=seconds)
    public = getattr(dist, "set_timeout", None)  # torch 2.15 and later
    if public is not None:
        public(limit)
    else:
        dist.distributed_c10d._set_pg_timeout(limit)


@contextlib.contextmanager
def gloo_within(seconds: float) -> Iterator[None]:
    """A context in which each call of a default group of gloo may take so long, or less."""
    group = dist.group.WORLD
    if group is None or dist.get_backend() != "gloo":
        yield
        return
    before: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    set_collective_limit(min(seconds, before.total_seconds()))
    try:
        yield
    finally:
        if dist.group.WORLD is group:
            set_collective_limit(before.total_seconds())


def abort_groups(groups: Sequence[Any]) -> None:
    """End the calls of NCCL in these process groups. torch still knows the groups afterwards, and
    raises its error for a broken one when they are used.

    All at once: an abort also frees memory of the device, which waits for all calls that the device
    has begun, those of other groups too. torch's own bracket does not help, because it belongs to a
    thread, and each group aborts on one of its own."""
    begin = threading.Barrier(len(groups) or 1)

    def abort(group: Any) -> None:
        begin.wait()
        try:
            group.abort()
        except Exception as error:  # the other groups must end nevertheless
            logger.warning("a process group could not be aborted: %s", described(error))

    threads = [threading.Thread(target=abort, args=(each,), name="raysgd-abort-group", daemon=True) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget_groups() -> None:
    """Let torch forget all groups of NCCL, which were aborted. It aborts them again, which does
    nothing. A broken group may refuse."""
    with contextlib.suppress(RuntimeError, ValueError, KeyError, AssertionError):
        dist.distributed_c10d._abort_process_group()


def calls_made() -> int:
    """Count the collective calls that all groups of this process have had; -1 if a group does not
    tell. Calls between two ranks do not count."""
    try:
        return sum(group._get_sequence_number_for_group() for group in groups())
    except RuntimeError:
        return -1


def groups() -> list[Any]:
    """All process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def collective_counter() -> Callable[[], int] | None:
    """Return a function that returns the number of collective calls of the default group so far,
    which torch counts in the same way on every rank. It raises a RuntimeError if the backend does
    not count."""
    if not dist.is_initialized():
        return None
    group: Any = dist.distributed_c10d._get_default_group()
    counter: Callable[[], int] = group._get_sequence_number_for_group
    return counter


# -- models, gradients and schedulers -----------------------------------------------------------------


def compile_in_place(model: nn.Module, **arguments: Any) -> None:
    """Compile a model as `nn.Module.compile` does: the names in its state_dict stay, and a copy of
    it is not compiled.

    That method itself leaves out models whose own forward is torch's (a Sequential), because the
    compiler skips torch's files unless a function of another file calls them. So a function of this
    file does.
    """
    model._compiled_call_impl = torch.compile(_calling(model._call_impl), **arguments)


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


def is_compiled(model: nn.Module) -> bool:
    """Whether a model is compiled, in place or as what `torch.compile` returns."""
    return model._compiled_call_impl is not None or uncompiled(model) is not model


def uncompiled(model: Any) -> Any:
    """The model inside of what `torch.compile(model)` returned, or what was passed."""
    return getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model


def accumulated_gradients(modules: Sequence[Any]) -> list[torch.Tensor]:
    """The gradients of FSDP modules from batches that did not exchange them, each once. FSDP keeps
    these unsharded, outside of the parameters. Since torch 2.15, both names mean the same
    tensor."""
    parameters = _unsharded(modules)
    sums = [each.unsharded_accumulated_grad for each in parameters]
    gradients = [*sums, *(each._unsharded_param.grad for each in parameters)]
    return list({id(each): each for each in gradients if each is not None}.values())


def resharding(modules: Sequence[Any]) -> list[tuple[Any, str, Any]]:
    """Which attributes of which objects say whether FSDP modules keep their full parameters from
    the forward pass to the backward pass, with the values."""
    states = [module._get_fsdp_state() for module in modules]
    chosen = [
        (state, "_auto_reshard_after_forward") for state in states if hasattr(state, "_auto_reshard_after_forward")
    ]
    groups = [(group, "post_forward_mesh_info") for state in states for group in _parameter_groups(state)]
    return [(owner, name, getattr(owner, name)) for owner, name in [*chosen, *groups]]


def full_parameters(modules: Sequence[Any]) -> list[torch.Tensor]:
    """The full parameters of FSDP's forward pass; none before the first one."""
    return [each._unsharded_param for each in _unsharded(modules)]


def _unsharded(modules: Sequence[Any]) -> list[Any]:
    groups = [group for module in modules for group in _parameter_groups(module._get_fsdp_state())]
    return [each for group in groups for each in group.fsdp_params if hasattr(each, "_unsharded_param")]


def _parameter_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # older torch has one at most
    return [each for each in ([state._fsdp_param_group] if several is None else several) if each is not None]


def loads_by_copying(model: nn.Module) -> bool:
    """Whether `load_state_dict` of this model does nothing but copy the tensors of its
    `state_dict`: no module has its own way to do either, or a hook."""
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    methods = ("state_dict", "load_state_dict", "set_extra_state")

    def is_usual(module: nn.Module) -> bool:
        kind = type(module)
        overrides = any(getattr(kind, each) is not getattr(nn.Module, each) for each in methods)
        overrides = (
            overrides or not vars(module).keys().isdisjoint(methods) or any(getattr(module, each) for each in hooks)
        )
        inner = (kind._save_to_state_dict, kind._load_from_state_dict)
        return not overrides and all(each.__module__.startswith("torch.") for each in inner)

    return all(map(is_usual, model.modules()))


def is_usual_optimizer(optimizer: Any) -> bool:
    """Whether this is one of torch's, and nothing acts when its state is read or loaded."""
    hooks = (
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    changed = not vars(optimizer).keys().isdisjoint(("state_dict", "load_state_dict"))
    return not changed and not any(getattr(optimizer, each) for each in hooks)


def with_module_versions(content: dict[Any, Any], state: Any) -> dict[Any, Any]:
    """Add the versions of modules to the content of a changed copy of `state`, if that is a
    model's: modules that convert older states read them when they load."""
    if (versions := getattr(state, "_metadata", None)) is None:
        return content
    versioned: Any = OrderedDict(content)  # a plain dict has no attributes
    versioned._metadata = versions
    return cast("dict[Any, Any]", versioned)


def nested_schedulers(scheduler: Any) -> Sequence[Any]:
    """The schedulers inside of a scheduler (SequentialLR, ChainedScheduler)."""
    return cast("Sequence[Any]", getattr(scheduler, "_schedulers", ()))


def divisor_of(loss: torch.Tensor) -> float | None:
    """The number by which a loss was divided in the end, None if it was not."""
    divisor = getattr(loss.grad_fn, "_saved_other", None) if type(loss.grad_fn).__name__ == "DivBackward0" else None
    if isinstance(divisor, torch.Tensor) and divisor.is_cpu and divisor.numel() == 1:
        return float(divisor)
    return None


def steps_of(scheduler: Any) -> Any:
    """A number that changes whenever the scheduler steps, None if it has none."""
    steps = getattr(scheduler, "last_epoch", None)
    inner = nested_schedulers(scheduler)  # a ChainedScheduler has no counter of its own
    return steps_of(inner[0]) if steps is None and inner else steps


def milestones_of(scheduler: Any) -> Sequence[int]:
    """The steps at which a SequentialLR changes from one scheduler to the next."""
    return cast("Sequence[int]", getattr(scheduler, "_milestones", ()))


# Calls its argument when the running backward pass ends.
run_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def content_version(tensor: torch.Tensor) -> int:
    """How often the content of a tensor's memory has been changed in place. In inference mode, that
    is not counted."""
    return 0 if tensor.is_inference() else tensor._version


def keep_found(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Let this optimizer make one more step with the scale. What its step before has found counts
    in the next update."""
    states = scaler._per_optimizer_states
    if (state := states.pop(id(optimizer), None)) is not None:
        states[id(state)] = state


def storage_uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How many have this tensor's memory, and where that is: more if they are other tensors, those
    that autograd has saved, or the storage's variables in Python; elsewhere once it was resized."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage), storage.data_ptr()


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all tensors in place, with one kernel on a GPU."""
    if tensors:
        torch._foreach_mul_(tensors, factor.to(tensors[0].device) if isinstance(factor, torch.Tensor) else factor)


def buffers_at(places: Iterable[tuple[nn.Module, str]]) -> list[torch.Tensor]:
    """The buffers of modules by their names, without those that are None now. This runs once for
    each step; `getattr` takes ten times as long."""
    return [each for module, name in places if (each := module._buffers.get(name)) is not None]


@torch.no_grad()
def copy_all(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes: with one kernel on a GPU, if all have one
    type."""
    if source:
        torch._foreach_copy_(target, source)


def unnoticed(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context in which backward passes do not notice that these tensors change, as DDP sends
    buffers."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def measure_communication(wrapper: Any) -> None:
    """Let a DistributedDataParallel measure every step. On a GPU that would make each step wait for
    the one before, so it measures as few as by default, not in step with what users do every
    hundred."""
    wrapper._set_ddp_runtime_logging_sample_rate(1 if wrapper.device_type == "cpu" else 97)


def exposed_communication_s(wrapper: Any) -> float:
    """The seconds that the newest measured step of a DistributedDataParallel waited for gradients
    after its backward pass was over; 0 before the first one."""
    data = wrapper._get_ddp_logging_data()
    waited = data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)
    return float(max(waited, 0)) / 1e9


# -- accelerate ---------------------------------------------------------------------------------------


def reset_accelerate() -> None:
    """Let accelerate forget the ranks, the device and the precision that it keeps for a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# -- Lightning ----------------------------------------------------------------------------------------


def configured_optimizers(core: Any, module: Any, configured: Any) -> tuple[list[Any], list[Any]]:
    """Find the optimizers and the `LRSchedulerConfig` of each scheduler in what a module's
    `configure_optimizers` has returned. `core` is Lightning's module `core.optimizer`."""
    optimizers, schedulers, monitor = core._configure_optimizers(configured)
    schedules = core._configure_schedulers_automatic_opt(schedulers, monitor)
    core._validate_multiple_optimizers_support(optimizers, module)
    core._validate_scheduler_api(schedules, module)
    return optimizers, schedules
