"""The user's own modules reach workers on machines that do not have them, within a limit that is logged."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raysgd.config import WorkerResources
from raysgd.core.outcomes import Ok
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.workers import user_code
from raysgd.workers.events import CallEnded, Event, WorkerEnded
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import pack
from raysgd.workers.user_code import add_to_path, find_user_folders, install, pack_modules
from tests.background import Background

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = {
    "train.py": "",
    "helper.py": "WHO = 'helper'",
    "pack/__init__.py": "from .inner import WHO",
    "pack/inner.py": "WHO = 'inner'",
    "space/module.py": "WHO = 'a folder without __init__.py'",
}
OTHERS = [
    ".git/hook.py",
    ".venv/x.py",
    "env/pyvenv.cfg",
    "env/lib/x.py",
    "__pycache__/x.py",
    "not-a-name/x.py",
    "data.csv",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in [*MODULES, *OTHERS]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MODULES.get(name, ""))
    return folder


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the test change `sys.path`, and forget what it imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("helper", "pack", "pack.inner", "space", "space.module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return sys.path


def test_modules_are_packed_and_installed_once(folder: Path, tmp_path: Path, path: list[str]) -> None:
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    code = pack_modules([folder], 1)
    assert (code.modules, code.left_out) == (len(MODULES), [])
    assert pack_modules([folder], 1).data == code.data, "the same modules give the same bytes"
    place = tmp_path / "node"
    install(code, place)
    (first,) = place.iterdir()
    assert sorted(str(p.relative_to(first / "0")) for p in first.rglob("*.py")) == sorted(MODULES)
    before = first.stat().st_ino
    install(code, place)
    assert [p.stat().st_ino for p in place.iterdir()] == [before]
    assert path[0] == str(first / "0") and path.count(path[0]) == 1
    import helper  # type: ignore[import-not-found]
    import pack  # type: ignore[import-not-found]
    from space.module import WHO  # type: ignore[import-not-found]

    assert (helper.WHO, pack.WHO, WHO) == ("helper", "inner", "a folder without __init__.py")
    assert helper.__file__ == str(first / "0" / "helper.py")


def test_a_folder_that_others_can_write_to_is_refused(folder: Path, tmp_path: Path, path: list[str]) -> None:
    place = tmp_path / "node"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match=f"{place} must be a folder of this user that no other user can open"):
        install(pack_modules([folder], 1), place)


def test_what_is_too_large_is_left_out_and_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "large.py").write_text(f"TABLE = '{os.urandom(600_000).hex()}'")
    monkeypatch.setattr(user_code, "MOST_BYTES", 1 << 20)
    code = pack_modules([folder], 1)
    assert code.left_out == [f"{folder / 'large.py'} (1.2 MB)"] and code.modules == len(MODULES)
    assert f"{folder / 'large.py'} (1.2 MB) were left out. At most 1 MB" in caplog.text
    assert "call ray.init(runtime_env={'working_dir': ..., 'excludes': [...]})" in caplog.text
    monkeypatch.setattr(user_code, "MOST_ENTRIES", 5)
    code = pack_modules([folder], 1)
    assert code.modules == 2 and f"{folder / 'pack'}/" in code.left_out, "nothing below the first level"


def test_a_job_with_a_working_dir_sends_nothing(path: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path[:0] = [str(folder), str(folder)]
    assert find_user_folders({})[0][0] == folder
    assert not any(
        "site-packages" in str(each) or each == Path(os.__file__).parent for each in find_user_folders({})[0]
    )
    assert find_user_folders({"env_vars": {"A": "1"}}) == find_user_folders({}), "a runtime environment without code"
    assert (
        find_user_folders({"working_dir": "gcs://_ray_pkg_1.zip"})
        == find_user_folders({"py_modules": ["x"]})
        == ([], 0)
    )
    path.insert(0, "")  # a notebook
    monkeypatch.chdir(folder / "pack")
    assert find_user_folders({})[0][0] == folder / "pack"


def test_folders_of_this_machine_are_added_in_their_order(path: list[str]) -> None:
    before = list(path)
    add_to_path(["/one", before[-1], "/two", "/developed"], 3)
    assert path == ["/one", "/two", *before, "/developed"]


def test_packages_that_are_developed_come_after_installed_ones(path: list[str], folder: Path, tmp_path: Path) -> None:
    developed = tmp_path / "developed"
    developed.mkdir()
    path.insert(0, str(folder))
    path.append(str(developed))  # as `pip install -e` does
    folders, first = find_user_folders({})
    assert folder in folders[:first] and developed in folders[first:]


def test_odd_entries_of_a_folder_are_left_out(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).touch()
    code = pack_modules([folder], 1)
    assert code.modules == len(MODULES)
    assert any("ff.py" in each for each in code.left_out)


# -- workers that do not have the folder --------------------------------------------------------------


def imports_helper() -> None:
    import helper  # on the worker, not here

    assert helper.WHO == "helper"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on the driver's machine", "on another machine"])
def test_a_worker_imports_modules_of_the_users_folder(
    ray_cluster: None, folder: Path, path: list[str], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    path.insert(0, str(folder))  # after Ray has noted the folders that it tells its workers
    group = RayGroup(SingleWorkerBackend(), WorkerResources(cpus=1))
    try:
        if elsewhere:
            monkeypatch.setattr(group, "_here", "another machine")
        (worker,) = group.launch(1)
        call, events = None, list[Event]()
        while not any(isinstance(event, CallEnded | WorkerEnded) for event in events):
            events += group.poll(1.0)
            if call is None and events:
                shutil.rmtree(folder) if elsewhere else None
                call = group.submit(worker, "prepare", {"hook": pack(imports_helper)})
        assert isinstance(events[-1], CallEnded) and isinstance(events[-1].outcome, Ok), events
    finally:
        group.stop()


# A node in a mount namespace of its own, in which another, empty folder hides the script's.
SCRIPT = """
import subprocess, sys
from pathlib import Path
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from raysgd import TorchTrainer, TrainingOperator

