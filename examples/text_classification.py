"""Text classification as in GLUE: accuracy, F1 and Matthews' correlation over all workers.

Nothing is downloaded: the texts are generated, and the model is made from a configuration. For a pretrained model, set
`model` and `tokenizer` to its name, and a smaller `lr`.

    python examples/text_classification.py --num-workers 2
"""

import argparse

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE
from raysgd.operators.text_classification import TextClassificationOperator, opinions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()
    epochs = 4 if args.smoke else args.epochs

    rows = opinions(1200)
    config = {
        "train_data": rows[200:],
        "validation_data": rows[:200],
        "epochs": epochs,
        BATCH_SIZE: 32,
    }
    with TorchTrainer(
        training_operator_cls=TextClassificationOperator,
        num_workers=args.num_workers,
        config=config,
        scheduler_step_freq="batch",
    ) as trainer:
        for _ in range(epochs):
            train, val = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:.0f}  train_loss {train['train_loss']:.4f}"
                f"  val_accuracy {val['val_accuracy']:.3f}  val_f1 {val['val_f1']:.3f}  val_mcc {val['val_mcc']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
