"""A script for RaySGD: it trains a compiled Keras model with creators. Only its imports have changed."""

import argparse
import os
import tempfile

import numpy as np
import tensorflow as tf

from raysgd.tf.tf_trainer import TFTrainer

NUM_TRAIN_SAMPLES, NUM_TEST_SAMPLES = 1000, 400


def create_config(batch_size):
    return {
        "batch_size": batch_size,
        "fit_config": {"steps_per_epoch": NUM_TRAIN_SAMPLES // batch_size},
        "evaluate_config": {"steps": NUM_TEST_SAMPLES // batch_size},
    }


def linear_dataset(a=2, size=1000):
    x = np.linspace(-1, 1, size).astype("float32")
    return x.reshape((-1, 1)), (a * x + 5).reshape((-1, 1))


def simple_dataset(config):
    train = tf.data.Dataset.from_tensor_slices(linear_dataset(size=NUM_TRAIN_SAMPLES))
    test = tf.data.Dataset.from_tensor_slices(linear_dataset(size=NUM_TEST_SAMPLES))
    train = train.shuffle(NUM_TRAIN_SAMPLES).repeat().batch(config["batch_size"])
    return train, test.repeat().batch(config["batch_size"])


def simple_model(config):
    model = tf.keras.models.Sequential([tf.keras.layers.Dense(10, input_shape=(1,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mean_squared_error", metrics=["mean_squared_error"])
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-replicas", "-n", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="no difference: it is small already")
    args = parser.parse_args()

    trainer = TFTrainer(
        model_creator=simple_model,
        data_creator=simple_dataset,
        num_replicas=args.num_replicas,
        use_gpu=False,
        verbose=False,
        config=create_config(batch_size=50),
    )
    for _ in range(3):
        stats = trainer.train()
        stats.update(trainer.validate())
        print("train_loss", round(stats["train_loss"], 5), "validation_loss", round(stats["validation_loss"], 5))
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.save(os.path.join(folder, "model.ckpt"))
        trainer.train()
        trainer.restore(path)
    print("restored", round(trainer.validate()["validation_loss"], 5))
    print("parameters", trainer.get_model().count_params())
    trainer.shutdown()


if __name__ == "__main__":
    main()
