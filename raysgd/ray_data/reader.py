"""Reads a worker's rows of a Ray Dataset: requests them in advance, fetches blocks. Worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.channel.messages import StartDealer
from raysgd.core.ranks import RankInfo
from raysgd.core.read_ahead import ReadAhead
from raysgd.errors import ResourceError
from raysgd.ray_data.dealer import Dealer, PartRequest, RankRows

DEALER = "raysgd-dealer"
AHEAD = 2
LOOK_S = 0.05
START_S = 120.0
Batch = tuple[dict[str, Any], int, bool]  # columns, the row after the step, and whether the rows are new


class RowReader:
    """Reads the batches of one rank; `take` sends a request to the dealer."""

    def __init__(self, take: Callable[[PartRequest], RankRows | None]) -> None:
        self._take = take

    def read(
        self, rank_info: RankInfo, *, call: int, number: tuple[int, int], start: int, step: int, pad: bool, keep: int
    ) -> Iterator[Batch]:
        """Yield one rank's batches of a pass as columns, with the row after each step, and whether
        the rows are new. The rows of the last `keep` batches may be requested again."""
        turn = (call, rank_info.generation)
        request = PartRequest(number, start, step, rank_info.world_rank, rank_info.world_size, turn, pad, floor=start)
        begun: deque[int] = deque([start], maxlen=keep + 1)
        ahead = ReadAhead(self._fetched(request, begun), ahead=AHEAD, name="raysgd-rows")
        try:
            while (batch := ahead.next()) is not None:
                begun.append(batch[1])
                if batch[0]:
                    yield batch
        finally:
            ahead.stop()

    def _fetched(self, request: PartRequest, begun: deque[int]) -> Iterator[Batch]:
        """Fetch batches. `begun` are the rows at which the last ones began."""
        while (dealt := self._take(request)) is not None:
            yield _columns(dealt), dealt.after, dealt.fresh
            request = replace(request, start=dealt.after, floor=begun[0])


def _columns(dealt: RankRows) -> dict[str, Any]:
    """The rows as columns: copies, because the memory of blocks is shared."""
    import numpy as np
    import ray
    from ray.data.block import BlockAccessor

    blocks = ray.get([each.block for each in dealt.slices])
    parts = [
        BlockAccessor.for_block(BlockAccessor.for_block(block).slice(each.start, each.stop)).to_batch_format("numpy")
        for block, each in zip(blocks, dealt.slices, strict=True)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


# -- connecting to a dealer ---------------------------------------------------------------------------


def local_row_reader(name: str, dataset: Any, deliver: Any) -> RowReader:
    """Make a reader whose dealer is in this process."""
    from ray import cloudpickle

    dealer, one_at_a_time = Dealer(cloudpickle.dumps(dataset)), threading.Lock()

    def take(request: PartRequest) -> RankRows | None:
        with one_at_a_time:
            return dealer.take(request)

    return RowReader(take)


@dataclass(frozen=True)
class SharedRowReaders:
    """Creates a worker's readers. For a data set that every rank has created in the same way, it
    asks the driver to start the dealer, because the driver outlives all workers. `mark` identifies
    the trainer."""

    mark: str

    def __call__(self, name: str, dataset: Any, deliver: Callable[[StartDealer, bytes], None]) -> RowReader:
        from ray import cloudpickle

        full = f"{DEALER}-{self.mark}-{name}"
        deliver(StartDealer(full), cloudpickle.dumps(dataset))
        return RowReader(RemoteDealer(full))


@dataclass
class RemoteDealer:
    """Sends requests to a dealer, which it finds by its name. It can be pickled."""

    name: str

    def __call__(self, request: PartRequest) -> RankRows | None:
        import ray

        dealt: RankRows | None = ray.get(self._found().take.remote(request))
        return dealt

    def _found(self) -> Any:
        import ray

        if "handle" not in vars(self):
            until = time.monotonic() + START_S
            while True:
                try:
                    vars(self)["handle"] = ray.get_actor(self.name)
                    break
                except ValueError as error:
                    if time.monotonic() > until:
                        raise ResourceError(
                            f"the process that reads the data set did not start within {START_S:g} s"
                        ) from error
                    time.sleep(LOOK_S)
        return vars(self)["handle"]

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name}
