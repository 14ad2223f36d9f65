"""The TorchTrainer's calls other than training and validation: models, and saving and loading
state. Worker.

A trainer makes a `Call` of one of these functions, and every rank runs it with its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from raysgd.core.channel.blobs import Blobs
from raysgd.core.outcomes import Interrupted
from raysgd.core.tree import mapped
from raysgd.errors import shown
from raysgd.replica.loading import agreed, refusal_of, take_over
from raysgd.replica.seeding import derived_seed
from raysgd.replica.writing import Report, reported
from raysgd.storage.locations import Place
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.group.fsdp import gathered
from raysgd.torch.replica import TorchReplica
from raysgd.torch.state import shard_files, states
from raysgd.torch.state.checks import check_fits
from raysgd.torch.state.models import packed_models
from raysgd.torch.state.rank_comparison import elements_of, sums_of


def update_scheduler(replica: TorchReplica, metric: Any) -> None:
    schedulers = replica.internals.registered.schedulers
    if not schedulers:
        raise TypeError("update_scheduler needs a scheduler: register one with self.register(schedulers=...)")
    for scheduler in schedulers:
        scheduler.step(metric)


def weight_sums(replica: TorchReplica) -> str:
    """What this rank reports of its weights, for a comparison with the other ranks."""
    return sums_of(replica.operator, replica.internals.registered)


def get_model(replica: TorchReplica) -> Blobs | None:
    """The unwrapped models, on rank 0, which are sent as they are: nothing changes them before this
    call has ended."""
    first, registered = replica.rank == 0, replica.internals.registered
    if registered.shards is not None:
        saved = gathered([model.state_dict() for model in registered.models], keep=first)
        replica.control.ensure_whole()
        return packed_models(registered.shards.full_models(saved), replica.control.dumps) if first else None
    return packed_models(registered.models, replica.control.dumps) if first else None


def not_finite(replica: TorchReplica) -> str:
    """The name of a parameter with elements that are infinite or NaN, if there is one."""
    named = [pair for model in replica.internals.registered.models for pair in model.named_parameters()]
    tensors = {
        name: elements_of(each.detach()) for name, each in named if not is_lazy(each) and each.is_floating_point()
    }
    # Sums are ten times faster than a copy, and in float32 those of usable weights are finite.
    sums = [each.sum(dtype=torch.promote_types(each.dtype, torch.float32)).double() for each in tensors.values()]
    finite = torch.stack([each.to(replica.operator.device) for each in sums]).isfinite().tolist() if sums else ()
    return next((name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite), "")


def predict(replica: TorchReplica, data: Any, batch_size: int, number: int) -> Any:
    """Compute this rank's outputs, each with the place of its step in the data. `number` is that of
    the prediction. Training's random numbers stay as they are."""
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size)
    places, operator, control = replica.places("predict"), replica.operator, replica.control
    on, in_full = operator.device, replica.internals.registered.precision.output
    source = PlannedSource(loader, pad=False, division=replica.internals.settings.evaluation, places=places, device=on)
    outputs: list[tuple[int, Any]] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), replica.internals.validating():
        if places is None:
            torch.default_generator.manual_seed(derived_seed(torch.initial_seed(), number))
        source.begin(number - 1, replica.internals.rank_info, replica.internals.settings.distributed)
        for index, drawn in enumerate(source.batches(replica.internals.rank_info, 0)):
            if control.interrupted:
                return Interrupted(None, "a peer failed", replica.progress)
            batch = replica.carrier.arrived(replica.carrier.send(drawn.batch))
            if places is not None and drawn.first is not None:
                places.enter(epoch=number, offset=drawn.first)
            output = operator.predict_batch(batch, {"batch_idx": index})
            outputs.append((drawn.offset, states.copied(mapped(in_full, output))))
            if control.due():
                control.report(replace(replica.progress, batches=index + 1))
    source.close()
    return outputs


def joined(outputs: list[Any]) -> Any:
    """Join the outputs of several batches into that of one: tensors are concatenated, also those in
    containers."""
    first = outputs[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(outputs)
    if isinstance(first, Mapping):
        return {name: joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, (list, tuple)):
        columns = [joined(list(column)) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(
        "predict_batch must return a tensor with a row for each sample, or a list, tuple or dict of such tensors, got "
        f"{shown(first)}"
    )


def rows_that_differ(replica: TorchReplica) -> list[str]:
    """Name the loaders that have as many rows as in the state that was loaded, but others. If a
    loader has another length, the user has changed the data on purpose."""
    here = replica.rows.known(*replica.data_names)
    pairs = [
        (name, here[name], saved) for name, saved in replica.saved_rows.items() if name in here and here[name].indices
    ]
    if any(rows.units != units for _, rows, (units, _) in pairs):
        return []
    return [name for name, rows, (_, indices) in pairs if rows.indices != indices]


def save_shards(replica: TorchReplica, folder: Place, transfers: list[str], later: bool) -> Report | None:
    """Write this rank's shard files, now or in the background. Report their sizes and digests."""
    store = shard_files.write(folder, replica.full_state(raw=True), later=later)

    def write(give: Callable[[Any], None]) -> Report:
        return {name: list(astuple(entry)) for name, entry in store().items()}

    return reported(replica, transfers[replica.rank], write, later=later)


def restore_shards(replica: TorchReplica, folder: Place, files: shard_files.Files, loads: int | None) -> Any:
    """Load a sharded checkpoint, of which each rank verifies some files."""
    registered, ranks = replica.internals.registered, replica.operator.world_size
    with closing(shard_files.ShardFolder(folder, files)) as source:
        _, refusal = agreed(replica, lambda: source.verify(replica.rank, ranks))  # before anything is unpickled
        if refusal is None:
            outline = partial(shard_files.read_outline, source.folder)
            _, refusal = agreed(replica, lambda: check_fits(registered, states.shaped(outline())))
        if refusal is not None:
            return refusal
        try:
            state = shard_files.read(
                source, registered
            )  # with the other ranks, so an error of this one alone must free them
        except shard_files.UnreadableTensorsError as error:
            return refusal_of(error)
        return take_over(replica, lambda: state, loads)
