"""Fixtures and hooks of all tests: a quiet environment, one small Ray cluster on demand, and skips with reasons."""

import importlib.util
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.background import Background, Lane, turn
from tests.forked_workers import ForkServer, forks_workers
from tests.guards import Guard

ROOT = Path(__file__).resolve().parent.parent

GUARD = pytest.StashKey[Guard]()

# All clusters of a test run keep their files here, and the address file through which `ray.init()` finds a running
# cluster is here too (in every Ray from 2.9 on). A developer's own cluster has these elsewhere, so neither can find the
# other. Directly in /tmp, because the paths of Ray's sockets must stay under about 100 bytes.
RAY_FOLDER = tempfile.mkdtemp(prefix="raysgd-", dir="/tmp" if os.path.isdir("/tmp") else None)

# Workers of Ray are forks of a process that has imported torch, also those of scripts.
FORKS = ForkServer(Path(RAY_FOLDER)) if forks_workers() else None

# These are set before ray is imported, because its workers inherit them. Workers keep the tests' priority, which Ray
# would lower to that of the scripts in background.py. More than one thread of arithmetic per worker would slow down a
# small machine, a test must never use a real cluster, and newer versions of Ray write a token into the home folder
# unless they get one.
os.environ.update(
    RAY_ADDRESS="local",
    RAY_TMPDIR=RAY_FOLDER,
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    OMP_NUM_THREADS="1",
    PYTHONPATH=os.pathsep.join(
        filter(None, [FORKS and str(FORKS.customization), str(ROOT), os.environ.get("PYTHONPATH")])
    ),
    RAY_worker_niceness="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_DEDUP_LOGS="0",
    RAY_USAGE_STATS_ENABLED="0",
    TF_CPP_MIN_LOG_LEVEL="2",
)


@pytest.fixture(scope="session")
def ray_cluster(lane: Lane) -> Iterator[None]:
    """Start one local cluster for all tests that ask for it, with 8 logical CPUs on any machine."""
    import ray

    with FORKS.used_by_ray() if FORKS is not None else nullcontext():
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    """Run the scripts that later tests check, beginning with the first test, at a lower priority."""
    background = Background(FORKS)
    lane = Lane(request.session.items, background)
    lane.widen(1)
    yield lane
    lane.close()
    background.close()
    if FORKS is not None:
        FORKS.close()


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread, a process or a listening socket behind.

    pytest sets up fixtures of wider scope before this one, and this one before the test's other fixtures. So what a
    module's trainer or the session's cluster holds is no leak, and the test's own fixtures have ended before the
    check."""
    guard = request.config.stash[GUARD]
    guard.begin()
    yield
    leaks = guard.end()
    if leaks:
        pytest.fail("this test left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def tensorflow_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """In modules that name TensorFlow, let Ray start workers that have imported it."""
    used = re.search("tensorflow|TFTrainer", Path(request.module.__file__).read_text(encoding="utf-8"))
    with FORKS.with_tensorflow() if used and FORKS is not None else nullcontext():
        yield


@pytest.fixture
def outcome(request: pytest.FixtureRequest, lane: Lane) -> Callable[[], Any]:
    """Return a function that waits for this test's script (`@pytest.mark.script`) and returns its outcome."""
    return lambda: lane.outcome(request.node)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Start an S3 server (moto) in this process, to which `s3://` goes, and return the URI of a bucket."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard as a plugin, because the hooks of this file are not called for fixtures of the session."""
    config.stash[GUARD] = Guard()
    config.pluginmanager.register(config.stash[GUARD])


def pytest_unconfigure() -> None:
    """Remove the files of the run's clusters, which have been shut down. A process may still be writing its last log
    line, so one removal may not be enough."""
    for _ in range(20):
        shutil.rmtree(RAY_FOLDER, ignore_errors=True)
        if not os.path.exists(RAY_FOLDER):
            return
        time.sleep(0.25)
    shutil.rmtree(RAY_FOLDER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("RAYSGD_SOAK"):
        long = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    items.sort(key=turn)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which is not installed here: `make horovod` builds it")
