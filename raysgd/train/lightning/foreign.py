"""The state of a fit that Lightning's checkpoints lack, and all private names of Lightning. Worker.

Checked with Lightning 2.6.6; 2.5.0 has the same names, where it has these features.
"""

from __future__ import annotations

import csv
import dis
import functools
import io
import logging
import pickle
from collections.abc import Iterator, Set
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from raysgd.errors import ConfigError
from raysgd.train.in_place.points import Points
from raysgd.train.lightning.package import imported
from raysgd.workers.serialization import pickler_class

logger = logging.getLogger("raysgd")

# The attributes of Lightning's own objects that change while a fit trains, and do not depend on its workers.
STATE = {
    "trainer": "should_stop accumulate_grad_batches gradient_clip_val gradient_clip_algorithm check_val_every_n_epoch "
    "val_check_batch log_every_n_steps limit_val_batches",
    "metrics": "_progress_bar_metrics _logged_metrics _callback_metrics _current_fx _first_loop_iter",
    "fit": "epoch_progress min_epochs max_epochs _restarting _restart_stage",
    "epoch": "batch_progress scheduler_progress min_steps max_steps _results _batches_that_stepped _skip_next_val",
    "steps": "optim_progress _skip_backward",
    "validation": "batch_progress _has_run",
    "fetcher": "fetched done",
}
# Of these, Lightning's checkpoint has all: clocks, which differ between machines, and weights. Others only show something.
ALREADY_KEPT = "Timer ThroughputMonitor WeightAveraging ProgressBar ModelSummary DeviceStatsMonitor"
NOT_KEPT = {"_last_time_checked", "file_exists"}  # a clock, and what `replace_files` sets
OF_METRICS = {"update", "compute", "_update_signature"}  # functions that wrap those of the class
NOT_COPIED = (
    "raysgd cannot copy %s. After a worker failure, it is as the training function makes it. If training changes it, give its class "
    "__getstate__ and __setstate__"
)


def refused(feature: str, instead: str) -> ConfigError:
    return ConfigError(
        f"RayDDPStrategy cannot continue within an epoch with {feature}: {instead}, or pass elastic=False to "
        "prepare_trainer, with which a failure starts the function again"
    )


