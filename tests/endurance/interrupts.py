"""Press Ctrl-C at random moments of one trainer's calls, and use the trainer after each: `python interrupts.py FOLDER COUNT SEED`.

Prints one line for each moment, and says at the end how many were hit, how many samples were not trained on exactly once, and what
was not possible afterwards.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ray

from raysgd import CheckpointError, ElasticConfig, TrainingFailedError
from tests.faults import Ground

SAMPLES = 160
# The least duration of each action, on an idle machine.
LASTS_S = {"train": 0.4, "validate": 0.08, "save": 0.04, "background": 0.05, "load": 0.12, "state": 0.03, "grow": 3.0}
LASTS_S |= {"shrink": 0.05, "recover": 0.3, "apply": 0.01}


class CtrlC:
    """Sends SIGINT to this process after some time, if the action has not ended by then."""

    def __init__(self) -> None:
        self.armed, self.hit = False, False
        signal.signal(signal.SIGINT, self._pressed)

    def _pressed(self, *_: object) -> None:
        if self.armed:
            self.armed, self.hit = False, True
            raise KeyboardInterrupt

    def within(self, after_s: float, action: Callable[[], object]) -> bool:
        """Run the action, and return whether it was interrupted."""
        timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
        self.hit = False
        try:
            self.armed = True
            timer.start()
            action()
            self.armed = False
        except KeyboardInterrupt:
            return True
        finally:
            self.armed = False
            timer.cancel()
            timer.join()
        return False


def actions(ground: Ground, path: Path) -> dict[str, Callable[[], object]]:
    trainer = ground.trainer

    def recover() -> None:
        os.kill(trainer.apply_all_workers(os.getpid)[-1], signal.SIGKILL)
        trainer.train(num_steps=3)

    return {
        "train": trainer.train,
        "validate": trainer.validate,
        "save": lambda: trainer.save(path),
        "background": lambda: trainer.save(path, blocking=False).result(timeout=30),
        "load": lambda: trainer.load(path),
        "state": trainer.state_dict,
        "grow": lambda: trainer.resize(3),
        "shrink": lambda: trainer.resize(2),
        "recover": recover,
        "apply": lambda: trainer.apply_all_workers(os.getpid),
    }


def usable(ground: Ground) -> bool:
    """Train to the end of an epoch. Return whether the weights contain each sample of all epochs equally often."""
    while True:
        ground.trainer.train()
        records = ground.trainer.apply_all_operators(lambda operator: list(operator.ledger))
        counted = Counter(records[0])
        if len(records[0]) % SAMPLES == 0:
            break
    return all(each == records[0] for each in records) and len(set(counted.values())) == 1 and len(counted) == SAMPLES


def main(folder: Path, count: int, seed: int) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    chance, ctrl_c = random.Random(seed), CtrlC()
    elastic = ElasticConfig(batch="per_worker")  # it grows
    ground = Ground(folder / "marks", num_workers=2, config={"samples": SAMPLES, "pace": 0.01}, elastic=elastic)
    hits, wrong, failures = 0, 0, []
    names = list(LASTS_S)
    for number in range(count):
        name = names[number % len(names)]
        after_s = chance.uniform(0, LASTS_S[name])
        began = time.monotonic()
        try:
            ground.trainer.save(folder / "checkpoint.pt")  # `load` then loads the state that the trainer already has
            hit = ctrl_c.within(after_s, actions(ground, folder / "checkpoint.pt")[name])
            try:
                exact = usable(ground)
            except CheckpointError:  # all ranks were interrupted while they changed their states
                assert name == "load"
                ground.trainer.load(folder / "checkpoint.pt")
                exact = usable(ground)
        except (Exception, KeyboardInterrupt) as error:
            failures.append(f"{name} {after_s:.3f}: {type(error).__name__}: {error}")
            print(traceback.format_exc(), flush=True)
            if not isinstance(error, TrainingFailedError):
                break
            continue
        hits, wrong = hits + hit, wrong + (not exact)
        row = f"{number} {name} {after_s:.3f} hit={hit} exact={exact} workers={ground.trainer.world_size}"
        print(row, f"{time.monotonic() - began:.1f} s", flush=True)
    ground.trainer.shutdown()
    left = sorted(path.name for path in folder.iterdir() if path.name not in ("marks", "checkpoint.pt"))
    print("FACTS", json.dumps({"hits": hits, "wrong": wrong, "failures": failures, "left": left}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
