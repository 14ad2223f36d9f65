"""Save, stop, and continue later, with another number of workers.

A file holds all that training needs: models, optimizers, schedulers, counters and the operator's own state.
It does not remember how many workers wrote it: here two do, and one continues.

    python examples/save_and_resume.py --num-workers 4
"""

import argparse
import tempfile
from pathlib import Path

from raysgd import TorchTrainer
from raysgd.operators.image_classification import ImageClassificationOperator


class CountingOperator(ImageClassificationOperator):
    """Adds state of its own to what is saved: here, how many times it was loaded."""

    times_loaded = 0

    def state_dict(self):
        return {"times_loaded": self.times_loaded}

    def load_state_dict(self, state):
        self.times_loaded = state["times_loaded"]


def train(trainer, epochs):
    for _ in range(epochs):
        result = trainer.train()
        print(f"epoch {result['epoch']:.0f}  train_loss {result['train_loss']:.4f}", flush=True)
    result = trainer.validate()
    return f"val_loss {result['val_loss']:.6f}  val_accuracy {result['val_accuracy']:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2, help="before the stop; then there is one")
    parser.add_argument("--epochs", type=int, default=6, help="epochs in all; half before the stop")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()
    half = 1 if args.smoke else args.epochs // 2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.pt"
        with TorchTrainer(training_operator_cls=CountingOperator, num_workers=args.num_workers) as trainer:
            print(f"{args.num_workers} workers")
            print("saved    ", train(trainer, half))
            trainer.apply_all_operators(lambda operator: setattr(operator, "times_loaded", 1))
            trainer.save(path)
        print(f"{path.name} has {path.stat().st_size} bytes")

        with TorchTrainer(training_operator_cls=CountingOperator, num_workers=1) as trainer:
            print("1 worker")
            trainer.load(path)
            print("loaded   ", train(trainer, 0))
            print("state    ", trainer.apply_all_operators(CountingOperator.state_dict)[0])
            print("finished ", train(trainer, half))


if __name__ == "__main__":
    main()
