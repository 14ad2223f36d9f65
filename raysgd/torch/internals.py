"""What an operator for PyTorch and its replica share. Worker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from raysgd.core.ranks import RankInfo
from raysgd.torch.batch_mode import KeepBatch
from raysgd.torch.buffers import KeepBuffers
from raysgd.torch.dealing import Dealer
from raysgd.torch.part_states import PartStates
from raysgd.torch.parts import Parts
from raysgd.torch.profiling import Profiler
from raysgd.torch.settings import TorchSettings
from raysgd.torch.skipped_steps import LeaveOut
from raysgd.torch.weights import Weigh
from raysgd.training.internals import Internals


class TorchInternals(Internals):
    """Adds what only torch needs: policies that the replica asks, or that act also where they take
    part in no step."""

    settings: TorchSettings
    parts: Parts
    weigh: Weigh
    leave_out: LeaveOut
    part_states: PartStates
    buffers: KeepBuffers
    keep_batch: KeepBatch
    dealer: Dealer | None
    profiler: Profiler | None
    gives_batches: bool  # to methods of the user
    counted: Any = None  # by the default `train_batch`, for the backward pass that it begins

    def join(self, rank_info: RankInfo) -> None:
        super().join(rank_info)
        self.parts.rewrap()
        self.weigh.joined()
        self.buffers.joined()
        self.keep_batch.joined(rank_info)
        if self.dealer is not None:
            self.dealer.joined(rank_info)
        self.part_states.joined()

    def validating(self) -> AbstractContextManager[Any]:
        return self.parts.validating(self.rank_info.world_size)
