"""The progress bar in a notebook that is run and rendered: one widget with the user's metrics, and no other output."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent.parent
CELL = """
from raysgd import TorchTrainer
from tests.torch.small import Line

class Accurate(Line):
    def train_batch(self, batch, batch_info):
        return {**super().train_batch(batch, batch_info), "accuracy": 0.75}

with TorchTrainer(training_operator_cls=Accurate, use_gpu=False, use_tqdm=True) as trainer:
    for _ in range(2):
        trainer.train()
"""


def test_a_rendered_notebook_shows_one_bar_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    monkeypatch.syspath_prepend(ROOT)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    (cell,) = notebook.cells
    shown = [output for output in cell.outputs if output.output_type == "display_data"]
    assert len(shown) == 2, cell.outputs
    state = json.loads(json.dumps(notebook.metadata.widgets))["application/vnd.jupyter.widget-state+json"]["state"]
    texts = [str(widget["state"].get("value")).replace("\u2007", " ") for widget in state.values()]  # spaces of tables
    for number in (1, 2):
        (text,) = [text for text in texts if f"epoch={number}, " in text]
        assert "3/3" in text and "accuracy=0.75" in text and "train_loss=" in text, text
    assert len(shown) == len(cell.outputs), f"nothing else is shown: {cell.outputs}"
