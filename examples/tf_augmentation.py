"""A small augmentation pipeline: images are shifted, and noise is added, in tf.data, before they are dealt out.

Each worker runs the pipeline, with its own cores, and takes its rows of every batch. Where a pipeline is heavy
and the data lie in many files, --by-file gives every worker files of its own instead, so that none is read twice.

    python examples/tf_augmentation.py --num-workers 2 --by-file
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from raysgd.tf import TFTrainer

FILES = 8


def write_files(folder):
    """The digits, as a data set of several files would hold them."""
    source = load_digits()
    table = np.concatenate([source.target[:, None], source.data], axis=1).astype("float32")
    for number in range(FILES):
        rows = table[360:][number::FILES]
        (Path(folder) / f"part-{number}.bin").write_bytes(rows.tobytes())
    (Path(folder) / "test.bin").write_bytes(table[:360].tobytes())


def parse(record):
    numbers = tf.io.decode_raw(record, tf.float32)
    return tf.reshape(numbers[1:], [8, 8, 1]) / 16, tf.cast(numbers[0], tf.int64)


def augment(image, label):
    """Moves the digit by up to one pixel in each direction, and adds a little noise."""
    moved = tf.image.random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 1])
    return moved + tf.random.normal([8, 8, 1], stddev=0.05), label


def data_creator(config):
    folder, size = config["folder"], 65 * 4
    files = sorted(str(path) for path in Path(folder).glob("part-*.bin"))
    train = tf.data.FixedLengthRecordDataset(files, size).map(parse).shuffle(2000)
    train = train.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(config["batch_size"])
    options = tf.data.Options()
    policies = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies.FILE if config["by_file"] else policies.DATA
    test = tf.data.FixedLengthRecordDataset([str(Path(folder) / "test.bin")], size).map(parse)
    return train.with_options(options), test.batch(config["batch_size"])


def model_creator(config):
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.003), loss=loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--by-file", action="store_true", help="every worker reads files of its own")
    parser.add_argument("--smoke", action="store_true", help="a short run")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        write_files(folder)
        config = {"folder": folder, "batch_size": 64, "by_file": args.by_file}
        with TFTrainer(model_creator, data_creator, config, num_replicas=args.num_workers) as trainer:
            for _ in range(3 if args.smoke else args.epochs):
                result = trainer.train()
                print(
                    f"epoch {result['epoch']:.0f}  train_loss {result['train_loss']:.4f}"
                    f"  samples {result['num_samples']}",
                    flush=True,
                )
            print(f"validation_accuracy {trainer.validate()['validation_accuracy']:.3f}")


if __name__ == "__main__":
    main()
