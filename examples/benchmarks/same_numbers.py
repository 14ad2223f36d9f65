"""The figures of five programs: by hand, with raysgd, with three workers killed, and with the script killed and started again.

    python examples/benchmarks/same_numbers.py --only gpt resnet

The programs are those of examples/programs, with small sizes, on two workers. By hand, they are loops with
DistributedDataParallel (that of the GPT is started by torchrun), or Keras' `fit` in one process. The seconds
of an epoch by hand and with raysgd are from the last step of one epoch to that of the next, so a validation is in them.
"""

import argparse
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
from report import claim_stdout, emit, spread

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from tests.forked_workers import ForkServer  # noqa: E402
from tests.programs.killing import Kills, Program, flat, note_steps, steps, with_hook  # noqa: E402

COLUMNS = ("program", "figure", "by_hand", "raysgd", "three_kills", "started_again")
COLUMNS += ("by_hand_s", "raysgd_s", "lines", "lines_by_hand")
FIGURES = {
    "gpt": "val_loss",
    "resnet": "val_loss",
    "dcgan": "d_loss",
    "text_classifier": "val_loss",
    "keras_convnet": "validation_loss",
}
SIZES = {"gpt": {"windows": 288, "validated": 256}}  # so that the loss falls in the whole run
# In an epoch, between a training and what follows it, and in a validation. That of a DCGAN is another epoch.
KILLS = (("step", 1), ("between", 1), ("validation", 1))


def row(name: str, epochs: int) -> dict[str, Any]:
    """Run one program in the four ways."""
    found, times = {}, {}
    for way in ("by_hand", "raysgd", "three_kills", "started_again"):
        with tempfile.TemporaryDirectory() as folder:
            print(f"--- {name}, {way}", file=sys.stderr, flush=True)
            found[way] = run(way, Program(name, Path(folder), epochs=epochs, **SIZES.get(name, {})))
            if way in ("by_hand", "raysgd"):
                times[way] = steps(Path(folder))
    figure, (_, original) = FIGURES[name], found["by_hand"]
    curves = {way: [each[figure] for each in history if figure in each] for way, (history, _) in found.items()}
    shown: dict[str, Any] = {"by_hand": f"{curves['by_hand'][-1]:.7f}"}
    for way in ("raysgd", "three_kills", "started_again"):
        shown[way] = f"{curves[way][-1]:.7f}, {distance(found[way][1], original)}"
    per_epoch, rest = divmod(len(times["by_hand"]), epochs)
    if rest:
        raise RuntimeError(f"{name}: {len(times['by_hand'])} steps in {epochs} epochs")
    shown |= {f"{way}_s": spread(seconds(times[way], per_epoch, epochs)) for way in times}
    kills = [number * epochs // 4 for number in (1, 2, 3)]
    return {"program": name, "figure": figure, **shown, **lines(name), "killed_in": kills, "curves": curves}


def seconds(times: Sequence[float], per_epoch: int, epochs: int) -> list[float]:
    """Return how long each epoch but the first took: from the last step of one to the last step of the next."""
    ends = times[::-per_epoch][:epochs]
    return [later - earlier for later, earlier in pairwise(ends)]


def run(way: str, program: Program) -> Any:
    noting = partial(note_steps, program.folder, "keras" if program.trainer == "TFTrainer" else "torch")
    if way == "by_hand" and program.name == "keras_convnet":
        from keras.callbacks import CallbackList

        test = import_module("tests.programs.test_keras_convnet")
        restored = patch.multiple(CallbackList, on_train_batch_end=CallbackList.on_train_batch_end)
        with restored, patch.multiple(test, EPOCHS=program.given["epochs"]):
            noting()
            figures, weights = test.by_fit()
        return figures, [weights]
    if way == "by_hand":
        return program.run_under_torchrun() if program.name == "gpt" else program.run_by_hand(noting)
    if way == "raysgd":
        return program.run(trainer=with_hook(getattr(program.module, program.trainer), noting))
    epochs = program.given["epochs"]
    if way == "started_again":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        return program.run_killed(environment, after=epochs // 2)
    points = [("step", rank) if program.name == "dcgan" and at == "validation" else (at, rank) for at, rank in KILLS]
    kills = Kills(program.folder, {number * epochs // 4: point for number, point in enumerate(points, 1)})
    results = program.run_with(kills)
    if len(kills.killed) != len(points) or kills.world_size != program.given["workers"]:
        raise RuntimeError(f"{program.name}: {len(kills.killed)} workers were killed, {kills.world_size} are left")
    return results


def distance(weights: Sequence[Any], others: Sequence[Any]) -> str:
    """Say by how much any weight differs. Counters, such as BatchNorm's number of batches, are not weights."""
    pairs = list(zip(flat(weights), flat(others), strict=True))
    if all(np.array_equal(one, other) for one, other in pairs):
        return "same bits"
    return f"{max(float(np.abs(one - other).max()) for one, other in pairs if one.dtype.kind == 'f'):.0e}"


def lines(name: str) -> Mapping[str, int]:
    """Count the lines of the program that are not blank, and of the same program by hand: models and data as in it, and the loop
    instead of the operator and `main`."""
    program, test = import_module(f"examples.programs.{name}"), import_module(f"tests.programs.test_{name}")
    whole = counted(inspect.getsource(program))
    loop = next(vars(test)[each] for each in ("Loop", "by_fit", "loop") if each in vars(test))
    own = [each for each in vars(program).values() if getattr(each, "__module__", "") == program.__name__]
    replaced = [each for each in own if hasattr(each, "train_epoch") or each.__name__ in REPLACED]
    return {
        "lines": whole,
        "lines_by_hand": whole - sum(map(counted, map(inspect.getsource, replaced))) + counted(inspect.getsource(loop)),
    }


REPLACED = ("main", "model_creator", "data_creator")


def counted(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*FIGURES], default=[*FIGURES])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="only the ResNet, four epochs")
    args = parser.parse_args()
    if args.smoke:
        args.only, args.epochs = ["resnet"], 4
    out = claim_stdout()
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAYSGD_FORK_WORKERS": "0"}  # of all workers
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = ForkServer(Path(folder))  # of workers that have imported torch, as in the tests
        with server.used_by_ray():
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        for name in args.only:
            with server.having("tensorflow") if name == "keras_convnet" else nullcontext():
                rows.append(row(name, args.epochs))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        ray.shutdown()
        server.close()
    emit(out, "same_numbers", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
