"""The notebooks of examples/notebooks: what is stored in them is right, and running them gives the same.

A notebook is executed in a fresh kernel, as a reader would, and what its cells print is checked. The same checks read the
stored outputs. A kernel also shows what scripts do not have: operators of `__main__` in cells, and interrupts.
"""

import getpass
import importlib.util
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.background import LIMIT_S, Background

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
QUICK = {"quickstart"}  # runs in `make more`, the others in `make nightly`


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook: Any) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def pictures(notebook: Any) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def numbers(name: str, output: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\b{name}\s+(-?[\d.]*\d)", output)]


def quickstart(output: str) -> None:
    losses, accuracies = numbers("train_loss", output), numbers("val_accuracy", output)
    assert len(losses) == 8 and losses[-1] < losses[0] / 5, output
    assert accuracies[7] > 0.93 and accuracies[8] == accuracies[7], "one worker loads what two have saved"
    assert "the next epoch is 9" in output
    labels, guesses = (re.search(rf"{name}: +\[(.+)\]", output) for name in ("labels", "guesses"))
    assert labels and guesses
    assert sum(a == b for a, b in zip(labels[1].split(","), guesses[1].split(","), strict=True)) >= 8


def kill_a_worker(output: str) -> None:
    assert "12000 of 12000 samples" in output
    assert re.search(r"worker death: 3 -> 2 workers in batch \d+,\n +in place: True, batches redone: 0", output), output
    assert "growth: 2 -> 3 workers" in output


def kill_under_transformers(output: str) -> None:
    ends = re.findall(r"200 steps, the last loss is ([\d.]+)", output)
    assert len(ends) == 2 and ends[0] == ends[1], output
    assert re.search(r"worker death: 3 -> 2 workers,\n +in place: True, batches redone: 0", output), output
    assert "the largest difference is below 1e-5: True" in output


def old_script(output: str) -> None:
    losses = numbers("train_loss", output)
    assert len(losses) == 5 and losses[-1] < losses[0] / 100, output
    assert numbers("val_loss", output)[0] < 0.1
    assert "slope 2.00  intercept 5.00\nnext epoch: 4" in output, "the checkpoint was loaded"


def bad_batch(output: str) -> None:
    assert re.search(r"OSError on rank [01]: sample 444 cannot be read", output), output
    assert re.search(r"weight, bias is not finite in step \d+, .*Rank \d had the samples .*\b123\b", output), output
    assert re.search(r"batch \d+ contains \[\[.*inf.*\]\], labels \[1\]", output), output
    assert numbers("skipped_steps", output) == [1, 1, 1] and len(re.findall(": 600 samples", output)) == 3
    assert numbers("val_accuracy", output)[0] > 0.9


def tuned(output: str) -> None:
    rate, accuracy = numbers("lr", output)[0], numbers("val_accuracy", output)[0]
    assert rate == 0.03 and accuracy > 0.9, output
    (epochs,) = re.findall(r"epochs of all trials: \[(.+)\]", output)
    counts = [int(each) for each in epochs.split(",")]
    assert len(counts) == 6 and counts[-1] == 6 and counts[0] < 6, "bad trials were stopped early"


def text_classifier(output: str) -> None:
    losses = numbers("train_loss", output)
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, output
    assert numbers("val_f1", output)[-1] > 0.9 and numbers("val_mcc", output)[-1] > 0.85, output
    good, bad, bad_too = (float(value) for value in re.findall(r"(\d\.\d\d) good: ", output))
    assert good > 0.5 > bad and bad_too > 0.5, output


def spot_machines(output: str) -> None:
    assert re.findall(r"(\d+) samples in (\d+) steps", output) == [("9000", "300")] * 3, output
    assert "rank 1 will leave; seconds left: None\npreemption: 3 -> 3 workers, batches redone: 0\n" in output, output
    assert "the worker has left: True" in output


CHECKS: dict[str, tuple[Callable[[str], None], int]] = {
    "bad_batch": (bad_batch, 0),
    "kill_a_worker": (kill_a_worker, 1),
    "kill_under_transformers": (kill_under_transformers, 1),
    "old_script": (old_script, 1),
    "quickstart": (quickstart, 1),
    "spot_machines": (spot_machines, 1),
    "text_classifier": (text_classifier, 1),
    "tune": (tuned, 1),
}  # what is checked of each notebook, and how many pictures it has


def missing(name: str) -> list[str]:
    packages = {"text_classifier": {"transformers", "torchmetrics"}, "kill_under_transformers": {"transformers"}}
    return [
        package
        for package in sorted({"matplotlib", *packages.get(name, ())})
        if importlib.util.find_spec(package) is None
    ]


def run(background: Background, name: str) -> Any:
    if missing(name):
        return None
    folder, path = background.folder(), FOLDER / f"{name}.ipynb"
    tool = str(ROOT / "tools" / "execute_notebooks.py")
    connected = "ray.init(" not in code(read(path))  # the others start a cluster of their own
    done = background.run(tool, str(path), "--into", str(folder), connected=connected)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout}\n{done.stderr}"
    return read(folder / path.name)


