"""A Trainer of transformers that continues with the next batch after a worker failure. Worker.

train()
    train.elastic restores the last commit, if there is one; then transformers' own resume sets its counters
    each step:
        the micro-batches of the step that this rank computes; those of missing ranks are divided among the others
        on_step_begin      commit: logs, evaluation and checkpoint of the step before are complete
        optimizer.step()   nothing stops it, and it ends with a commit of the weights, by reference

The position in the data is a function of the number of the step: a step has the same samples,
however many ranks there are. If a function runs again from a commit in `optimizer.step()`, the step
is computed once more for its logs, its evaluation and its checkpoint, and not applied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import logging
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from raysgd.core.sampling_plan import RankPart
from raysgd.errors import ConfigError
from raysgd.torch.data.sampling import agree, set_epoch
from raysgd.train.elastic_state import ByReference, copied, elastic
from raysgd.train.generators import generator_states, set_generators
from raysgd.train.huggingface.foreign import WeightsInMemory
from raysgd.train.huggingface.windows import Windows
from raysgd.train.replica import STOP_SIGNAL
from raysgd.train.session_functions import current
from raysgd.training.seeding import seed_for

logger = logging.getLogger("raysgd")

STATE_FILE = "trainer_state.json"
COUNTED = ("labels", "shift_labels")  # in a batch: of those that are not IGNORED, transformers takes the mean
IGNORED = -100
# With these, a loss can divide by the micro-batches of a step, which change when a worker fails.
COUNTS = {"gradient_accumulation_steps", "current_gradient_accumulation_steps", "locals", "vars", "eval", "exec"}
LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)


class Elastic(WeightsInMemory):
    """Goes before a Trainer class, and lets `train()` continue after worker failures.

        class ElasticTrainer(Elastic, MyTrainer):
            pass

    `prepare_trainer` puts it before the class of an object.
    """

    args: Any
    compute_loss_func: Any
    model_accepts_loss_kwargs: bool
    _adds_means = False  # of a step's micro-batches: transformers believes that `compute_loss` has divided them
    continuation: Continuation | None = None  # since `train()` has begun
    weight = 1.0  # of the part that is computed now
    scale = 1.0  # of all parts of this step
    seed_of_parts: int | None = None  # with one, dropout of a part has the same masks on any rank

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train, or continue from the last commit: if there is one, `resume_from_checkpoint` has no
        effect. The `options` are those of the class."""
        for name in ("training_step", "compute_loss", "get_batch_samples", "get_train_dataloader"):
            if not _first_with(name, type(self)).__module__.startswith("raysgd."):
                raise ConfigError(
                    f"{type(self).__name__} overrides {name} of Elastic: put Elastic before the class that has your methods, as in "
                    f"class ElasticTrainer(Elastic, {type(self).__name__})"
                )
        check(self)
        believed = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        self._adds_means = believed and loss_is_scaled(self) is None and ignores_items(own_loss(self))
        inner: Any = super()
        self.continuation = continuation = Continuation(self)
        with continuation.running(resume_from_checkpoint) as folder:
            return inner.train(resume_from_checkpoint=folder, **options)

    def get_train_dataloader(self) -> DataLoader[Any]:
        inner: Any = super()
        loader: DataLoader[Any] = inner.get_train_dataloader()
        if self.continuation is None:
            return loader
        options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
        return DataLoader(loader.dataset, batch_sampler=self.continuation.divided(loader), **options)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Draw this rank's parts of a step. Count no labels of those that are repeated."""
        assert self.continuation is not None
        parts, drawn = self.continuation.begin_step(), list[Any]()

        def counted() -> Iterator[Any]:
            for part, batch in zip(parts, epoch_iterator, strict=False):
                drawn.append(batch)
                yield batch if part.fresh else without_labels(batch)

        inner: Any = super()
        _, items = inner.get_batch_samples(counted(), num_batches, device)
        scaled = loss_is_scaled(self)
        undivided = items is None and (self.compute_loss_func is not None if scaled is None else scaled)
        self.scale = self.continuation.rank_ratio if undivided or (self._adds_means and items is not None) else 1.0
        return drawn, items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super()
        assert self.continuation is not None
        weight, self.current_gradient_accumulation_steps = self.continuation.begin_part(self.seed_of_parts)
        self.weight = weight * self.scale
        try:
            return inner.training_step(model, inputs, *args, **kwargs)
        finally:
            self.weight = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        inner: Any = super()
        weight = self.weight
        if not model.training and self._multiplies_by_ranks(kwargs.get("num_items_in_batch")):
            assert self.continuation is not None
            weight = 1 / self.continuation.rank_ratio
            kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] * weight
        found = inner.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if weight == 1:
            return found
        return (found[0] * weight, *found[1:]) if return_outputs else found * weight

    def _multiplies_by_ranks(self, items: Any) -> bool:
        """Whether transformers multiplies a loss in an evaluation by the number of ranks, because
        it believes that the model has divided it by the `items` of all of them."""
        believed = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        known = self.continuation is not None and items is not None and self.args.average_tokens_across_devices
        return known and believed and own_loss(self).__module__.startswith("transformers.")


