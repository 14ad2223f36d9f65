"""A Trainer of transformers that continues with the next batch after a worker failure. Worker.

train()
    train.elastic restores the last commit, if there is one; then transformers' own resume sets its counters
    each step:
        the micro-batches of the step that this rank computes; those of missing ranks are divided among the others
        on_step_begin      commit: logs, evaluation and checkpoint of the step before are complete. In a function that
                           runs again: put all back to what it was here
        optimizer.step()   nothing stops it, and it ends with a commit of the weights, by reference

The position in the data is a function of the number of the step: a step has the same samples,
however many ranks there are. If a function runs again from a commit in `optimizer.step()`, the step
is computed once more for its logs, its evaluation and its checkpoint, and not applied.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import functools
import inspect
import io
import logging
import random
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from raysgd.core.decisions.sampling_plan import RankShare
from raysgd.errors import ConfigError
from raysgd.replica.seeding import Places, seed_generators
from raysgd.torch.data.sampling import Units, agree, set_epoch
from raysgd.train.elastic_state import ByReference, Commit, copied, elastic
from raysgd.train.huggingface.foreign import SET_BY_TRANSFORMERS, WeightsInMemory, loop_of
from raysgd.train.huggingface.windows import Windows
from raysgd.train.in_place.generators import generator_states, set_generators
from raysgd.train.in_place.points import Points
from raysgd.train.replica import STOP_SIGNAL
from raysgd.train.session_functions import current

logger = logging.getLogger("raysgd")

STATE_FILE = "trainer_state.json"
COUNTED = ("labels", "shift_labels")  # in a batch: of those that are not IGNORED, transformers takes the mean
IGNORED = -100
# With these, a loss can divide by the micro-batches of a step, which change when a worker fails.
COUNTS = {"gradient_accumulation_steps", "current_gradient_accumulation_steps", "locals", "vars", "eval", "exec"}
LIBRARIES = {"transformers", "torch", "accelerate", "builtins"}
DATA = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, Iterator, Sampler),
    *(torch.Tensor, torch.Generator, numpy.ndarray, numpy.generic, numpy.random.Generator, random.Random),
)
OF_ATTRIBUTES: Any = object.__reduce__  # of objects that hold attributes only, unlike methods and partial functions
CHANGED = (
    "a callback or the model has changed weights or the optimizer's state outside of optimizer.step(), and a worker has failed in the "
    "first step with such a change, so the weights before it are lost. Start again from the newest checkpoint, or make the change in a "
    "hook of the optimizer (optimizer.register_step_post_hook)"
)
NOT_COPIED = (
    "raysgd cannot copy the attribute %s of %s, a %s, and it would begin again after a worker failure. Keep the place in it as a number, "
    "or derive the class from transformers' ExportableState, whose `state` says what to keep"
)
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
    accelerator: Any
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
        if self.continuation is None:
            return inner.get_train_dataloader()  # type: ignore[no-any-return]
        now, self.args.gradient_accumulation_steps = (
            self.args.gradient_accumulation_steps,
            self.continuation.first_steps,
        )
        try:
            loader: DataLoader[Any] = inner.get_train_dataloader()  # some samplers read how a step accumulates
        finally:
            self.args.gradient_accumulation_steps = now
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
        weight, self.current_gradient_accumulation_steps = self.continuation.begin_part()
        # Which steps overflow in fp16 must not depend on the ranks: the loss is divided as in the first attempt.
        late = self.continuation.rank_ratio if self.accelerator.scaler is not None else 1.0
        self.weight = weight * self.scale / late
        try:
            loss = inner.training_step(model, inputs, *args, **kwargs)
        finally:
            self.weight = 1.0
        if late == 1:
            return loss
        self.continuation.end_part(late)
        return loss * late

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = super()
        if self.continuation is not None:
            self.continuation.begin_evaluation()
        return inner.evaluate(*args, **kwargs)

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
        "average_tokens_across_devices=False, which weighs tokens by their rank": not args.average_tokens_across_devices,
        "past_index, which gives a rank what it has computed from its last batch": getattr(args, "past_index", -1) >= 0,
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
        self._by_reference = True
        self._parameters: list[Any] = []  # of the model, which finds them slowly
        self._versions = -1  # of the weights and the optimizer's state, when they were last known
        self._attributes: Attributes | None = None  # since on_train_begin
        self._places = None if trainer.seed_of_parts is None else Places(trainer.seed_of_parts)
        self._before: Any = None  # the content that does not change in `optimizer.step()`, as the step began
        self._stepped: Any = None  # what `optimizer.step()` ends, if it has been made in this step
        self._norm: Any = None  # of the step's gradients
        self._frozen: dict[str, Any] = {}  # the first values of each parameter that the optimizer does not change
        self._frozen_versions: dict[str, int] = {}
        self._ends_with_commit = False  # `optimizer.step()` of this step, once the step has begun
        self._trackers = [each for each in trainer.callback_handler.callbacks if is_tracker(each)]
        self._on_log = [each.on_log for each in self._trackers]
        self._points = Points(self._track)
        self._sampler: PartSampler | None = None
        self._parts: Iterator[RankShare] = iter(())
        first = {
            "ranks": self._session.planned_ranks,
            "steps": args.gradient_accumulation_steps,
            "batch": args.train_batch_size,
        }
        self._state = elastic({"trainer": self, **first})
        self.first_steps: int = self._state["steps"]
        self._per_step = self._state["ranks"] * self.first_steps

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
        for number, each in enumerate(self._trackers):
            each.on_log = functools.partial(self._note_log, number)
        trainer.weights_in_memory, trainer.before_best_model = self._pending is not None, self.copy_last
        try:
            with tempfile.TemporaryDirectory() as folder:
                if self._pending is not None:
                    state = {**self._pending["before"].content["state"], "stateful_callbacks": {}}
                    type(trainer.state)(**state).save_to_json(str(Path(folder, STATE_FILE)))
                yield given if self._pending is None else folder
        finally:
            commit: Commit | None = self._session.commit  # outside of a trainer, there is none
            kept = commit.kept.content["trainer"] if commit is not None and commit.kept.content else {}
            if self._before is not None and kept:
                kept["lost"] = isinstance(kept["moving"], ByReference) and kept["versions"] != self._count_versions()
            vars(trainer.accelerator).pop("clip_grad_norm_", None)
            args.gradient_accumulation_steps, args.eval_on_start = asked
            callbacks.remove(self)
            for each in self._trackers:
                del each.on_log
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
        live = {"data set": loader.dataset, "train_dataset": self._trainer.train_dataset}
        step = lambda: self._trainer.state.global_step  # noqa: E731
        self._sampler = PartSampler(windows, sampler, step, live, self._places, elsewhere=loader.num_workers > 0)
        if self._pending is not None:
            self._sampler.continue_with(self._pending["order"].content, self._pending["reading"].content)
        return self._sampler

    def begin_step(self) -> list[RankShare]:
        """Choose the parts that this rank computes in the step that begins."""
        windows, args = self._windows, self._trainer.args
        if args.gradient_accumulation_steps != windows.most:
            raise ConfigError(
                f"gradient_accumulation_steps was changed to {args.gradient_accumulation_steps} while an elastic Trainer trains, and the "
                "place in the data follows from it: leave it as it is, or pass prepare_trainer(trainer, elastic=False)"
            )
        parts = windows.of_rank(self._trainer.state.global_step % windows.steps)
        self._parts = iter(parts)
        return parts

    def begin_part(self) -> tuple[float, float]:
        """Find the weight of the step's next part, and the number by which its mean loss is
        divided: how many parts there are for each rank."""
        windows, part = self._windows, next(self._parts)
        epoch, step = divmod(self._trainer.state.global_step, windows.steps)
        if self._places is not None:
            self._places.enter(epoch=epoch + 1, offset=part.start)
        return part.weight, windows.count(step) / windows.ranks

    def end_part(self, ratio: float) -> None:
        """Multiply the gradients of a step, after its last part."""
        if not length_hint(self._parts):
            for each in self._stepped_parameters():
                if each.grad is not None:
                    each.grad.mul_(ratio)

    def begin_evaluation(self) -> None:
        """Called before an evaluation, which can come before the first epoch."""
        self._note_attributes()
        if self._places is not None:
            self._places._replace(call="validate").enter(epoch=self._trainer.state.global_step)

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
        moving = {"weights": self._weights(), "optimizer": trainer.optimizer.state_dict()["state"]}
        self._versions = self._count_versions()
        return {
            "versions": self._versions,
            "before": self._before,
            "moving": ByReference(moving) if self._by_reference else moving,
            "buffers": dict(trainer.model.named_buffers()),
            "order": ByReference(self._sampler.drawn),
            "frozen": ByReference(self._frozen),
            "reading": ByReference(self._sampler.before_step),
            "points": ByReference(self._points.committed),
            "stepped": self._stepped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("lost"):
            raise ConfigError(CHANGED)
        self._pending = state or None

    def _count_versions(self) -> int:
        """Count the changes of all weights and of the optimizer's state."""
        trainer = self._trainer
        states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
        tensors = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
        return sum(each._version + 1 for each in [*self._parameters, *tensors])

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
        # The first values are views, so these are also the versions of the parameters.
        self._frozen_versions = {name: each._version for name, each in self._frozen.items()}
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
        assert self._attributes is not None
        return {
            "groups": [{**each, "params": None} for each in trainer.optimizer.param_groups],
            "trained": ByReference([each.requires_grad for each in self._parameters]),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "state": {**fields, "log_history": []},
            "history": ByReference(tuple(state.log_history)),
            "control": dict(vars(trainer.control)),
            "loop": loop_of(self._trainer),
            "attributes": ByReference(self._attributes.changed()),
            "random": ByReference(generator_states()),
        }

    def _restore(self, kept: dict[str, Any]) -> None:
        """Put back what a commit has, except attributes."""
        trainer, before = self._trainer, copied(kept["before"].content)
        self._load_if_changed(kept)
        for group, saved in zip(trainer.optimizer.param_groups, before["groups"], strict=True):
            group.update({**saved, "params": group["params"]})
        for parameter, is_trained in zip(self._parameters, before["trained"].content, strict=True):
            parameter.requires_grad_(is_trained)
        trainer.lr_scheduler.load_state_dict(before["scheduler"])
        if before["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(before["scaler"])
        here = {name: getattr(trainer.state, name) for name in ("is_local_process_zero", "is_world_process_zero")}
        vars(trainer.state).update({**before["state"], **here, "log_history": list(before["history"].content)})
        vars(trainer.control).update(before["control"])
        vars(trainer).update(before["loop"])

    def _put_back(self, kept: dict[str, Any]) -> None:
        """Put all back to what it was as the step began, whatever was called since then."""
        assert self._attributes is not None
        self._restore(kept)
        self._attributes.put_back(kept["before"].content["attributes"].content)
        if kept["stepped"] is not None:
            self._norm = kept["stepped"].content["norm"]
            skip_once(self._trainer.optimizer, lambda: self._end_again(kept))
        set_generators(kept["before"].content["random"].content)
        self._points.resume(kept["points"].content)
        self._before, self._stepped, self._pending = kept["before"], kept["stepped"], None
        self._state.keep_again()

    def _end_again(self, kept: dict[str, Any]) -> None:
        """Take what the step had computed before, in place of what it has computed with its new
        weights; except attributes of another rank, or of other ranks' parts: a rank's own parts can
        be in them."""
        assert self._attributes is not None
        stepped = kept["stepped"].content
        self._load_if_changed(kept)
        vars(self._trainer).update(copied(stepped["loop"]))
        if stepped["place"] == (self._windows.rank, self._windows.ranks):
            self._attributes.put_back(stepped["attributes"])

    def _clip(self, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients. A step that is repeated has the norm that it had before."""
        if self._stepped is None:
            self._norm = type(self._trainer.accelerator).clip_grad_norm_(self._trainer.accelerator, *args, **kwargs)
        return self._norm

    def _load_if_changed(self, kept: dict[str, Any]) -> None:
        """Load buffers, and weights and the optimizer's state unless they are as in the commit."""
        self._load_tensors(kept["buffers"])
        if self._versions != self._count_versions():
            moving = kept["moving"].content if isinstance(kept["moving"], ByReference) else kept["moving"]
            self._load_tensors(moving["weights"])
            groups = self._trainer.optimizer.state_dict()["param_groups"]
            self._trainer.optimizer.load_state_dict({"state": moving["optimizer"], "param_groups": groups})
            self._versions = self._count_versions()

    def _load_tensors(self, found: dict[str, Any]) -> None:
        model = self._trainer.model
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in found.items():
                own[name].copy_(value)

    # -- called by the Trainer ------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the Trainer has its optimizer."""
        self._parameters = [*self._trainer.model.parameters()]
        self._check_parameters()
        if self._pending is not None:
            self._restore(self._pending)
        optimizer = self._trainer.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's wrapper
        moves = self._pending is None or isinstance(self._pending["moving"], ByReference)
        self._by_reference = moves and self._trainer.accelerator.scaler is None and not hasattr(inner, "eval")
        self._trainer.accelerator.clip_grad_norm_ = self._clip
        inner.register_step_pre_hook(lambda *_: self._begin_step_of_optimizer())
        inner.register_step_post_hook(lambda *_: self._end_step_of_optimizer())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_attributes()

    def _note_attributes(self) -> None:
        """Note the attributes as the function has made them, after all of `on_train_begin`."""
        if self._attributes is None:
            self._attributes = attributes_of(self._trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before the first part of a step, whose batches were read."""
        if self._pending is not None:
            self._put_back(self._pending)
        else:
            self._look_for_changes()
            self._before, self._stepped = ByReference(copied(self._other_state())), None
            self._points.commit(self._state.commit)
        self._ends_with_commit = self._by_reference

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called first after a step: its place in the epoch does not depend on the ranks."""
        state.epoch = self._windows.epoch_after(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_epoch_stop and not control.should_training_stop:
            raise ConfigError(
                "a callback has ended an epoch early (control.should_epoch_stop), and the place in the data follows from the number of "
                "the step: end the training instead, or pass prepare_trainer(trainer, elastic=False)"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.copy_last()
        self._points.end()

    def _note_log(
        self, number: int, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Called in place of a tracker's `on_log`."""
        place = {name: getattr(state, name) for name in ("global_step", "epoch")}
        self._points.add(number, place, dict(logs))

    def _track(self, number: int, place: Mapping[str, Any], logs: dict[str, Any]) -> None:
        """Let a tracker log what was logged at this place."""
        trainer = self._trainer
        state, alone = copy.copy(trainer.state), copy.copy(trainer.callback_handler)
        vars(state).update(place)
        alone.callbacks = [SimpleNamespace(on_log=self._on_log[number])]
        alone.call_event("on_log", trainer.args, state, trainer.control, logs=logs)

    def copy_last(self) -> None:
        """Copy the commit of the last step, because the Trainer then loads its best model, or the
        function may change the weights."""
        if self._by_reference and self._before is not None:
            self._by_reference = False
            self._state.keep_again()

    def _look_for_changes(self) -> None:
        """Copy from here on if more than the optimizer's step has changed weights since the last
        commit. Raise an error if they are not the optimizer's, which no commit has."""
        if self._before is not None and self._versions != self._count_versions():
            self._by_reference = False
        other = [name for name, each in self._frozen.items() if each._version != self._frozen_versions[name]]
        if other:
            raise ConfigError(
                f"{other[0]}, which the optimizer does not change, was changed by a callback or the model, and a commit has only what the "
                "optimizer changes. Register it as a buffer, or pass prepare_trainer(trainer, elastic=False)"
            )

    def _begin_step_of_optimizer(self) -> None:
        if self._ends_with_commit:
            self._session.ensure_whole()
            signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
            self._look_for_changes()

    def _end_step_of_optimizer(self) -> None:
        if not self._ends_with_commit:
            return
        assert self._attributes is not None
        stepped = {"attributes": self._attributes.changed(), "loop": loop_of(self._trainer), "norm": self._norm}
        self._stepped = ByReference({**stepped, "place": (self._windows.rank, self._windows.ranks)})
        try:
            self._state.commit_step()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})


class PartSampler(Sampler[list[int]]):
    """The batches of one rank: its parts of each step of an epoch. Owns the epoch's order, which is
    rank 0's, and what its sampler had then in its attributes, such as a generator."""

    def __init__(
        self,
        windows: Windows,
        sampler: Any,
        step: Any,
        live: Any = None,
        places: Places | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.windows, self._sampler, self._step, self._live = windows, sampler, step, live or {}
        self._places, self._elsewhere = places, elsewhere  # whether other processes read
        self._attributes = Attributes({"sampler": sampler}, self._live)
        # An epoch, its order, and what drawing it has changed in the sampler.
        self.drawn: tuple[int, Any, Any] | None = None
        self.before_step: Any = None  # the random states before the samples of the step were read
        self._again: Any = None

    def __len__(self) -> int:
        return len(self.windows)

    def continue_with(self, drawn: tuple[int, Any, Any], before_step: Any) -> None:
        self.drawn, self._again = drawn, before_step
        self._attributes.put_back(drawn[2])

    def __iter__(self) -> Iterator[list[int]]:
        epoch, done = divmod(self._step(), self.windows.steps)
        set_epoch(self._live.get("data set"), epoch)
        return self._parts_of(epoch, done)

    def _parts_of(self, epoch: int, done: int) -> Iterator[Any]:
        """Yield nothing in the batches of steps that are done: transformers drops them unread. The
        order is drawn with the first batch, as a loader's iterator has drawn a number before
        that."""
        if self.drawn is None or self.drawn[0] != epoch:
            self.drawn = epoch, self._draw(epoch), self._attributes.changed()
        order = self.drawn[1]
        for step in range(self.windows.steps):
            if step >= done:
                self._begin_step()
            for part in self.windows.of_rank(step):
                yield [] if step < done else self._to_read(epoch, part.start, order[part.start : part.stop].tolist())

    def _begin_step(self) -> None:
        if self._again is not None:
            set_generators(self._again)
        self._again, self.before_step = None, generator_states()

    def _draw(self, epoch: int) -> Any:
        """Draw an order. With a seed, the process's generators are seeded for it, and then as they
        were."""
        set_epoch(self._sampler, epoch)
        states = generator_states()
        if self._places is not None:
            self._places.enter(epoch=epoch + 1)
        order: Any = torch.tensor(list(self._sampler))
        if self._places is not None:
            set_generators(states)
        if self.windows.ranks > 1:
            order, _ = agree(order, None, first=self.windows.rank == 0)
        return order

    def _to_read(self, epoch: int, start: int, rows: list[int]) -> Any:
        """Seed the generators of the process that reads these rows next."""
        if self._places is None:
            return rows
        number = self._places.number(epoch=epoch + 1, offset=start, reading=True)
        if self._elsewhere:
            return Units(number, rows)
        seed_generators(number)
        return rows


@dataclasses.dataclass(frozen=True)
class Reference:
    """Stands in a commit for an object that the function creates."""

    name: str

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.get("live", {}).get(self.name, self)


class Attributes:
    """Finds what has changed in the attributes of some objects, the owners, which the function
    creates again in each attempt, and puts it back.

    Copied are data, and objects from the owner's package. Of modules, and of other objects with
    `state_dict`, the state is kept. References to those that are `live` stay references. What
    cannot be copied from the beginning, as a file or a progress bar, stays as it is, also in a
    container; an iterator is refused.
    """

    def __init__(self, owners: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        self._owners, self._live = owners, {**live, **owners}
        self._references = {id(each): Reference(name) for name, each in self._live.items()}
        self._first: dict[str, dict[str, Any]] = {name: {} for name in owners}
        self._marks: dict[str, dict[str, Any]] = {name: {} for name in owners}
        self._bound = {name: dict(vars(owner)) for name, owner in owners.items()}
        self._first = self.changed()
        self._marks = {
            name: {attribute: marks_of(self._bound[name].get(attribute)) for attribute in first}
            for name, first in self._first.items()
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        memo = dict[Any, Any](self._references)
        return {name: dict(self._changes(name, memo)) for name in self._owners}

    def _changes(self, name: str, memo: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        owner, first, bound = self._owners[name], self._first[name], self._bound[name]
        exports = isinstance(owner, ExportableState)
        for attribute, value in {**vars(owner), **(owner.state()["attributes"] if exports else {})}.items():
            if name == "trainer" and attribute in SET_BY_TRANSFORMERS:
                continue
            before, same = first.get(attribute, first), value is bound.get(attribute, bound)
            has_state = isinstance(value, torch.nn.Module)
            data = not has_state and is_data(value, owner)
            has_state |= hasattr(value, "load_state_dict") and not data
            if value is before or (same and (id(value) in self._references or not (data or has_state))):
                continue
            marks = self._marks[name].get(attribute)
            if is_equal(value, before) if marks is None else marks_of(value) == marks:
                continue
            try:
                found = Saved(copied(value.state_dict())) if same and has_state else copy.deepcopy(value, memo)
            except Exception as error:
                if data and not exports and (attribute in first or isinstance(value, Iterator)):
                    raise ConfigError(NOT_COPIED % (attribute, type(owner).__name__, type(value).__name__)) from error
                continue
            if not is_equal(found, before):
                yield attribute, found

    def put_back(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        memo: dict[Any, Any] = {"live": self._live}
        for name, owner in self._owners.items():
            kept = changed.get(name, {})
            for attribute, value in {**self._first[name], **kept}.items():
                now = vars(owner).get(attribute)
                if attribute in kept or is_data(now, owner):
                    found = copy.deepcopy(value, memo)
                    # There is one of each live object, and of what has no copy, such as a member of an Enum.
                    is_one = found is value or isinstance(value, Reference)
                    vars(owner)[attribute] = found if is_one else renewed(now, found)


@dataclasses.dataclass
class Saved:
    """The state of an object that the function creates, and that loads it."""

    state: Any


def renewed(now: Any, kept: Any) -> Any:
    """What an attribute that is `now` this becomes: the same object with other content, if it can,
    because the function may have it, too."""
    if isinstance(kept, Saved):
        now.load_state_dict(kept.state)
    elif now is kept or type(now) is not type(kept):
        return kept
    elif isinstance(now, (list, deque)):
        now.clear()
        now.extend(kept)
    elif isinstance(now, (dict, set)):
        now.clear()
        now.update(kept)
    elif hasattr(now, "__dict__") and not isinstance(now, DATA) and type(now).__reduce__ is OF_ATTRIBUTES:
        vars(now).clear()
        vars(now).update(vars(kept))
    else:
        return kept
    return now


def is_data(value: Any, owner: Any) -> bool:
    """Whether a value is data, or of a class from the same package as its owner's, which is no
    library that raysgd knows."""
    first = next(kind for kind in type(owner).__mro__ if not kind.__module__.startswith("raysgd."))
    package = first.__module__.partition(".")[0]
    own = package not in LIBRARIES and package == type(value).__module__.partition(".")[0]
    return own or (isinstance(value, DATA) and not isinstance(value, io.IOBase))


def marks_of(value: Any) -> list[Any] | None:
    """What changes whenever this module, tensor, or list or dictionary of tensors changes.
    `tensor.data` can change without a new version, so the sum of the bits is in it, too."""
    if isinstance(value, torch.nn.Module):
        tensors: dict[Any, Any] = value.state_dict(keep_vars=True)
    elif isinstance(value, dict):
        tensors = value
    else:
        tensors = dict(enumerate(value if isinstance(value, (list, tuple)) else [value]))
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors.values()):
        return None
    return [type(value), *((name, *mark_of(each)) for name, each in tensors.items())]


def mark_of(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        return (float("nan"),)  # not equal to itself: it is copied
    bits = tensor.detach().contiguous().flatten()
    aligned = (bits.nbytes | bits.storage_offset() * bits.itemsize) % 8 == 0
    total = bits.view(torch.int64 if aligned else torch.uint8).sum(dtype=torch.int64).item()
    return tensor._version, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, total


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are known to be equal. For tensors and arrays, they are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def attributes_of(trainer: Any) -> Attributes:
    """The attributes of the callbacks, the arguments, and the Trainer's class, without those that
    transformers sets."""
    owners, handler = {"trainer": trainer, "args": trainer.args}, trainer.callback_handler
    for each in handler.callbacks:
        if not isinstance(each, Continuation):
            kinds = [name for name in owners if name.startswith(f"{type(each).__qualname__} ")]
            owners[f"{type(each).__qualname__} {len(kinds)}"] = each
    names = {*inspect.signature(Trainer.__init__).parameters, "model_wrapped", "continuation", "accelerator"}
    live = {**vars(handler), **{name: getattr(trainer, name, None) for name in names}}
    live |= {
        f"model.{name}": each
        for kind in ("modules", "parameters")
        for name, each in getattr(trainer.model, f"named_{kind}")()
    }
    return Attributes(owners, {name: each for name, each in live.items() if each is not None})


def is_tracker(callback: Any) -> bool:
    """Whether it sends what is logged to a service or a file of its own."""
    return any(each.__module__.startswith("transformers.integrations") for each in type(callback).__mro__)


def skip_once(optimizer: Any, instead: Callable[[], None]) -> None:
    """Let the next call of `optimizer.step` do this instead."""
    own = optimizer.step

    def step(*args: Any, **kwargs: Any) -> None:
        optimizer.step = own
        instead()

    optimizer.step = step
