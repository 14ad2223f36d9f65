"""A training script that does everything in rounds, and says what it does next: `python driver.py FOLDER [catch]`.

A test ends it with a signal at some moment. With `catch` it handles a Ctrl-C itself, and then uses the trainer once more.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray

ROUNDS = 2


def say(*words: object) -> None:
    print(*words, flush=True)


def main() -> None:
    folder, catches = Path(sys.argv[1]), sys.argv[2:] == ["catch"]
    say("PHASE ray")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    say("PHASE start")
    import torch

    from raysgd import ElasticConfig
    from tests.faults import Ground, LedgerOperator

    class Heavy(LedgerOperator):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "ballast": torch.zeros(12_000_000)}

    config = {"samples": 240, "pace": 0.01, "loader": {"num_workers": 1}}
    elastic = ElasticConfig(batch="per_worker")  # it grows
    ground = Ground(folder / "marks", num_workers=2, config=config, operator=Heavy, elastic=elastic)
    with ground.trainer as trainer:
        try:
            for number in range(ROUNDS):
                one_round(trainer, folder / "checkpoint.pt", number)
        except KeyboardInterrupt:
            if not catches:
                raise
            say("CAUGHT")
            try:
                trainer.train()
                say("USABLE")
            except Exception as error:
                say("UNUSABLE", type(error).__name__, error)
        say("PHASE shutdown")
    say("DONE")


def one_round(trainer: Any, path: Path, number: int) -> None:
    say("PHASE train")
    trainer.train()
    say("PHASE validate")
    trainer.validate()
    say("PHASE save")
    trainer.save(path)
    say("PHASE background")
    saved = trainer.save(path, blocking=False)
    trainer.train(num_steps=2)
    saved.result(timeout=60)
    say("SAVED")
    say("PHASE growth" if number == 0 else "PHASE recovery")
    if number == 0:
        trainer.resize(3)
    else:
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        trainer.train(num_steps=4)
        trainer.resize(2)


if __name__ == "__main__":
    main()
