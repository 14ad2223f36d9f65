"""An operator class works on every worker, be it from a script, from a file beside it, or from a notebook."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

OPERATOR = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from raysgd import TorchTrainer, TrainingOperator

class Net(nn.Linear):
    pass

class Small(TrainingOperator):
    def setup(self, config):
        model = Net(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss())
        data = TensorDataset(torch.ones(10, 2), torch.ones(10, 1))
        self.register_data(train_loader=DataLoader(data, batch_size=2))
"""
TRAINING = """
with TorchTrainer(training_operator_cls=Small, num_workers=2, use_gpu=False) as trainer:
    print(trainer.train()["num_samples"], type(trainer.get_model()) is Net)
"""
IN_MAIN = OPERATOR + TRAINING
BESIDE = """
import os
import beside
import nested.helper
from raysgd import TorchTrainer

class Small(beside.Small):
    def setup(self, config):
        nested.helper.called = True
        super().setup(config)

os.remove(beside.__file__)
os.remove(nested.helper.__file__)
Net = beside.Net
"""
NOTEBOOK = f"""
import sys, types
cells = [{OPERATOR!r}, {TRAINING!r}]
notebook = sys.modules["__main__"]
for cell in cells:
    exec(compile(cell, "<ipython-input-1>", "exec"), notebook.__dict__)
"""


def run(environment: dict[str, str], folder: Path, script: str, **files: str) -> str:
    """Runs a script as a user would."""
    for name, content in {"script": script, **files}.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(content), encoding="utf-8")
    (folder / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder / "elsewhere",
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("where", ["main", "beside", "notebook"])
def test_an_operator_from(connected: dict[str, str], tmp_path: Path, where: str) -> None:
    if where == "main":
        output = run(connected, tmp_path, IN_MAIN)
    elif where == "notebook":
        output = run(connected, tmp_path, NOTEBOOK)
    else:
        output = run(connected, tmp_path, BESIDE + TRAINING, beside=OPERATOR, nested__helper="called = False")
    assert "10 True" in output.splitlines()
