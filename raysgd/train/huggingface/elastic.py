"""A Trainer class that continues after worker failures: its parts of a step, and their weights.
Worker."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from raysgd.errors import ConfigError
from raysgd.train.huggingface.continuation import Continuation
from raysgd.train.huggingface.foreign import WeightsInMemory

LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)

COUNTED = ("labels", "shift_labels")  # in a batch: of those that are not IGNORED, transformers takes the mean
IGNORED = -100
# With these, a loss can divide by the micro-batches of a step, which change when a worker fails.
COUNTS = {"gradient_accumulation_steps", "current_gradient_accumulation_steps", "locals", "vars", "eval", "exec"}


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
        result = inner.compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if weight == 1:
            return result
        return (result[0] * weight, *result[1:]) if return_outputs else result * weight

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
    names = {"num_items_in_batch", *(each.name for each in parameters if each.kind is each.VAR_KEYWORD)}
    code = compute_loss.__code__
    if names & {*code.co_cellvars} or COUNTS & names_in(code):
        return False
    steps = [each for each in dis.get_instructions(code) if "FAST" in each.opname]
    return not any(names & ({each.argval} if isinstance(each.argval, str) else {*each.argval}) for each in steps)


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
    function = own_loss(trainer)
    unknown = trainer.model_accepts_loss_kwargs and loss_is_scaled(trainer) is None and not ignores_items(function)
    if unknown and not function.__module__.startswith("transformers."):
        raise ConfigError(
            f"{getattr(function, '__qualname__', function)} can read num_items_in_batch, or how many micro-batches a step has, and an "
            "elastic Trainer cannot know whether it divides its loss by that. After a worker failure, its gradients could be wrong. Write "
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
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"an elastic Trainer cannot continue in the middle of an epoch with {name}: leave it out, or pass "
                "prepare_trainer(trainer, elastic=False), which starts again from the newest checkpoint after a worker failure"
            )
