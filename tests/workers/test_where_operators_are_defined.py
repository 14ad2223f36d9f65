"""An operator class works on every worker, whether a module beside the script or a notebook defines it. Scripts of pages define theirs."""

import textwrap
from collections.abc import Callable

import pytest

from tests.background import Background

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


SCRIPTS = {
    "notebook": {"script": NOTEBOOK},
    "beside": {"script": BESIDE + TRAINING, "beside": OPERATOR, "nested__helper": "called = False"},
}


def run(background: Background, where: str) -> str:
    folder = background.folder()
    for name, content in SCRIPTS[where].items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(content), encoding="utf-8")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = background.run(str(folder / "script.py"), connected=True, folder=elsewhere)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.script(run=run)
@pytest.mark.parametrize("where", ["beside", pytest.param("notebook", marks=pytest.mark.more)])
def test_an_operator_from(where: str, outcome: Callable[[], str]) -> None:
    assert "10 True" in outcome().splitlines()
