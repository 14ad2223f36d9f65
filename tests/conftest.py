"""Fixtures and hooks of all tests: a quiet environment, one small Ray cluster on demand, and skips with reasons."""

import gc
import importlib.util
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.background import LIMIT_S, Background, start_ray
from tests.durations import Durations
from tests.forked_workers import ForkServer, forks_workers
from tests.guards import Guard
from tests.tiers import TIER, lacks, selects

ROOT = Path(__file__).resolve().parent.parent

NAMES_OF_PACKAGES = {
    "tensorflow": "tensorflow|TFTrainer",
    "lightning": "train.lightning",
    "transformers": "train.huggingface",
}
GUARD = pytest.StashKey[Guard]()
FOLDER = pytest.StashKey[Path]()

# Workers of Ray are forks of a process that has imported torch, also those of scripts.
FORKS = pytest.StashKey[ForkServer | None]()


def own_environment() -> tuple[Path, ForkServer | None]:
    """Set the variables that Ray reads. Return the folder of this process's clusters, and what forks their workers.

    All clusters of a test process keep their files in that folder, and the address file through which `ray.init()`
    finds a running cluster is there too (in every Ray from 2.9 on). A developer's own cluster has these elsewhere, so
    neither can find the other."""
    # Directly in /tmp, because the paths of Ray's sockets must stay under about 100 bytes.
    folder = tempfile.mkdtemp(prefix="raysgd-", dir="/tmp" if os.path.isdir("/tmp") else None)
    forks = ForkServer(Path(folder)) if forks_workers() else None
    # More than one thread of arithmetic per worker would slow down a small machine, a test must never use a real
    # cluster, and newer versions of Ray write a token into the home folder unless they get one. torch's rendezvous asks
    # the name server for each address that connects: a lost answer costs 1 s instead of 5.
    os.environ.update(
        RAY_ADDRESS="local",
        RAY_TMPDIR=folder,
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        OMP_NUM_THREADS="1",
        RES_OPTIONS="timeout:1",
        PYTHONPATH=os.pathsep.join(
            filter(None, [forks and str(forks.customization), str(ROOT), os.environ.get("PYTHONPATH")])
        ),
        RAY_worker_niceness="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_DEDUP_LOGS="0",
        RAYSGD_FORK_WORKERS="0",  # one server for all scripts is quicker
        RAY_USAGE_STATS_ENABLED="0",
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    return Path(folder), forks


@pytest.fixture(scope="session")
def forks(request: pytest.FixtureRequest) -> Iterator[ForkServer | None]:
    forks = request.config.stash[FORKS]
    yield forks
    if forks is not None:
        forks.close()


@pytest.fixture(scope="session")
def ray_cluster(forks: ForkServer | None) -> Iterator[None]:
    """Start one local cluster for all tests that ask for it, with 8 logical CPUs on any machine."""
    import ray

    with forks.used_by_ray() if forks is not None else nullcontext():
        start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def background(forks: ForkServer | None) -> Iterator[Background]:
    """Remember the environment of scripts before any test can change it."""
    background = Background(forks)
    yield background
    background.close()


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
def workers_with_packages(request: pytest.FixtureRequest, forks: ForkServer | None) -> Iterator[None]:
    """In modules that name one of these packages and use the cluster, let Ray start workers that have imported it."""
    text = request.path.read_text(encoding="utf-8")
    kind = next((kind for kind, names in NAMES_OF_PACKAGES.items() if re.search(names, text)), None)
    mine = [item for item in request.session.items if item.path == request.path]
    used = kind and any("ray_cluster" in getattr(item, "fixturenames", ()) for item in mine)
    with forks.having(kind) if used and forks is not None else nullcontext():
        yield


@pytest.fixture
def outcome(request: pytest.FixtureRequest, background: Background) -> Callable[[], Any]:
    """Return a function that runs this test's script (`@pytest.mark.script`) and returns its outcome."""
    return lambda: background.outcome(request.node)


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
    config.pluginmanager.register(Durations(TIER, worker=hasattr(config, "workerinput")))
    if not distributes(config):
        config.stash[FOLDER], config.stash[FORKS] = own_environment()


def distributes(config: pytest.Config) -> bool:
    """Return whether other processes, which xdist starts, run the tests. They must not inherit this one's variables."""
    return bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the files of the run's clusters, which have been shut down. A process may still be writing its last log
    line, so one removal may not be enough."""
    folder = config.stash.get(FOLDER, None)
    if folder is None:
        return
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.25)
    shutil.rmtree(folder)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In `make more`, do not import modules without tests of that tier."""
    module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (TIER == "more" and module and "mark.more" not in collection_path.read_text(encoding="utf-8")) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers. Begin with scripts, and with files of slow tests, so that several processes
    end at about the same time."""
    config.hook.pytest_deselected(items=[item for item in items if not selects(item)])
    items[:] = [item for item in items if selects(item)]
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.get_closest_marker("script") is None, -slow[item.path]))
    for item in items:
        if item.get_closest_marker("script") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S + 30))


def pytest_collection_finish() -> None:
    """Keep what has been imported from collections of garbage. Each `train()` of transformers makes one: 1 to 3 s."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests of a file, which share fixtures, in the order of collection. Each script is a unit
    of its own."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return nodeid if "mark.script" in (config.rootpath / file).read_text(encoding="utf-8") else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        lacks("horovod", "needs Horovod, which is not installed here: `make horovod` builds it")
