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
import dataclasses
import signal
import tempfile
from collections.abc import Callable, Iterator
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import TrainerCallback

from raysgd.core.decisions.sampling_plan import RankShare
from raysgd.errors import ConfigError
from raysgd.replica.seeding import Places
from raysgd.train.elastic_state import ByReference, Commit, copied, elastic
from raysgd.train.huggingface.attributes import Attributes, attributes_of
from raysgd.train.huggingface.foreign import loop_of
from raysgd.train.huggingface.sampler import PartSampler
from raysgd.train.huggingface.trackers import Trackers
from raysgd.train.huggingface.windows import Windows
from raysgd.train.in_place.generators import generator_states, set_generators
from raysgd.train.replica import STOP_SIGNAL
from raysgd.train.sessions import current

CHANGED = (
    "a callback or the model has changed weights or the optimizer's state outside of optimizer.step(), and a worker has failed in the "
    "first step with such a change, so the weights before it are lost. Start again from the newest checkpoint, or make the change in a "
    "hook of the optimizer (optimizer.register_step_post_hook)"
)
STATE_FILE = "trainer_state.json"


def refused(problem: str, instead: str) -> ConfigError:
    return ConfigError(f"{problem}: {instead}, or pass prepare_trainer(trainer, elastic=False)")


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
        self._trackers = Trackers(trainer)
        self._points = self._trackers.points
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
    def running(self, source: Any) -> Iterator[Any]:
        """A context for a Trainer's `train`, with the folder that it resumes from: if there is no
        commit, the `source` one."""
        trainer, info = self._trainer, self._session.rank_info
        callbacks, args = trainer.callback_handler.callbacks, trainer.args
        asked = args.gradient_accumulation_steps, args.eval_on_start
        args.gradient_accumulation_steps = -(-self._per_step // info.world_size)
        args.eval_on_start = args.eval_on_start and self._pending is None
        callbacks.insert(0, self)  # before those that look at weights in on_train_begin
        self._trackers.hold_back()
        trainer.weights_in_memory, trainer.before_best_model = self._pending is not None, self.copy_last
        try:
            with tempfile.TemporaryDirectory() as folder:
                if self._pending is not None:
                    state = {**self._pending["before"].content["state"], "stateful_callbacks": {}}
                    type(trainer.state)(**state).save_to_json(str(Path(folder, STATE_FILE)))
                yield source if self._pending is None else folder
        finally:
            commit: Commit | None = self._session.commit  # outside of a trainer, there is none
            part = commit.kept.content["trainer"] if commit is not None and commit.kept.content else {}
            if self._before is not None and part:
                part["lost"] = isinstance(part["moving"], ByReference) and part["versions"] != self._count_versions()
            vars(trainer.accelerator).pop("clip_grad_norm_", None)
            args.gradient_accumulation_steps, args.eval_on_start = asked
            callbacks.remove(self)
            self._trackers.let_through()
            del trainer.before_best_model
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})

    # -- the parts of a step --------------------------------------------------------------------------

    def divided(self, loader: Any) -> PartSampler:
        """The batches of this rank, of a loader that accelerate has prepared."""
        batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        if type(batches) is not BatchSampler or isinstance(batches.sampler, DistributedSampler):
            problem = f"an elastic Trainer cannot divide the batches of a {type(batches).__name__} among other ranks"
            raise refused(problem, "pass train_dataset without a batch sampler")
        sampler: Any = batches.sampler
        info, state, args = self._session.rank_info, self._state, self._trainer.args
        if batches.batch_size != args.train_batch_size:
            raise refused(
                f"an elastic Trainer has per_device_train_batch_size={args.train_batch_size}, and its train loader has batches of "
                f"{batches.batch_size}",
                "let both be equal",
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
            problem = f"gradient_accumulation_steps was changed to {args.gradient_accumulation_steps} while an elastic Trainer trains"
            raise refused(f"{problem}, and the place in the data follows from it", "leave it as it is")
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
            problem = f"the optimizer has {len(unknown)} parameters that are not in the model"
            instead = "make the module that has them a part of the model"
            raise refused(f"{problem}, and an elastic Trainer keeps those of the model", instead)
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

    def _restore(self, content: dict[str, Any]) -> None:
        """Put back what a commit has, except attributes."""
        trainer, before = self._trainer, copied(content["before"].content)
        self._load_if_changed(content)
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

    def _put_back(self, content: dict[str, Any]) -> None:
        """Put all back to what it was as the step began, whatever was called since then."""
        assert self._attributes is not None
        self._restore(content)
        self._attributes.put_back(content["before"].content["attributes"].content)
        if content["stepped"] is not None:
            self._norm = content["stepped"].content["norm"]
            skip_once(self._trainer.optimizer, lambda: self._end_again(content))
        set_generators(content["before"].content["random"].content)
        self._points.resume(content["points"].content)
        self._before, self._stepped, self._pending = content["before"], content["stepped"], None
        self._state.keep_again()

    def _end_again(self, content: dict[str, Any]) -> None:
        """Take what the step had computed before, in place of what it has computed with its new
        weights; except attributes of another rank, or of other ranks' parts: a rank's own parts can
        be in them."""
        assert self._attributes is not None
        stepped = content["stepped"].content
        self._load_if_changed(content)
        vars(self._trainer).update(copied(stepped["loop"]))
        if stepped["place"] == (self._windows.rank, self._windows.ranks):
            self._attributes.put_back(stepped["attributes"])

    def _clip(self, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients. A step that is repeated has the norm that it had before."""
        if self._stepped is None:
            self._norm = type(self._trainer.accelerator).clip_grad_norm_(self._trainer.accelerator, *args, **kwargs)
        return self._norm

    def _load_if_changed(self, content: dict[str, Any]) -> None:
        """Load buffers, and weights and the optimizer's state unless they are as in the commit."""
        self._load_tensors(content["buffers"])
        if self._versions != self._count_versions():
            moving = content["moving"].content if isinstance(content["moving"], ByReference) else content["moving"]
            self._load_tensors(moving["weights"])
            groups = self._trainer.optimizer.state_dict()["param_groups"]
            self._trainer.optimizer.load_state_dict({"state": moving["optimizer"], "param_groups": groups})
            self._versions = self._count_versions()

    def _load_tensors(self, tensors: dict[str, Any]) -> None:
        model = self._trainer.model
        targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in tensors.items():
                targets[name].copy_(value)

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
            self._attributes = attributes_of(self._trainer, without=self)

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
            problem = "a callback has ended an epoch early (control.should_epoch_stop)"
            raise refused(
                f"{problem}, and the place in the data follows from the number of the step", "end the training"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.copy_last()
        self._points.end()

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
            problem = f"{other[0]}, which the optimizer does not change, was changed by a callback or the model"
            raise refused(f"{problem}, and a commit has only what the optimizer changes", "register it as a buffer")

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


def skip_once(optimizer: Any, instead: Callable[[], None]) -> None:
    """Let the next call of `optimizer.step` do this instead."""
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> None:
        optimizer.step = original
        instead()

    optimizer.step = step
