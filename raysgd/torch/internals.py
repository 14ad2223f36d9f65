"""What an operator for PyTorch and its replica share. Worker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from raysgd.core.measures.average_meters import AverageMeterCollection
from raysgd.core.ranks import RankInfo
from raysgd.replica.internals import Internals
from raysgd.torch.meters import DeviceMeters
from raysgd.torch.registered import Registered
from raysgd.torch.settings import TorchSettings
from raysgd.torch.state.buffers import RestoreBuffers
from raysgd.torch.step.attributes import WatchAttributes
from raysgd.torch.step.parts.batch_mode import KeepBatch
from raysgd.torch.step.parts.dealing import Dealer
from raysgd.torch.step.parts.part_states import PartStates
from raysgd.torch.step.profiling import Profiler
from raysgd.torch.step.skipped_steps import SkipStep
from raysgd.torch.step.weights import GradientWeights
from raysgd.torch.step.whole_gradients import WholeGradients

GET_BATCHES = ("train_epoch", "train_batch", "validate", "validate_batch", "predict_batch")  # methods


class TorchInternals(Internals):
    """Adds what only torch needs: policies that the replica asks, or that act also where they take
    part in no step.

    operator       whose they are
    gives_batches  whether methods of the user get batches
    counted        by the default `train_batch`, for the backward pass that it begins
    """

    settings: TorchSettings
    registered: Registered
    counted: Any = None
    attributes: WatchAttributes

    def __init__(
        self, operator: Any, settings: TorchSettings, rank_info: RankInfo | None, registered: Registered
    ) -> None:
        self.operator, self.device = operator, (device := operator.device)
        make_meter = AverageMeterCollection if device.type == "cpu" else DeviceMeters
        super().__init__(settings, rank_info, registered, make_meter=make_meter)
        self.makes_own_steps: bool = operator._has_own_steps
        self.gives_batches = self.makes_own_steps or bool(self.changed(*GET_BATCHES))
        self.whole = WholeGradients(registered) if settings.asynchronous else None
        self.profiler = None if settings.profiler is None else Profiler(settings.profiler)
        self.weigh = GradientWeights.of(self)
        self.skip_step = SkipStep.of(self)
        self.part_states = PartStates(type(operator), registered, device, always=settings.is_sharded)
        self.buffers = RestoreBuffers(registered)
        self.keep_batch = KeepBatch.of(self)
        by_speed = settings.elastic.shares == "speed"
        self.dealer = Dealer(settings.all_parts, self, device) if by_speed else None

    def changed(self, *names: str) -> list[str]:
        """Return which of these methods of the operator the user has changed."""
        names_of_user: list[str] = self.operator._overrides(*names)
        return names_of_user

    @property
    def acts_in_steps(self) -> bool:
        """Whether code of the user acts in the operator's steps."""
        return bool(self.changed("train_epoch", "train_batch", "backward", "step", "on_step"))

    def join(self, rank_info: RankInfo) -> None:
        super().join(rank_info)
        self.registered.rewrap()
        self.weigh.joined()
        self.buffers.joined()
        self.keep_batch.joined(rank_info)
        if self.dealer is not None:
            self.dealer.joined(rank_info)
        self.part_states.joined()

    def validating(self) -> AbstractContextManager[Any]:
        return self.registered.validating(self.rank_info.world_size)
