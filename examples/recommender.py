"""A recommender: embeddings of users and items, and the probability that a user clicks on an item.

The clicks are generated. With real data, only `train_data`, `validation_data`, `cardinalities` and `numbers` change.

    python examples/recommender.py --num-workers 2
"""

import argparse

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.recommender import RecommenderOperator


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    config = {"cardinalities": (200, 100), "numbers": 3, BATCH_SIZE: 256}
    with TorchTrainer(
        training_operator_cls=RecommenderOperator, num_workers=args.num_workers, config=config
    ) as trainer:
        for _ in range(4 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}  val_loss {val['val_loss']:.4f}"
                f"  val_auc {val['val_auc']:.3f}  val_average_precision {val['val_average_precision']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
