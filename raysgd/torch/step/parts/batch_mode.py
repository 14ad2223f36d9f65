"""`ElasticConfig(batch="auto")`: count what user code does in its first step, and hold the decision
that follows from it. Worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from raysgd.constants import PARTS, PER_WORKER
from raysgd.core.decisions.sampling_plan import Division
from raysgd.core.outcomes import RetryStep
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import content_version, is_compiled, run_after_backward, steps_of
from raysgd.torch.group.sharing import gathered_objects
from raysgd.torch.registered import Registered
from raysgd.torch.settings import TorchSettings
from raysgd.torch.step.parts import contract

logger = logging.getLogger("raysgd")

STATIC_GRAPH = contract.Violation(
    "DDP's static_graph exchanges gradients in each backward pass", "leave static_graph out"
)
MAKES_STEPS = contract.Violation("a LightningModule makes its steps itself", "use an operator")
RANKS = (
    "%s reads %s before a backward pass. What is computed from it changes with the workers, so results can differ from those of an "
    "undisturbed run. Compute it from batch_info['part'], and read self.is_first if only one worker should do something. Do not divide "
    "the loss by self.world_size: raysgd averages gradients over the workers itself"
)
RESIZES = contract.Violation("resized() of the operator adapts to the number of workers", "leave resized() out")


class KeepBatch(Policy):
    """Owns whether a batch is divided into parts, which is part of the position. It checks the
    first step of a run, and later ones in which a worker computes several parts. Code that does not
    follow the contract in the first step is "per_worker"; later, that is an error.

    `position` is what is committed, `why` what the operator's class has against parts, `ranks_read`
    has the names of the operator's numbers of workers that user code has read, and `method` is the
    method with that code, as texts name it.
    """

    in_usual_steps = False

    def __init__(
        self,
        registered: Registered,
        settings: TorchSettings,
        position: Position,
        why: contract.Violation | None,
        *,
        ranks_read: set[str],
        method: str,
    ) -> None:
        self._ranks_read, self._ranks_said, self._method = ranks_read, set[str](), method
        self._registered, self._batches, self._elastic = registered, settings.num_workers, settings.elastic
        self._all_parts, self._parts = settings.all_parts, settings.parts
        self.deal: tuple[int, ...] = ()  # how many parts each rank computes: `Dealer` writes it
        self.why = why or _why_not(settings)
        self._against_data: contract.Violation | None = None
        self.position = position
        self._feed: Feed | None = None
        self._decides = self._watches = self._several = self._was_trained = False
        self._breach: contract.Violation | None = None  # in the first step
        self._said = False
        self._calls = contract.Calls()
        self._own_calls: OwnCalls | None = None
        self._of_first = self._calls  # in the batch's first part
        # Of parameters, with what they were at the end of a backward pass after which they must not change.
        self._gradients: dict[int, tuple[Any, int]] = {}
        self._schedules: list[Any] = []
        self._info = contract.NotingInfo()  # of the newest batch

    @classmethod
    def of(cls, run: Any) -> KeepBatch:
        method = (run.changed("train_batch", "train_epoch") or ["train_batch"])[0]
        why = MAKES_STEPS if run.makes_own_steps else RESIZES if run.changed("resized") else None
        named = {"ranks_read": run.ranks_read, "method": method}
        return cls(run.registered, run.settings, run.position, why, **named)

    @classmethod
    def for_run(cls, run: Any) -> KeepBatch | None:
        return run.keep_batch if run.settings.in_parts else None

    @property
    def _reason(self) -> contract.Violation | None:
        """What is known against parts."""
        problem, advice = self.position.contract or ("", "")
        return self.why or self._against_data or (contract.Violation(problem, advice) if problem else None)

    @property
    def mode(self) -> str:
        """What becomes of the batch, "" before the first step."""
        if self._elastic.batch == PER_WORKER or self._reason is not None:
            return PER_WORKER
        return PARTS if self.position.contract is not None or self._all_parts == 1 else ""

    def division(self, ranks: int) -> Division:
        """Return how this many ranks divide a batch."""
        if self.mode == PER_WORKER:
            return Division(ranks, ranks)
        return Division(self._batches, self._all_parts, self.deal)

    # -- the first step, and steps of several parts on each worker --------------------------------------

    def begin_loop(self, feed: Feed) -> None:
        self._feed = feed
        if self.position.parked is not None:  # by a call on a data set of its own
            self._refuse(contract.NOT_DIVIDED)
            return
        self._against_data, kind = None, type(feed.source.loader)
        if not isinstance(feed.source, PlannedSource):
            self._against_data = contract.NOT_DIVIDED
        elif kind.__iter__ is not DataLoader.__iter__:
            self._against_data = contract.OWN_ITERATION
        self._decides = self.position.contract is None
        self._breach = self._reason
        self._refuse(self._breach)
        if self._decides:
            feed.make_info = self._make_info

    def _make_info(self, **values: Any) -> dict[str, Any]:
        self._info = contract.NotingInfo(values)
        return self._info

    def reset(self) -> None:
        self._end_counting()
        self._feed, self._decides, self._several = None, False, False

    after_loop = reset

    def begin_part(self, step: Step) -> None:
        self._end_counting()
        self._several = self._reason is None and not (step.current.last_part and step.parts_before == 0)
        if self._several and step.parts_before > 0 and not self._was_trained:
            self._note(contract.OWN_LOOP)
        self._was_trained, self._calls = False, contract.Calls()
        if step.parts_before == 0:
            self._of_first, self._gradients = self._calls, {}
        self._watches = self._several or (self._decides and self._breach is None)
        self._check_gradients(contract.CHANGED)
        self._ranks_read.clear()
        if self._watches:
            self._schedules = [steps_of(each) for each in self._registered.schedulers]
            count = self._registered.control.collectives
            self._own_calls = OwnCalls(count, self._registered.wrapped, sharded=self._registered.shards is not None)

    def on_zero_grad(self, step: Step) -> None:
        self._note(self._calls.cleared())

    def on_backward(self, step: Step, loss: Any) -> Any:
        self._end_counting()
        if self._decides and self._breach is None and self._leads and (read := self._ranks_read - self._ranks_said):
            logger.warning(RANKS, self._method, " and ".join(f"self.{each}" for each in sorted(read)))
            self._ranks_said |= read  # each part of the first step reads them
        self._note(self._calls.passed())
        if self._several:
            self._check_gradients(contract.CHANGED, added=True)
            self._gradients = {}
            if not step.current.last_part and loss.requires_grad:
                loss.register_hook(lambda _: run_after_backward(self._keep_gradients))
        elif self._watches and step.closing and loss.requires_grad:
            # After what the pass itself runs at its end, such as DDP's exchange.
            loss.register_hook(lambda _: run_after_backward(lambda: run_after_backward(self._keep_gradients)))
        return loss

    def on_partial_step(self, step: Step, optimizer: Any) -> None:
        self._check_gradients(contract.CHANGED)
        self._note(self._calls.stepped(id(optimizer)))

    def on_whole_step(self, step: Step, optimizer: Any) -> None:
        self._note(self._calls.stepped(id(optimizer)))
        if self._gradients and not (self._several or self._info.asked):
            self._check_gradients(contract.CHANGED_AFTER, optimizer)

    def on_direct_step(self, step: Step, optimizer: Any) -> None:
        self._note(contract.DIRECT)

    def after_batch(self, step: Step) -> None:
        self._was_trained = True
        # Before the calls are counted: without self.backward, they are those that exchange gradients.
        self._note(self._calls.ended() if self._decides else None)
        self._end_counting()
        if self._watches and self._schedules != [steps_of(each) for each in self._registered.schedulers]:
            self._note(None if step.closing and not self._decides else contract.SCHEDULED)
        self._note(self._calls.unlike(self._of_first))

    def _keep_gradients(self) -> None:
        pairs = ((each, each.grad) for each in self._registered.stepped_by(*self._registered.optimizers))
        self._gradients = {id(each): (grad, content_version(grad)) for each, grad in pairs if grad is not None}

    def _check_gradients(self, breach: contract.Violation, *optimizers: Any, added: bool = False) -> None:
        """Note if user code has changed gradients, by default of all optimizers, since the backward
        pass, or, in the next one, has done more than have them `added` to by a pass of its own."""
        if not self._gradients:
            return
        parameters = self._registered.stepped_by(*(optimizers or self._registered.optimizers))
        gradients = [(each.grad, *self._gradients[id(each)]) for each in parameters if id(each) in self._gradients]
        lost = any(now is not before for now, before, _ in gradients)
        changed = [each for _, each, version in gradients if content_version(each) != version]
        if lost or (changed and not (added and any(each.is_sparse or bool(each.any()) for each in changed))):
            self._note(breach)

    def _end_counting(self) -> None:
        """Count no further collective calls: the backward pass begins, which exchanges gradients,
        or there was none."""
        counted, self._own_calls = self._own_calls, None
        if counted is not None and counted.ended() > 0:
            self._note(contract.TOGETHER)

    def _note(self, breach: contract.Violation | None) -> None:
        if breach is None or not self._watches:
            return
        breach = breach._replace(problem=breach.problem.replace("train_batch", self._method))
        if not self._several:
            self._breach = self._breach or breach
        elif not self._decides:
            raise ConfigError(contract.later(breach, self._all_parts))
        else:
            self._refuse(breach)
            if self._registered.shards is not None:  # new processes, which know no more, would train the batch again
                raise ConfigError(contract.notice(breach, self._all_parts))
            self.position.contract = tuple(breach)
            self._say(breach)
            raise RetryStep(breach.problem)

    def end_step(self, step: Step) -> None:
        if not self._decides or step.outcome == "undone" or (step.failed and not self._was_trained):
            return
        breach = self._breach if self._was_trained or self._reason else contract.OWN_LOOP
        self._refuse(breach)
        self._decides, feed = False, self._feed
        if feed is not None:
            feed.make_info = dict
        self.position.contract = tuple(breach or ("", ""))
        self._say(breach)

    def _refuse(self, breach: contract.Violation | None) -> None:
        """Raise ConfigError for what does not follow the contract, if the trainer got `parts`."""
        if breach is not None and self._parts is not None:
            raise ConfigError(contract.refused(breach, self._parts))

    @property
    def _leads(self) -> bool:
        return self._feed is not None and self._feed.rank_info.world_rank == 0

    def _say(self, breach: contract.Violation | None) -> None:
        """Log what does not follow the contract."""
        if self._leads:
            self._log(breach)

    def _log(self, breach: contract.Violation | None) -> None:
        if breach is not None and not self._said:
            self._said = True
            logger.warning("%s", contract.notice(breach, self._all_parts))

    # -- all ranks together ---------------------------------------------------------------------------

    def joined(self, rank_info: RankInfo) -> None:
        """Agree with the other ranks of a new generation."""
        if self._elastic.batch == "auto" and self.why is None and not rank_info.solo:
            knew = self.position.contract is not None
            every = gathered_objects(self.position.contract, self._registered.control)
            self.position.contract = max((each for each in every if each is not None), default=None)
            if not knew and rank_info.world_rank == 0:  # another rank has found it, and so stopped this one
                self._log(self._reason)

    def loaded(self) -> None:
        """Check a step again, because a checkpoint was loaded, which other code may have
        written."""
        self.position.contract = None


def _why_not(settings: TorchSettings) -> contract.Violation | None:
    """Find what the trainer's arguments have against parts."""
    options = settings.options
    for applies, *said in (
        (options.parallel is None, "with parallel=None, the operator averages the gradients", "leave parallel out"),
        (options.gradients == "ranks", "gradients='ranks' is not a mean over samples", "leave gradients out"),
        (options.precision == "apex", "Apex steps copies of the weights", "use precision='fp16' or 'bf16'"),
        (options.sync_batchnorm, "sync_batchnorm normalizes the samples of all workers together", "leave it out"),
        (bool(options.ddp_args.get("static_graph")), *STATIC_GRAPH),
        ("powersgd" in (options.hook_name or ""), "PowerSGD keeps errors of each worker", "leave comm_hook out"),
    ):
        if applies and settings.adds_parts:
            return contract.Violation(*said)
    return None