class FitState:
    """Keeps and puts back what the objects of a fit hold: each attribute of the module, its
    submodules and the callbacks, the counters of the loops, logged values, `requires_grad`, the
    optimizers with their groups, and the schedulers.

    Objects of the fit have names, by which another process finds its own.
    """

    def __init__(self, trainer: Any, *, says: bool) -> None:
        self._trainer, self._says = trainer, says
        self._standard = {*vars(imported("").LightningModule())} - {"training", "_hparams"}
        classes = [getattr(imported(".callbacks"), name, None) for name in ALREADY_KEPT.split()]
        self._complete = tuple(each for each in classes if each is not None)
        self._not_copied: set[tuple[str, str]] = set()
        self._shapes: dict[str, Any] = {}
        self._of_optimizers = {*vars(torch.optim.SGD([torch.zeros(1)]))} - {"param_groups", "state"} | {"step"}

    def keep(self, in_checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Pickle all attributes. Tensors are beside them, and not copied: those that a checkpoint
        has are the same objects in it."""
        weights = dict(self._weights())
        for name, value in in_checkpoint.items():
            if name in weights and value.data_ptr() == weights[name].data_ptr():
                in_checkpoint[name] = weights[name]
        objects = [*self._named()]
        named = {id(each): name for name, each in objects if each is not None}
        content = dict(self._attributes(objects))
        try:
            pickled = _dumps(content, named)
        except Exception:
            self._leave_out(content, named)
            pickled = _dumps(content, named)
        fit = self._trainer.fit_loop
        counted = {"epoch": fit.epoch_progress.state_dict(), "step": fit.epoch_loop._batches_that_stepped}
        self._check_shapes(weights)
        return {"weights": weights, "pickled": pickled, "max_epochs": fit.max_epochs, **counted}

    def _check_shapes(self, weights: dict[str, torch.Tensor]) -> None:
        """Raise ConfigError for what a module that the function makes could not load."""
        shapes = {name: each.shape for name, each in weights.items()}
        self._shapes = self._shapes or shapes
        if other := sorted({name for name, _ in shapes.items() ^ self._shapes.items()}):
            raise ConfigError(
                f"{other[0]} of the module is new or has another shape than at the first batch, so a module that the training function "
                "makes again could not load it. Create it with that shape, or pass elastic=False to prepare_trainer"
            )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self._modules():
            for name, each in [*module.named_parameters(prefix), *module.named_buffers(prefix)]:
                yield name, each.detach()

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """The module, and the averages of it that a callback of Lightning has made before the
        fit."""
        yield "", self._trainer.lightning_module
        for number, each in enumerate(self._trainer.callbacks):
            if isinstance(each, self._complete):
                items = vars(each).items()
                yield from ((f"{number} {name}", value) for name, value in items if isinstance(value, torch.nn.Module))

    def _leave_out(self, content: dict[str, dict[str, Any]], named: dict[int, str]) -> None:
        """Take out the attributes that cannot be pickled, and name those that user classes have."""
        for name, values in content.items():
            for attribute in [*values]:
                try:
                    _dumps(values[attribute], named)
                except Exception as error:
                    kind, known = type(dict(self._named())[name]), isinstance(error, _OfTheFunction)
                    if self._says and not known and not kind.__module__.startswith(OTHERS):
                        logger.warning(NOT_COPIED, f"{kind.__name__}.{attribute} ({type(values[attribute]).__name__})")
                    del values[attribute]
                    self._not_copied.add((name, attribute))

    def begin_in_epoch(self, content: dict[str, Any]) -> None:
        """Let the fit begin within the epoch of the commit, so that no hook of its start is called
        again. The batch at which it begins is the loader's, which comes with its state."""
        fit = self._trainer.fit_loop
        fit.epoch_progress.load_state_dict(content["epoch"])
        fit.max_epochs, fit._restarting = content["max_epochs"], True

    def put_back(self, content: dict[str, Any]) -> None:
        """Put weights and attributes into the objects."""
        with torch.no_grad():
            for name, value in self._weights():
                value.copy_(content["weights"][name])
        named = dict(self._named())
        for name, state in _Unpickler(content["pickled"], named, self._trainer.strategy.root_device).load().items():
            live: Any = named.get(name)
            if name == "parameters":
                for each, requires_grad in state.items():
                    named[each].requires_grad_(requires_grad)
            elif name.startswith("scheduler"):
                live.load_state_dict(state)
            else:
                for attribute, value in state.items():
                    _put_back(vars(live), attribute, value)

    # -- what the ranks have measured -----------------------------------------------------------

    def _measured(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """What each rank adds up within an epoch: objects with a name, and how ranks are
        reduced."""
        for name, each in self._trainer.fit_loop.epoch_loop._results.items():
            if each.is_tensor and each.meta.on_epoch and not each.has_reset:
                kind = "max" if each.meta.is_max_reduction else "min" if each.meta.is_min_reduction else "sum"
                yield name, each, {"value": kind, "cumulated_batch_size": "sum"}
        for name, each in self._trainer.lightning_module.named_modules():
            if isinstance(each, Metric) and each.update_called:
                kinds = {state: getattr(reduction, "__name__", "") for state, reduction in each._reductions.items()}
                yield name, each, {state: kind.removeprefix("dim_zero_") for state, kind in kinds.items()}

    def measured(self) -> dict[tuple[str, str], Any]:
        """This rank's share of what its epoch has measured. Raise ConfigError for a metric that is
        more than sums."""
        sums = {}
        for name, each, kinds in self._measured():
            for state, kind in kinds.items():
                if kind in REDUCE and hasattr(each, state):
                    sums[name, state] = getattr(each, state).cpu()
            if isinstance(each, Metric) and {*kinds.values()} - {*REDUCE}:
                raise refused(
                    f"{name}, {type(each).__name__}, in training_step, because a failed worker takes the samples that it gathers along",
                    "measure it in a validation, or take a metric that adds up (as with thresholds=100)",
                )
        return sums

    def leave_out_batch(self) -> None:
        """Let this batch count as none in means over the epoch."""
        self._trainer.fit_loop.epoch_loop._results.batch_size = 0

    def share_measured(self, of_ranks: list[dict[tuple[str, str], Any]], *, first: bool) -> None:
        """Give what all ranks have measured to the `first` one, or to each where they are not added
        up."""
        for name, each, kinds in self._measured():
            for state, kind in kinds.items():
                values = [of_rank[name, state] for of_rank in of_ranks if (name, state) in of_rank]
                if not values:
                    continue
                total = REDUCE[kind](torch.stack(values), 0).to(getattr(each, state))
                alone = kind == "sum" and (not hasattr(each, "meta") or each.meta.sync.should)
                setattr(each, state, total if first or not alone else torch.zeros_like(total))
            each._computed = None

    # -- the objects ------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, Any]]:
        """The objects that each process makes itself, with names."""
        trainer, module = self._trainer, self._trainer.lightning_module
        fit = trainer.fit_loop
        epoch = fit.epoch_loop
        yield from {"trainer": trainer, "metrics": trainer._logger_connector, "fit": fit, "epoch": epoch}.items()
        yield from {"steps": epoch.automatic_optimization, "validation": epoch.val_loop}.items()
        yield from {"fetcher": fit._data_fetcher, "strategy": trainer.strategy, "data": trainer.datamodule}.items()
        yield "precision", trainer.precision_plugin
        data, depth = trainer.train_dataloader.dataset, 0
        while data is not None:  # a Subset has another one
            yield f"dataset {depth}", data
            data, depth = getattr(data, "dataset", None), depth + 1
        yield from ((f"callback {number}", each) for number, each in enumerate(trainer.callbacks))
        yield from ((f"logger {number}", each) for number, each in enumerate(trainer.loggers))
        yield from ((f"optimizer {number}", each) for number, each in enumerate(trainer.optimizers))
        yield from ((f"wrapper {number}", each) for number, each in enumerate(trainer.strategy._lightning_optimizers))
        yield from ((f"scheduler {number}", each.scheduler) for number, each in enumerate(trainer.lr_scheduler_configs))
        yield from ((f"module {name}", each) for name, each in module.named_modules())
        yield from ((f"parameter {name}", each) for name, each in module.named_parameters())
        yield from ((f"buffer {name}", each) for name, each in module.named_buffers())

    def _attributes(self, objects: list[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        requires_grad = {}
        omissions: Set[str]
        for name, live in objects:
            kind = name.split()[0]
            if kind in STATE:
                attributes = {each: vars(live)[each] for each in STATE[kind].split() if each in vars(live)}
            elif kind == "module":
                omissions = self._standard | OF_METRICS if isinstance(live, Metric) else self._standard
                attributes = {each: value for each, value in vars(live).items() if each not in omissions}
            elif kind == "callback":
                complete = isinstance(live, self._complete)
                omissions = _set_by_lightning(type(live)) if complete else NOT_KEPT  # type: ignore[arg-type]
                attributes = {each: value for each, value in vars(live).items() if each not in omissions}
            elif kind in ("dataset", "data") and hasattr(live, "__dict__"):
                attributes = {each: value for each, value in vars(live).items() if isinstance(value, (int, float, str))}
            elif kind == "optimizer":
                attributes = {each: value for each, value in vars(live).items() if each not in self._of_optimizers}
            elif kind == "scheduler":
                attributes = live.state_dict()
            elif kind == "parameter":
                requires_grad[name] = live.requires_grad
                continue
            else:
                continue
            yield name, {each: value for each, value in attributes.items() if (name, each) not in self._not_copied}
        yield "parameters", requires_grad


@functools.cache
def _set_by_lightning(kind: Any) -> Set[str]:
    """The attributes that a class of Lightning sets, of which a user's class can have more."""
    bases = [each for each in kind.__mro__ if each.__module__.startswith(OTHERS)]
    functions = [each for base in bases for each in vars(base).values() if isinstance(each, FunctionType)]
    steps = [each for function in functions for each in dis.get_instructions(function)]
    return {each.argval for each in steps if each.opname == "STORE_ATTR"}


def _put_back(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute. A container stays, because others may have it, too: Lightning's wrappers
    have the groups of an optimizer."""
    live = attributes.get(name)
    if isinstance(live, list) and type(live) is type(value):
        live[:] = value
    elif isinstance(live, (dict, set)) and type(live) is type(value):
        live.clear()
        live.update(value)
    else:
        attributes[name] = value


REDUCE: dict[str, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
OTHERS = ("lightning.", "pytorch_lightning.", "torch.", "torchmetrics.", "raysgd.")


class _OfTheFunction(pickle.PicklingError):
    """Data sets and loaders are those that the function makes."""


def _live(name: str) -> Any:
    """Stands in a pickle for an object of the fit."""


def _tensor(number: int, device: str, trained: bool | None) -> Any:
    """Stands in a pickle for a tensor, which is beside it."""


def _dumps(value: Any, named: dict[int, str]) -> tuple[bytes, list[torch.Tensor]]:
    file, tensors, base = io.BytesIO(), list[torch.Tensor](), pickler_class()

    class Pickler(base):  # type: ignore[misc, valid-type]
        def reducer_override(self, obj: Any) -> Any:
            if id(obj) in named:
                return _live, (named[id(obj)],)
            if type(obj) in (torch.Tensor, torch.nn.Parameter):
                tensors.append(obj.detach())
                trained = obj.requires_grad if type(obj) is torch.nn.Parameter else None
                return _tensor, (len(tensors) - 1, obj.device.type, trained)
            if isinstance(obj, (Dataset, DataLoader)):
                raise _OfTheFunction
            if isinstance(obj, io.IOBase):
                raise pickle.PicklingError("a file")
            return super().reducer_override(obj)

    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue(), tensors


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: tuple[bytes, list[torch.Tensor]], named: dict[str, Any], device: torch.device) -> None:
        super().__init__(io.BytesIO(content[0]))
        self._tensors, self._named, self._device = content[1], named, device

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        return {_live: self._named.__getitem__, _tensor: self._made}.get(value, value)

    def _made(self, number: int, device: str, trained: bool | None) -> torch.Tensor:
        copy = self._tensors[number].to(self._device if device == self._device.type else device, copy=True)
        return copy if trained is None else torch.nn.Parameter(copy, trained)


# -- files that a fit writes ------------------------------------------------------------------------


class Logs:
    """The loggers of a fit. What it logs waits for the next commit, and those that write into a
    folder with a version continue in that of the first attempt."""

    def __init__(self, trainer: Any) -> None:
        kinds, loggers = imported(".loggers"), trainer.loggers
        self._trainer, self._loggers = trainer, loggers
        self._pass_through()  # one that outlives an attempt, which has ended before its fit
        self._in_folders = [each for each in loggers if isinstance(each, (kinds.CSVLogger, kinds.TensorBoardLogger))]
        self.versions = [each.version for each in self._in_folders]
        self._log_metrics = [each.log_metrics for each in loggers]
        self.points = Points(self._log)
        for number, each in enumerate(loggers):
            each.log_metrics = functools.partial(self._add, number)
            each.finalize = functools.partial(self._finalize, each.finalize)

    def _add(self, number: int, metrics: Any, step: int | None = None) -> None:
        self.points.add(number, dict(metrics), step)

    def _log(self, number: int, metrics: dict[str, Any], step: int | None) -> None:
        self._log_metrics[number](metrics, step)
        self._loggers[number].save()

    def _finalize(self, finalize: Any, status: str) -> None:
        if status == "success":
            self.points.end()
        if status != "success" or self._trainer.state.fn == "fit":
            self._pass_through()
        finalize(status)

    def _pass_through(self) -> None:
        """Let the loggers log at once."""
        for each in self._loggers:
            for name in ("log_metrics", "finalize"):
                vars(each).pop(name, None)

    def continue_in(self, versions: list[Any], *, resumes: bool) -> None:
        """Continue in these folders, and with `resumes` in the files there."""
        for each, version in zip(self._in_folders, versions, strict=True):
            each._version = version
            if resumes and isinstance(each, imported(".loggers").CSVLogger):
                _append(each)


def _append(logger: Any) -> None:
    """Let a CSVLogger continue its file, which its writer removes when it is made."""
    path = str(Path(logger.log_dir, "metrics.csv"))
    if imported(".utilities").rank_zero_only.rank == 0 and logger._fs.isfile(path):
        with logger._fs.open(path, "r", newline="") as file:
            rows = [*csv.DictReader(file)]
        logger.experiment.metrics = rows
        logger.save()


def replace_files(trainer: Any, paths: list[str]) -> None:
    """Let each ModelCheckpoint write these files, which were saved after the commit, again under
    the same names."""
    for callback in trainer.checkpoint_callbacks:
        exists = getattr(callback, "file_exists", None)
        if exists is not None:
            callback.file_exists = lambda path, trainer, exists=exists: (
                exists(path, trainer) and not trainer.strategy.broadcast(str(path) in paths)
            )