def check(name: str, notebook: Any) -> None:
    right, count = CHECKS[name]
    right(printed(notebook))
    assert pictures(notebook) == count


@pytest.mark.slow
@pytest.mark.script(run=run)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if name in QUICK else pytest.mark.nightly) for name in NOTEBOOKS]
)
def test_notebook_runs(name: str, outcome: Callable[[], Any]) -> None:
    if missing(name):
        pytest.skip(f"without {', '.join(missing(name))}")
    check(name, outcome())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs(name: str) -> None:
    """They are right, complete and in order, and contain nothing of the machine that made them."""
    notebook = read(FOLDER / f"{name}.ipynb")
    check(name, notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "execute the notebook again"
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    machine = [str(ROOT), str(Path.home()), socket.gethostname(), "/tmp/", "/home/", "pid=", "0x", "127.0.0.1"]
    machine += [getpass.getuser() + "@", "\x1b["]
    assert [word for word in machine if word in printed(notebook)] == []


def test_every_notebook_is_checked_and_listed() -> None:
    assert set(CHECKS) == set(NOTEBOOKS)
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for name in NOTEBOOKS:
        assert f"(../examples/notebooks/{name}.ipynb)" in page and f"\nnotebooks/{name}\n" in page


def test_links_of_notebooks_lead_somewhere() -> None:
    for name in NOTEBOOKS:
        text = "\n".join(c.source for c in read(FOLDER / f"{name}.ipynb").cells if c.cell_type == "markdown")
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        assert links and all((FOLDER / link).is_file() for link in links), (name, links)


INTERRUPTED = """
import signal, time
import torch
from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback

class Talks(Callback):
    def on_progress(self, now):
        if now.kind == "train" and now.progress.batches:
            print("UNDERWAY", flush=True)

class Slow(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=torch.nn.MSELoss()
        )
        data = torch.utils.data.TensorDataset(torch.randn(400, 2), torch.randn(400, 1))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))

    def train_batch(self, batch, batch_info):
        time.sleep(0.05)
        return super().train_batch(batch, batch_info)

trainer = TorchTrainer(training_operator_cls=Slow, num_workers=2, use_tqdm=True, callbacks=[Talks()])
print(Slow.__module__, trainer.train(num_steps=2)["num_samples"])
"""


def interrupted(background: Background) -> list[str]:
    driver = background.folder() / "driver.py"
    driver.write_text(DRIVER, encoding="utf-8")
    done = background.run(str(driver), INTERRUPTED, connected=True, folder=driver.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# What a front end does: it sends cells, and "Interrupt the kernel" sends SIGINT while one runs.
DRIVER = f"""
import os, sys
os.environ |= {{"IPYTHONDIR": os.path.abspath("ipython"), "JUPYTER_RUNTIME_DIR": os.path.abspath("jupyter")}}
from jupyter_client.manager import start_new_kernel
kernel, client = start_new_kernel()

def cell(source, interrupts=False):
    outputs = []
    def hook(message):
        nonlocal interrupts
        outputs.append(message["content"])
        if interrupts and "UNDERWAY" in outputs[-1].get("text", ""):
            interrupts = False
            kernel.interrupt_kernel()
    reply = client.execute_interactive(source, output_hook=hook, timeout={LIMIT_S // 2})["content"]
    text = "".join(output.get("text", "") for output in outputs)
    print(reply["status"], reply.get("ename"), " ".join(text.split()), flush=True)

cell(sys.argv[1])
cell("trainer.train()", interrupts=True)
cell("rest = trainer.train(); print(rest['epoch'], trainer.history[-2]['kind'], len(trainer.recoveries))")
cell("print(rest['num_samples']); trainer.shutdown()")
client.stop_channels()
kernel.shutdown_kernel()
"""


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.script(run=interrupted)
def test_operators_of_cells_interrupts_and_progress_in_a_kernel(outcome: Callable[[], list[str]]) -> None:
    first, second, third, fourth = outcome()
    assert first.startswith("ok None") and "__main__ 8" in first, "two batches of two samples on two workers"
    assert "train: 2 batches" in first, "the progress bar, without ipywidgets, is a line for each call"
    assert second.startswith("error KeyboardInterrupt")
    assert third.startswith("ok None") and "1 train 0" in third, "the same epoch, and no worker was replaced"
    assert 0 < int(fourth.split()[2]) < 392, "it went on where it was interrupted"