class Small(TrainingOperator):
    def setup(self, config):
        import helper
        from pack import WHO
        model = nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.MSELoss())
        self.register_data(train_loader=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2))

    def train_epoch(self, iterator, info=None):
        from space import module  # imported only during a call
        import helper
        values = super().train_epoch(iterator, info)
        return values | {"file": helper.__file__}

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
start = f"{sys.executable} -m ray.scripts.scripts start --num-cpus=1 --block --address={cluster.address}"
here = Path(__file__).parent
node = subprocess.Popen(["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {here} && cd / && exec {start}"])
try:
    ray.init(cluster.address)
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        assert node.poll() is None
    with TorchTrainer(training_operator_cls=Small, num_workers=2, use_gpu=False) as trainer:
        results = trainer.train(reduce_results=False)
    files = sorted("project" if Path(each["file"]).parent == here else each["file"] for each in results)
    print("FILES", *files, flush=True)
finally:
    ray.shutdown()
    node.terminate()
    node.wait()
    cluster.shutdown()
"""


def run(background: Background) -> subprocess.CompletedProcess[str]:
    folder = background.folder()
    for name, content in {**MODULES, "script.py": SCRIPT}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    # Without the forks of forked_workers.py, which would be in the mount namespace of the tests.
    return background.run(str(folder / "script.py"), folder=folder, PYTHONPATH=str(ROOT))


def may_unshare() -> bool:
    done = (
        subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
        if shutil.which("unshare")
        else None
    )
    return done is not None and done.returncode == 0


@pytest.mark.more
@pytest.mark.skipif(not may_unshare(), reason="needs mount namespaces (Linux, root)")
@pytest.mark.script(run=run)
def test_a_node_that_does_not_have_the_folder(outcome: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    done = outcome()
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FILES ")]
    _, shipped, own = line.split()
    assert "/raysgd-code-" in shipped and shipped.endswith("/0/helper.py")
    assert own == "project"
