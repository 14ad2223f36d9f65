"""The script of a trainer with a name is killed, and started again: its workers continue."""

from __future__ import annotations

import json
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.background import Background

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from raysgd.callbacks import Callback
    from raysgd.torch import TorchTrainer, TrainingOperator

    class Line(TrainingOperator):
        def setup(self, config):
            x = torch.linspace(-1, 1, 480).unsqueeze(1)
            model = nn.Linear(1, 1)
            nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            registered = self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
            self.model, self.optimizer, self.criterion = registered
            data = TensorDataset(x, 2 * x + 5)
            self.register_data(
                train_loader=DataLoader(data, batch_size=8, shuffle=False),
                validation_loader=DataLoader(data, batch_size=8),
            )

    class Killer(Callback):
        def on_progress(self, now):
            if now.kind == sys.argv[2] and now.progress.step >= int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = TorchTrainer(
        training_operator_cls=Line, num_workers=2, use_gpu=False, name=sys.argv[1], orphan_s=120, callbacks=[Killer()]
    )
    for epoch in trainer.epochs(3):
        trainer.train()
        trainer.validate()
    model = trainer.get_model()
    rows = [(row["kind"], row["epoch"], row["step"], row["num_samples"]) for row in trainer.history]
    recoveries = [(each.reason, each.batches_redone) for each in trainer.recoveries]
    trainer.shutdown()
    print(json.dumps([trainer.attached, model.weight.item(), model.bias.item(), rows, recoveries]))
    """
)


def undisturbed() -> tuple[float, float]:
    x = torch.linspace(-1, 1, 480).unsqueeze(1)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in list(x.split(16)) * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), 2 * batch + 5).backward()
        optimizer.step()
    return model.weight.item(), model.bias.item()


def run(background: Background, kind: str, step: int) -> list[Any]:
    """Run the script, which kills itself in a call of this kind, and run it again."""
    folder: Path = background.folder()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    ended = background.run("script.py", f"line-{kind}", kind, str(step), connected=True, folder=folder)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    again = background.run("script.py", f"line-{kind}", "never", "0", connected=True, folder=folder)
    assert again.returncode == 0, again.stderr
    place = re.search(r"attached to the 2 workers of the trainer .*, in epoch 2 after batch (\d+)", again.stderr)
    assert place and 15 <= int(place[1]) <= 30, again.stderr
    found: list[Any] = json.loads(again.stdout.splitlines()[-1])
    return found


@pytest.mark.more
@pytest.mark.parametrize(("kind", "step"), [("train", 45), ("validate", 60)])
@pytest.mark.script(run=run)
def test_a_script_that_is_killed_continues_in_the_same_batch(outcome: Any, kind: str, step: int) -> None:
    attached, *weights, rows, recoveries = outcome()
    assert attached and weights == pytest.approx(undisturbed(), abs=1e-6)
    assert rows == [[kind, epoch, 30 * epoch, 480] for epoch in (1, 2, 3) for kind in ("train", "validate")]
    assert recoveries == [["takeover", 0]]
