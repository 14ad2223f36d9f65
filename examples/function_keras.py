"""A Keras model in a training function: save, load, resume, with TensorFlow's own strategy on all workers.

With several workers, a strategy cannot run `fit` of Keras 3, so the function has a loop of its own. The first run trains
a few epochs; the second one continues from its checkpoint.

    python examples/function_keras.py --num-workers 2
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

from raysgd import train
from raysgd.train import Trainer


def points(size=512):
    """Noisy points on y = 2 x - 3."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(size, 1)).astype("float32")
    return x, 2 * x - 3 + 0.1 * generator.normal(size=(size, 1)).astype("float32")


def train_func(config):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(config["lr"])
        optimizer.build(model.trainable_variables)
    start = 0
    checkpoint = train.load_checkpoint()
    if checkpoint is not None:
        model.set_weights(checkpoint["weights"])
        start = checkpoint["epoch"] + 1
    # The batch size is that of all workers together.
    size = 32 * train.world_size()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(points()).batch(size))

    def part(x, y):
        """Train on this worker's part of a batch; the optimizer sums the gradients of all workers."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / size
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(part, batch), axis=None)

    for epoch in range(start, config["epochs"]):
        losses = [float(step(batch)) for batch in data]
        train.save_checkpoint(epoch=epoch, weights=model.get_weights())
        train.report(epoch=epoch, train_loss=float(np.mean(losses)))
    slope, intercept = (float(np.squeeze(weight)) for weight in model.get_weights())
    return slope, intercept


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="it is quick as it is")
    args = parser.parse_args()

    with Trainer(backend="tensorflow", num_workers=args.num_workers) as trainer:
        for epochs in (3, 8):
            rounds = trainer.run_iterator(
                train_func, config={"lr": 0.05, "epochs": epochs}, checkpoint=trainer.latest_checkpoint
            )
            for rows in rounds:
                print(f"epoch {rows[0]['epoch']}  train_loss {rows[0]['train_loss']:.4f}", flush=True)
            print("the checkpoint is of epoch", trainer.latest_checkpoint["epoch"], flush=True)
    slope, intercept = rounds.get_final_results()[0]
    print(f"learned    y = {slope:.2f} x {intercept:+.2f}")


if __name__ == "__main__":
    main()
