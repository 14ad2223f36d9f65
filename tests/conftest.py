"""What every test shares: a quiet environment, one small Ray cluster on demand, and skips that say why."""

import importlib.util
import logging
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


@pytest.fixture(scope="session")
def connected(ray_cluster: None) -> dict[str, str]:
    """The environment of a script that uses the tests' cluster: starting one for each would take most of its time."""
    import ray

    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket on a real S3 server (moto's) in this process, at a port that was bound; `s3://...` goes there."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        s3fs.S3FileSystem().mkdir("raysgd-tests")
        yield "s3://raysgd-tests"
    server.stop()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which is not installed here: `make horovod` builds it")
