"""What every test shares: a quiet environment, one small Ray cluster on demand, and skips that say why."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports ray: its workers inherit this. Two threads' worth of maths per worker would only
# make a small machine slower, and a test must never end up on somebody's real cluster.
os.environ.update(
    RAY_ADDRESS="local",
    OMP_NUM_THREADS="1",
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_DEDUP_LOGS="0",
    RAY_USAGE_STATS_ENABLED="0",
    TF_CPP_MIN_LOG_LEVEL="2",
)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local cluster for all tests that ask for it; its 8 CPUs are logical, whatever the machine has."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which is not installed here (see CONTRIBUTING.md)")
