"""Weights after faults equal those of an undisturbed run, wherever that is mathematically possible."""

from pathlib import Path

import pytest
import torch

from raysgd import ElasticConfig
from tests.faults import Fault, Ground

pytestmark = pytest.mark.elastic


def run(path: Path, faults: list[Fault]) -> list[torch.Tensor]:
    """Train two epochs with a global batch of 12 on three workers, with faults in the first one."""
    elastic = ElasticConfig(batch="global", grow=bool(faults), hang_timeout_s=60)
    ground = Ground(path, num_workers=3, elastic=elastic, config={"samples": 240})
    try:
        ground.arm(*faults)
        for _ in range(2):
            ground.trainer.train(max_retries=-1)
            ground.assert_epoch_exact()
        assert ground.fired() == len(faults)
        return ground.weights()
    finally:
        ground.trainer.shutdown()


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return run(tmp_path_factory.mktemp("undisturbed"), [])


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(0, 9, where="backward"), Fault(1, 12, where="after")],
        [Fault(0, 3, "term"), Fault(1, 8)],
    ],
    ids=["two deaths", "a notice and a death"],
)
def test_global_batches_give_the_same_weights(
    undisturbed: list[torch.Tensor], faults: list[Fault], tmp_path: Path
) -> None:
    for mine, theirs in zip(run(tmp_path / "marks", faults), undisturbed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
