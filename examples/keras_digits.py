"""A compiled Keras model on several workers, in the way of RaySGD v1: a function for the model, one for the data.

The model knows its optimizer, loss and metrics; the data set's batch is that of all workers together.

    python examples/keras_digits.py --num-workers 2
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from raysgd.tf import TFTrainer


def model_creator(config):
    model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(config["lr"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data_creator(config):
    """Training and validation data; every fifth digit is held out."""
    source = load_digits()
    pixels, labels = source.data.astype("float32") / 16, source.target
    held_out = [number % 5 == 0 for number in range(len(labels))]
    kept = [not held for held in held_out]
    train = tf.data.Dataset.from_tensor_slices((pixels[kept], labels[kept]))
    test = tf.data.Dataset.from_tensor_slices((pixels[held_out], labels[held_out]))
    return train.shuffle(len(labels)).batch(config["batch_size"]), test.batch(config["batch_size"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--smoke", action="store_true", help="a short run")
    args = parser.parse_args()

    config = {"lr": args.lr, "batch_size": args.batch_size}
    with TFTrainer(model_creator, data_creator, config, num_replicas=args.num_workers) as trainer:
        for _ in range(3 if args.smoke else args.epochs):
            result = trainer.train()
            print(f"epoch {result['epoch']:.0f}  train_loss {result['train_loss']:.4f}", flush=True)
        print(f"validation_accuracy {trainer.validate()['validation_accuracy']:.3f}")
        model = trainer.get_model()
    print(f"parameters {model.count_params()}")


if __name__ == "__main__":
    main()
