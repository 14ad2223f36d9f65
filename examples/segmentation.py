"""Semantic segmentation: a small SegFormer finds discs and bars in noisy images, and IoU is counted over all workers.

Nothing is downloaded: the images are generated. With real data, only `train_data`, `validation_data`, `classes` and
`channels` change.

    python examples/segmentation.py --num-workers 2
"""

import argparse
from functools import partial

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.segmentation import SegmentationOperator, Shapes

NAMES = ("background", "disc", "bar")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    config = {
        "train_data": partial(Shapes, 512, seed=1),
        "validation_data": partial(Shapes, 128, seed=2),
        BATCH_SIZE: 16,
    }
    with TorchTrainer(
        training_operator_cls=SegmentationOperator, num_workers=args.num_workers, config=config
    ) as trainer:
        for _ in range(4 if args.smoke else args.epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_mean_iou {val['val_mean_iou']:.3f}",
                *(f" {name} {val[f'val_iou_{label}']:.3f}" for label, name in enumerate(NAMES)),
                flush=True,
            )


if __name__ == "__main__":
    main()
