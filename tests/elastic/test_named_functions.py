"""The script of a training function with a name is killed at random moments, and started again."""

from __future__ import annotations

import json
import random
import signal
import textwrap
from typing import Any

import pytest

from tests.background import Background
from tests.tiers import NIGHTLY

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys, threading, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from raysgd import train
    from raysgd.callbacks import Callback
    from raysgd.train import RunConfig, ScalingConfig, Trainer
    from raysgd.train.torch import TorchTrainer

    name, kind, seconds = json.loads(sys.argv[1])
    x = torch.linspace(-1, 1, 480).unsqueeze(1)

    def line():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        model = train.torch.prepare_model(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def step(model, optimizer, inputs):
        time.sleep(0.02)
        if seconds == "error":
            raise ValueError("a mistake")
        optimizer.zero_grad()
        loss = (model(inputs) - 2 * inputs - 5).square().mean()
        loss.backward()
        optimizer.step()

    def result(model, batches):
        return [model.module.weight.item(), model.module.bias.item(), batches]

    def commits(config):
        model, optimizer = line()
        loader = train.torch.elastic_data_loader(DataLoader(TensorDataset(x), batch_size=8))
        state = train.elastic({"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "batches": 0})
        while state["epoch"] < config["epochs"]:
            for (inputs,) in loader:
                step(model, optimizer, inputs)
                state["batches"] += 1
                state.commit()
            state["epoch"] += 1
            train.report(epoch=state["epoch"], batches=state["batches"])
        return result(model, state["batches"])

    def saves(config):
        model, optimizer = line()
        found = train.load_checkpoint() or {"batch": 0}
        if "model" in found:
            model.module.load_state_dict(found["model"])
        for batch in range(found["batch"], 30 * config["epochs"]):
            rank = 2 * (batch % 30) + train.world_rank()
            step(model, optimizer, x[8 * rank : 8 * rank + 8])
            if batch % 10 == 9:
                train.report(
                    {"epoch": batch // 30 + 1, "batches": batch + 1},
                    checkpoint=train.Checkpoint.from_dict({"batch": batch + 1, "model": model.module.state_dict()}),
                )
        return result(model, batch + 1)

    def before():
        train.report(epoch=0)
        return train.world_rank()

    def kill():
        if isinstance(seconds, float):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    class Kill(Callback):
        def on_start(self, run):
            kill()

    if kind == "fit":
        settings = RunConfig(name=name, storage_path=os.getcwd(), orphan_s=600, callbacks=[Kill()])
        trainer = TorchTrainer(
            saves, train_loop_config={"epochs": 3}, scaling_config=ScalingConfig(num_workers=2), run_config=settings
        )
        result = trainer.fit()
        lines = [json.loads(line)["metrics"] for line in open(os.path.join(result.path, "results.jsonl"))]
        rows = [(line["epoch"], line["training_iteration"], line["batches"]) for line in lines]
        assert [(row["epoch"], row["batches"]) for row in trainer.history] == [(row[0], row[2]) for row in rows]
        stored = sorted(each.name for each in result.log_dir.glob("checkpoint_*"))
        found = [[0, 1], result.return_values, rows, stored, str(result.metrics["done"]), len(os.listdir())]
        print(json.dumps([None, [], found]))
        sys.exit()

    trainer = Trainer("torch", num_workers=2, logdir=os.getcwd(), name=name, orphan_s=600)
    trainer.start()
    first = trainer.run(before)
    kill()
    values = trainer.run({"commits": commits, "saves": saves}[kind], config={"epochs": 3})
    rows = [(row["epoch"], row["step"], row.get("batches")) for row in trainer.history]
    stored = sorted(each.name for each in trainer.latest_checkpoint_dir.glob("checkpoint_*"))
    recoveries = [each.reason for each in trainer.recoveries]
    trainer.shutdown()
    print(json.dumps([trainer.attached, recoveries, [first, values, rows, stored, trainer.latest_run_dir.name]]))
    """
)


def ended_three_times(background: Background, kind: str, seed: int) -> list[Any]:
    """Run the script undisturbed, and with another name, in which it is killed, ends by an error, and is killed again. Return
    what both found in the end."""
    draw, folder, found = random.Random(seed), background.folder(), []
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    ends = [draw.uniform(0.0, 0.8), "error", draw.uniform(0.0, 0.6), None]
    for place, given in (("undisturbed", [None]), ("disturbed", ends)):
        (folder / place).mkdir()
        for end in given:
            arguments = json.dumps([f"{place}-{kind}-{seed}", kind, end])
            done = background.run("../script.py", arguments, connected=True, folder=folder / place)
            assert done.returncode == {None: 0, "error": 1}.get(end, -signal.SIGKILL), done.stderr  # type: ignore[call-overload]
            attached = "attached to the 2 workers of the trainer 'disturbed" in done.stderr
            if (kind, end) == ("fit", "error"):  # workers on which the function had not begun have ended
                attached |= "have ended: starting new ones" in done.stderr
            assert attached == (place == "disturbed" and end != ends[0]), done.stderr
            assert end != "error" or ("a mistake" in done.stderr and "keep its state for 600 s" in done.stderr)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


@pytest.mark.more
@pytest.mark.parametrize("seed", range(5 if NIGHTLY else 1))
@pytest.mark.parametrize("kind", ["commits", "saves", "fit"])
@pytest.mark.script(run=ended_three_times)
def test_a_function_continues_and_reports_what_an_undisturbed_one_does(outcome: Any, kind: str, seed: int) -> None:
    (attached, recoveries, expected), (again, takeovers, found) = outcome()
    print(f"undisturbed: {expected}")
    assert not attached and recoveries == []
    assert kind == "fit" or (again and set(takeovers) == {"takeover"})
    assert found[0] == expected[0] == [0, 1] and found[2:] == expected[2:]
    for rank in (0, 1):
        assert found[1][rank] == pytest.approx(expected[1][rank], abs=1e-6)
