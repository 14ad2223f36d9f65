"""`tests.faults.Ground` over simulated workers: the same faults at the same points of a batch, in virtual time.

with Cluster():
    ground = LocalGround(tmp_path)
    ground.arm(Fault(1, 6, where="after"))
    ground.trainer.train()
    ground.assert_epoch_exact()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import faults
from tests.local.group import Cluster

__all__ = ["Fault", "LocalGround"]

# What the simulation calls these kinds.
KINDS = {"stop": "freeze", "term": "notice"}


class Fault(faults.Fault):
    """Happens to the simulated worker that reaches it. `others` are the ranks that die with it."""

    def happen(self) -> None:
        for worker in Cluster.running.workers:
            if worker.host.rank in self.others:
                worker.die("SIGKILL")
        if self.kind == "raise":
            super().happen()
        elif self.kind == "sleep":
            Cluster.running.here.sleep(self.seconds)
        else:
            Cluster.running.hit(KINDS.get(self.kind, self.kind))


class LocalGround(faults.Ground):
    """For a cluster that is running."""

    def __init__(self, marks: Path, **arguments: Any) -> None:
        super().__init__(marks, **{"num_workers": 3, "use_ray": True, "use_gpu": False, **arguments})
