"""`TrainingOptions(on_oom="split")` with DistributedDataParallel: one rank runs out of memory, twice."""

import pytest
import torch

from tests.torch.test_split_parts import RUNS, replaced, result_of

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the training"),
]


def test_real_ranks_divide_what_does_not_fit_on_one() -> None:
    operator, config, options = RUNS["counts"]
    expected, _, _ = result_of(2, operator, options, **config)
    weights, _, seen = result_of(2, operator, replaced(options), **config, at=1, rank=1, fits=1)
    assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-12)
    assert set(seen[1][1:]) == {1}
