"""A compiled Keras convnet learns the direction of stripes in generated images; a callback halves its learning rate.

    python examples/programs/keras_convnet.py --workers 2

The same program by hand, and the comparison of both, are tests/programs/test_keras_convnet.py.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

from raysgd.tf import TFTrainer


def images(count, seed):
    """Return noisy pictures of stripes in one of four directions, and the number of the direction."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(4, size=count)
    angles, (row, column) = labels[:, None, None] * np.pi / 4, np.indices((12, 12))
    waves = np.sin(np.cos(angles) * row + np.sin(angles) * column + draw.uniform(0, 6, (count, 1, 1)))
    return (waves + draw.normal(0, 1, waves.shape))[..., None].astype("float32"), labels


def data_creator(config):
    keras.utils.set_random_seed(0)
    train, validation = (tf.data.Dataset.from_tensor_slices(images(config["rows"], seed=seed)) for seed in (1, 2))
    return train.shuffle(config["rows"], seed=0).batch(config["batch"]), validation.batch(config["batch"])


def model_creator(config):
    keras.utils.set_random_seed(0)
    convolutions = [keras.layers.Conv2D(filters, 3, activation="relu") for filters in (8, 16)]
    head = [keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((12, 12, 1)), *convolutions, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def main(argv=None):
    """Return the figures of each epoch, and the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, size in {"workers": 1, "epochs": 5, "rows": 1000, "batch": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    halving = keras.callbacks.LearningRateScheduler(lambda epoch: 0.004 / 2**epoch)
    config, figures = {"rows": args.rows, "batch": args.batch, "fit_config": {"callbacks": [halving]}}, []
    with TFTrainer(model_creator, data_creator, config, num_replicas=args.workers) as trainer:
        for epoch in trainer.epochs(args.epochs):
            result = {**trainer.train(), **trainer.validate()}
            rates = trainer.apply_all_operators(lambda operator: float(operator.optimizer.learning_rate))
            names = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
            figures.append({**{name: result[name] for name in names}, "learning_rate": rates[0]})
            print(f"epoch {epoch}", *(f" {name} {value:.6f}" for name, value in figures[-1].items()), flush=True)
        return figures, trainer.get_model()


if __name__ == "__main__":
    main()