def _first_with(name: str, *kinds: type) -> type:
    """Find the class that has this method, of these and their bases."""
    return next(each for kind in kinds for each in kind.__mro__ if name in vars(each))


def loss_is_scaled(trainer: Any) -> bool | None:
    """Return what the class says about its loss: transformers before 5.20 does not ask for it."""
    name = "loss_is_scaled_for_ga"
    return getattr(trainer, name) if hasattr(Trainer, name) else None


def own_loss(trainer: Any) -> Any:
    """Return the `compute_loss` that comes after that of Elastic."""
    kinds = type(trainer).__mro__
    return vars(_first_with("compute_loss", *kinds[kinds.index(Elastic) + 1 :]))["compute_loss"]


def ignores_items(compute_loss: Any) -> bool:
    """Return whether this function reads neither `num_items_in_batch` nor how many micro-batches a
    step has: its loss is then a mean over the batch that it got, or a sum."""
    if not isinstance(compute_loss, FunctionType):
        return False
    parameters = inspect.signature(compute_loss, follow_wrapped=False).parameters.values()
    given = {"num_items_in_batch", *(each.name for each in parameters if each.kind is each.VAR_KEYWORD)}
    code = compute_loss.__code__
    if given & {*code.co_cellvars} or COUNTS & names_in(code):
        return False
    steps = [each for each in dis.get_instructions(code) if "FAST" in each.opname]
    return not any(given & ({each.argval} if isinstance(each.argval, str) else {*each.argval}) for each in steps)


