"""A small CLIP that learns which caption belongs to which image, with the samples of all workers as negatives.

Nothing is downloaded: images and captions are generated, and the model is made from a configuration. The batch size is
global, so each number of workers has the same negatives.

    python examples/contrastive.py --num-workers 2
"""

import argparse

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.contrastive import ContrastiveOperator


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    with TorchTrainer(
        training_operator_cls=ContrastiveOperator, num_workers=args.num_workers, config={BATCH_SIZE: 32}
    ) as trainer:
        for _ in range(10 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_text_recall_at_1 {val['val_text_recall_at_1']:.3f}"
                f"  val_text_recall_at_5 {val['val_text_recall_at_5']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
