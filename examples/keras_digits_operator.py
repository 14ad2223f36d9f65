"""The class API for TensorFlow: an operator says what is trained, and metrics of Keras are exact over all workers.

Then the trainer is saved, and another one, with another number of workers, continues from the file.

    python examples/keras_digits_operator.py --num-workers 2
"""

import argparse
import tempfile
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from raysgd.tf import TFTrainer, TrainingOperator


class Digits(TrainingOperator):
    """All that training needs: a model, an optimizer, a loss, metrics and data."""

    def setup(self, config):
        self.model, self.optimizer, self.criterion, self.metrics = self.register(
            models=keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(64, activation="relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(10),
                ]
            ),
            optimizers=keras.optimizers.SGD(config["lr"], momentum=0.9),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseTopKCategoricalAccuracy(k=3, name="top3")],
        )
        source = load_digits()
        data = tf.data.Dataset.from_tensor_slices((source.data.astype("float32") / 16, source.target))
        self.register_data(
            train_dataset=data.skip(360).shuffle(2000).batch(config["batch_size"]),
            validation_dataset=data.take(360).batch(config["batch_size"]),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    args = parser.parse_args()

    config = {"lr": 0.02, "batch_size": 64}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.ckpt"
        with TFTrainer(training_operator_cls=Digits, config=config, num_workers=args.num_workers) as trainer:
            for _ in range(2 if args.smoke else args.epochs):
                result = trainer.train()
                print(f"epoch {result['epoch']:.0f}  train_loss {result['train_loss']:.4f}", flush=True)
            trainer.save(path)
            print(f"saved:  val_loss {trainer.validate()['val_loss']:.4f}")
        with TFTrainer(training_operator_cls=Digits, config=config) as trainer:
            trainer.load(path)
            result = trainer.validate()
            print(f"loaded: val_loss {result['val_loss']:.4f}  val_accuracy {result['val_accuracy']:.3f}")
            print(f"among the first three: val_top3 {result['val_top3']:.3f}")


if __name__ == "__main__":
    main()