def names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in a function and those within it."""
    within = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(names_in, within))


def without_labels(batch: Any) -> Any:
    """The batch without labels that count. In batches that are not mappings, transformers counts
    none."""
    if not isinstance(batch, Mapping):
        return batch
    return {**batch, **{name: torch.full_like(batch[name], IGNORED) for name in COUNTED if name in batch}}


def check(trainer: Any) -> None:
    """Raise an error for a Trainer that cannot continue with the next batch."""
    args, accelerator = trainer.args, trainer.accelerator
    if not args.average_tokens_across_devices:
        logger.warning(
            "average_tokens_across_devices=False weighs the tokens of a batch by those of its rank: after a worker failure, the numbers of "
            "this Trainer differ from those of an undisturbed run"
        )
    own = own_loss(trainer)
    unknown = trainer.model_accepts_loss_kwargs and loss_is_scaled(trainer) is None and not ignores_items(own)
    if unknown and not own.__module__.startswith("transformers."):
        raise ConfigError(
            f"{getattr(own, '__qualname__', own)} can read num_items_in_batch, or how many micro-batches a step has, and an elastic "
            "Trainer cannot know whether it divides its loss by that. After a worker failure, its gradients could be wrong. Write "
            "`loss_is_scaled_for_ga = True` in the class if it divides (by num_items_in_batch: multiplied by accelerator.num_processes, as "
            "transformers does), or False if it is a mean over the batch that it got (transformers 5.20 or newer)"
        )
    config, optim = args.accelerator_config, str(getattr(args.optim, "value", args.optim))
    refused = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "parallelism_config": getattr(accelerator, "parallelism_config", None) is not None,
        "an IterableDataset": isinstance(trainer.train_dataset, IterableDataset),
        "split_batches": config.split_batches,
        "dispatch_batches": config.dispatch_batches,
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "train_sampling_strategy='batch_rebalance'": getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "several GPUs in one process": args.n_gpu > 1,
        f"optim={optim!r}, which changes weights in the backward pass": "lomo" in optim or "layerwise" in optim,
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
    }
    for name, found in refused.items():
        if found:
            raise ConfigError(
                f"an elastic Trainer cannot continue in the middle of an epoch with {name}: leave it out, or pass "
                "prepare_trainer(trainer, elastic=False), which starts again from the newest checkpoint after a worker failure"
            )


class Continuation(TrainerCallback):  # type: ignore[misc]
    """Owns what a Trainer continues from: it is part of the state of `train.elastic`. The content
    of a commit waits in `_pending` until the Trainer has created the objects that it belongs to.

    Weights and the optimizer's state are committed by reference, unless the optimizer changes them
    at other times: those of fp16 and of schedule-free optimizers are copied.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._session = trainer, current("elastic")
        args = trainer.args
        self._pending: dict[str, Any] | None = None
        self._restored = self._stepped = False
        self._by_reference = True
        self._before: Any = None  # the content that does not change in `optimizer.step()`, as the step began
        self._frozen: dict[str, Any] = {}  # the first values of each parameter that the optimizer does not change
        self._sampler: PartSampler | None = None
        self._parts: Iterator[RankPart] = iter(())
        first = {
            "ranks": self._session.planned_ranks,
            "steps": args.gradient_accumulation_steps,
            "batch": args.train_batch_size,
        }
        self._state = elastic({"trainer": self, **first})
        self._per_step = self._state["ranks"] * self._state["steps"]

    @contextlib.contextmanager
    def running(self, given: Any) -> Iterator[Any]:
        """A context for a Trainer's `train`, with the folder that it resumes from: if there is no
        commit, the `given` one."""
        trainer, info = self._trainer, self._session.rank_info
        callbacks, args = trainer.callback_handler.callbacks, trainer.args
        asked = args.gradient_accumulation_steps, args.eval_on_start
        args.gradient_accumulation_steps = -(-self._per_step // info.world_size)
        args.eval_on_start = args.eval_on_start and self._pending is None
        callbacks.insert(0, self)  # before those that look at weights in on_train_begin
        trainer.weights_in_memory, trainer.before_best_model = self._pending is not None, self.copy_last
        try:
            with tempfile.TemporaryDirectory() as folder:
                if self._pending is not None:
                    state = type(trainer.state)(**self._pending["before"].content["state"])
                    state.save_to_json(str(Path(folder, STATE_FILE)))
                yield given if self._pending is None else folder
        finally:
            args.gradient_accumulation_steps, args.eval_on_start = asked
            callbacks.remove(self)
            del trainer.before_best_model
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    # -- the parts of a step --------------------------------------------------------------------------

    def divided(self, loader: Any) -> PartSampler:
        """The batches of this rank, of a loader that accelerate has prepared."""
        batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        if type(batches) is not BatchSampler or isinstance(batches.sampler, DistributedSampler):
            raise ConfigError(
                f"an elastic Trainer cannot divide the batches of a {type(batches).__name__} among other ranks: pass train_dataset "
                "without a batch sampler, or prepare_trainer(trainer, elastic=False)"
            )
        sampler: Any = batches.sampler
        info, state, args = self._session.rank_info, self._state, self._trainer.args
        if batches.batch_size != args.train_batch_size:
            raise ConfigError(
                f"an elastic Trainer has per_device_train_batch_size={args.train_batch_size}, and its train loader has batches of "
                f"{batches.batch_size}: let both be equal, or pass prepare_trainer(trainer, elastic=False)"
            )
        place = info.world_size, info.world_rank, state["ranks"]
        windows = Windows(len(sampler), state["batch"], self._per_step, *place, bool(batches.drop_last))
        if not windows.steps:
            raise ConfigError(
                f"each of {windows.first_ranks} workers needs {windows.batch} samples for a step, and there are {windows.samples} in all. "
                "dataloader_drop_last=True drops them, so no step is left. Use more samples, smaller batches, or dataloader_drop_last=False"
            )
        self._sampler = PartSampler(windows, sampler, lambda: self._trainer.state.global_step, loader.dataset)
        if self._pending is not None:
            self._sampler.drawn = self._pending["order"].content
        return self._sampler

    def begin_step(self) -> list[RankPart]:
        """Choose the parts that this rank computes in the step that begins."""
        windows = self._windows
        parts = windows.of_rank(self._trainer.state.global_step % windows.steps)
        self._parts = iter(parts)
        return parts

    def begin_part(self, seed: int | None) -> tuple[float, float]:
        """Find the weight of the step's next part, and the number by which its mean loss is
        divided: how many parts there are for each rank."""
        windows, part = self._windows, next(self._parts)
        epoch, step = divmod(self._trainer.state.global_step, windows.steps)
        if seed is not None:
            seed_for(seed, epoch=epoch + 1, offset=part.start)
        return part.weight, windows.count(step) / windows.ranks

    @property
    def rank_ratio(self) -> float:
        """Return how many ranks there are for each one of the first attempt."""
        return self._windows.ranks / self._windows.first_ranks

    @property
    def _windows(self) -> Windows:
        assert self._sampler is not None
        return self._sampler.windows

    # -- the state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if self._sampler is None:  # training has not begun
            return {}
        if not self._stepped:
            self._before = ByReference(copied(self._other_state()))
        optimizer = trainer.optimizer.state_dict()
        moving = {"weights": self._weights(), "optimizer": optimizer["state"]}
        return {
            "before": self._before,
            "moving": ByReference(moving) if self._by_reference else moving,
            "groups": optimizer["param_groups"],
            "buffers": dict(trainer.model.named_buffers()),
            "order": ByReference(self._sampler.drawn),
            "frozen": ByReference(self._frozen),
            "stepped": self._stepped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending = state or None

    def _weights(self, frozen: bool = False) -> dict[str, Any]:
        """The parameters that the optimizer changes, or all others."""
        stepped = {id(each) for each in self._stepped_parameters()}
        named = self._trainer.model.named_parameters()
        return {name: each.detach() for name, each in named if (id(each) in stepped) != frozen}

    def _stepped_parameters(self) -> list[Any]:
        return [each for group in self._trainer.optimizer.param_groups for each in group["params"]]

    def _check_parameters(self) -> None:
        """Raise an error for weights that a commit does not have: those of the optimizer that are
        not the model's, and others, as under PEFT, that the function has not created the same
        way."""
        unknown = {*map(id, self._stepped_parameters())} - {*map(id, self._trainer.model.parameters())}
        if unknown:
            raise ConfigError(
                f"the optimizer has {len(unknown)} parameters that are not in the model, and an elastic Trainer keeps those of the model: "
                "make the module that has them a part of the model, or pass prepare_trainer(trainer, elastic=False)"
            )
        self._frozen = {name: each.flatten()[:8] for name, each in self._weights(frozen=True).items()}
        before = self._frozen if self._pending is None else self._pending["frozen"].content
        other = [name for name, value in self._frozen.items() if not torch.equal(value.cpu(), before[name].cpu())]
        if other:
            raise ConfigError(
                f"{other[0]}, which the optimizer does not change, has other values than before the worker failure: create such parameters "
                "the same way each time, from a file or after torch.manual_seed, and change them in no callback"
            )

    def _other_state(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler, state = trainer.accelerator.scaler, trainer.state
        fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
        return {
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "state": {**fields, "log_history": []},
            "history": ByReference(tuple(state.log_history)),
            "callbacks": [each.state()["attributes"] for each in self._exporting()],
            "random": ByReference(generator_states()),
        }

    def _exporting(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _restore(self, kept: dict[str, Any]) -> None:
        trainer, moving, before = self._trainer, kept["moving"], copied(kept["before"].content)
        moving = moving.content if isinstance(moving, ByReference) else moving
        self._load_tensors({**moving["weights"], **kept["buffers"]})
        trainer.optimizer.load_state_dict({"state": moving["optimizer"], "param_groups": kept["groups"]})
        trainer.lr_scheduler.load_state_dict(before["scheduler"])
        if before["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(before["scaler"])
        trainer.state.log_history = list(before["history"].content)
        for callback, attributes in zip(self._exporting(), before["callbacks"], strict=True):
            vars(callback).update(attributes)
        if kept["stepped"]:
            skip_once(trainer.optimizer, lambda: self._load_tensors(kept["buffers"]))
        self._before, self._stepped = kept["before"], kept["stepped"]
        self._pending, self._restored = None, True

    def _load_tensors(self, found: dict[str, Any]) -> None:
        model = self._trainer.model
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in found.items():
                own[name].copy_(value)

    # -- called by the Trainer ------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the Trainer has its optimizer."""
        self._check_parameters()
        if self._pending is not None:
            self._restore(self._pending)
        optimizer = self._trainer.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        self._by_reference = self._trainer.accelerator.scaler is None and not hasattr(inner, "eval")
        if self._by_reference:
            inner.register_step_pre_hook(lambda *_: self._begin_step_of_optimizer())
            inner.register_step_post_hook(lambda *_: self._end_step_of_optimizer())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before the first part of a step, whose batches were read."""
        if self._restored:
            set_generators(self._before.content["random"].content)
            self._state.keep_again()
        else:
            self._state.commit()
        self._restored = self._stepped = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_epoch_stop and not control.should_training_stop:
            raise ConfigError(
                "a callback has ended an epoch early (control.should_epoch_stop), and the place in the data follows from the number of "
                "the step: end the training instead, or pass prepare_trainer(trainer, elastic=False)"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.copy_last()

    def copy_last(self) -> None:
        """Copy the commit of the last step, because the Trainer then loads its best model, or the
        function may change the weights."""
        if self._by_reference and self._before is not None:
            self._by_reference, self._stepped = False, True
            self._state.keep_again()

    def _begin_step_of_optimizer(self) -> None:
        self._session.ensure_whole()
        signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})

    def _end_step_of_optimizer(self) -> None:
        self._stepped = True
        try:
            self._state.commit_step()
        finally:
            self._stepped = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})


class PartSampler(Sampler[list[int]]):
    """The batches of one rank: its parts of each step of an epoch. Owns the epoch's order, which is
    rank 0's."""

    def __init__(self, windows: Windows, sampler: Any, step: Any, data: Any = None) -> None:
        self.windows, self._sampler, self._step, self._data = windows, sampler, step, data
        self.drawn: tuple[int, Any] | None = None  # an epoch, and its order

    def __len__(self) -> int:
        return len(self.windows)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = divmod(self._step(), self.windows.steps)
        set_epoch(self._data, epoch)
        return self._parts_of(epoch, done)

    def _parts_of(self, epoch: int, done: int) -> Iterator[list[int]]:
        """Yield nothing in the batches of steps that are done: transformers drops them unread. The
        order is drawn with the first batch, as a loader's iterator has drawn a number before
        that."""
        if self.drawn is None or self.drawn[0] != epoch:
            set_epoch(self._sampler, epoch)
            order: Any = torch.tensor(list(self._sampler))
            if self.windows.ranks > 1:
                order, _ = agree(order, None, first=self.windows.rank == 0)
            self.drawn = epoch, order
        order = self.drawn[1]
        for step in range(self.windows.steps):
            for part in self.windows.of_rank(step):
                yield [] if step < done else order[part.start : part.stop].tolist()


def skip_once(optimizer: Any, instead: Callable[[], None]) -> None:
    """Let the next call of `optimizer.step` do this instead."""
    own = optimizer.step

    def step(*args: Any, **kwargs: Any) -> None:
        optimizer.step = own
        instead()

    optimizer.step = step
