"""The user's own modules reach workers on machines that do not have them: by Ray's means."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raysgd.workers.cluster import connecting
from tests.background import Background

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = {
    "helper.py": "WHO = 'helper'",
    "pack/__init__.py": "from .inner import WHO",
    "pack/inner.py": "WHO = 'inner'",
    "space/module.py": "WHO = 'a folder without __init__.py'",
}


def test_the_folder_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path(pytest.__file__).parent.parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(installed), "/nowhere", "", "/"])  # a notebook
    assert connecting.folder_of_script() == tmp_path
    monkeypatch.setattr(sys, "path", [str(installed)])
    assert connecting.folder_of_script() is None


# A node in a mount namespace of its own, in which another, empty folder hides the script's. Both are on this machine, which the
# script does not see, as if the other one were elsewhere.
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from raysgd import TorchTrainer, TrainingOperator
from raysgd.workers.cluster import foreign

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
os.environ["RAY_ADDRESS"] = cluster.address
foreign.PROBE = foreign.PROBE.replace("set(find_node_ids())", "{min(node.hex() for node in nodes)}")
try:
    while (answer := foreign.probe_gcs(cluster.address, 60)) != "others":
        assert answer == "ok" and node.poll() is None, answer
        time.sleep(0.1)
    with TorchTrainer(training_operator_cls=Small, num_workers=2, use_gpu=False) as trainer:
        results = trainer.train(reduce_results=False)
    print("FILES", *(each["file"] for each in results), flush=True)
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
    _, *files = line.split()
    assert len(files) == 2
    assert all("/runtime_resources/working_dir_files/" in each and each.endswith("/helper.py") for each in files), files