class OwnCalls:
    """Counts the collective calls that are not made by DDP or FSDP, from now until it is ended.
    `count` returns those of all code."""

    def __init__(self, count: Callable[[], int], models: Sequence[nn.Module], *, sharded: bool) -> None:
        self._count, self._began, self._models = count, count(), 0
        self._entered: int | None = None
        self._hooks: list[Any] = []
        for each in models:
            if not (sharded or isinstance(each, DistributedDataParallel)):
                continue
            inner: Any = each if sharded else each.module
            self._hooks.append(each.register_forward_pre_hook(self._enter, prepend=True))  # also before FSDP's
            if sharded or is_compiled(inner):  # which does not call new hooks
                self._hooks.append(each.register_forward_hook(self._leave))
            else:  # DDP sends buffers before the user's model begins
                self._hooks.append(inner.register_forward_pre_hook(self._leave))

    def _enter(self, *_: Any) -> None:
        self._entered = self._count()

    def _leave(self, *_: Any) -> None:
        if self._entered is not None:  # otherwise, user code has called the inner model
            self._models += self._count() - self._entered
            self._entered = None

    def ended(self) -> int:
        """Stop, and return how many calls were made."""
        if self._entered is not None:  # an error has ended a forward pass
            self._leave()
        count = self._count() - self._began - self._models if self._hooks else 0
        for each in self._hooks:
            each.remove()
        return count
