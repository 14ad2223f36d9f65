"""What an operator and its replica share. Worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raysgd.core.measures.average_meters import AverageMeterCollection
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.pace import Pace
from raysgd.replica.settings import ReplicaSettings
from raysgd.replica.steps.feed import Feed, NoFeed
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Policies

logger = logging.getLogger("raysgd")


class Internals:
    """Has all that raysgd stores in an operator besides the attributes of the user. The operator
    makes it when it is created, and its replica trains with it.

    settings      those of the trainer
    registered         what `register` and `register_data` received
    policies      those that take part in each step; the operator makes them after `setup`
    pace          what the loops of `train` take
    ranks_read    which numbers of workers user code has read of the operator
    prefix        of the metrics of a validation that the operator does not name itself
    planned_steps  the most that `total_steps` has returned; None before that

    The replica changes the others, and the operator reads them:

    rank_info     of the current generation
    position      what is committed
    feed          of the running loop, with the running step
    testing       whether `validate` runs for a test
    epochs, num_steps  how many epochs the running loop over epochs has, and how many batches each
                       of its calls of `train`; None without such a loop, or number

    Only the metrics have two writers: both begin with an empty `meter`.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        rank_info: RankInfo | None,
        registered: Any,
        *,
        make_meter: Callable[[], AverageMeterCollection] = AverageMeterCollection,
        prefix: str = "val_",
    ) -> None:
        self.settings = settings
        self.rank_info = rank_info or RankInfo()
        self.registered, self.prefix, self._make_meter = registered, prefix, make_meter
        self.position, self.pace = Position(), Pace()
        self.planned_steps: int | None = None
        self.testing = False
        self.ranks_read: set[str] = set()
        self.epochs: int | None = None
        self.num_steps: int | None = None
        self._explained: set[str] = set()  # warnings that were logged
        self.use(Policies())
        self.begin_metrics()

    def use(self, policies: Policies) -> None:
        """Let these policies take part in steps."""
        self.policies = policies
        self.end_loop()

    def end_loop(self) -> None:
        """Let each batch that user code passes to the operator be a step of its own."""
        self.pace.end()
        self.feed: Feed | NoFeed = NoFeed(self.policies)

    def begin_metrics(self) -> None:
        """Begin to average metrics."""
        self.meter = self._make_meter()

    def join(self, rank_info: RankInfo) -> None:
        """Adapt to a new generation."""
        self.rank_info = rank_info
        self.pace.reset()

    def step_was_made(self) -> bool:
        """Return whether an optimizer that has no hooks has made the running step."""
        return False

    def validating(self) -> AbstractContextManager[Any]:
        """A context for a validation, in which no rank waits for another one."""
        return nullcontext()

    def warn_once(self, text: str, *values: Any) -> None:
        """Log a warning of this kind, on the first rank and for the first time only."""
        if self.rank_info.world_rank == 0 and text not in self._explained:
            self._explained.add(text)
            logger.warning(text, *values)

    def leave_out_warning(self, text: str) -> None:
        """Log no warning of this kind."""
        self._explained.add(text)


def internals_of(operator: Any) -> Any:
    """What raysgd stores in this operator."""
    internals = getattr(operator, "_internals", None)
    if internals is None:
        raise ConfigError(
            f"{type(operator).__name__}.__init__ did not call super().__init__(*args, **kwargs): call it, or move the "
            "content of __init__ into setup(self, config)"
        )
    return internals
