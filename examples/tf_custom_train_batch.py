"""A batch of one's own in TensorFlow: two models, two losses, clipped gradients, one graph function.

An encoder and a decoder learn to compress digits to four numbers; a penalty keeps those numbers small. `self.step`
computes gradients, averages them over the workers and applies them. Where gradients are to be changed in between,
`self.gradients` and `self.apply_gradients` are its two halves.

    python examples/tf_custom_train_batch.py --num-workers 2
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from raysgd.tf import TFTrainer, TrainingOperator


class Compressor(TrainingOperator):
    """Two models, each with its optimizer."""

    def setup(self, config):
        relu = {"activation": "relu"}
        encoder = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, **relu), keras.layers.Dense(4)])
        decoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32, **relu), keras.layers.Dense(64)])
        (self.encoder, self.decoder), (self.for_encoder, self.for_decoder) = self.register(
            models=[encoder, decoder],
            optimizers=[keras.optimizers.Adam(config["lr"]), keras.optimizers.Adam(config["lr"])],
        )
        pixels = load_digits().data.astype("float32") / 16
        data = tf.data.Dataset.from_tensor_slices(pixels)
        self.register_data(
            train_dataset=data.skip(360).shuffle(2000).batch(64), validation_dataset=data.take(360).batch(64)
        )
        self.learn = tf.function(self._learn, reduce_retracing=True)

    def train_batch(self, batch, batch_info):
        loss, size = self.learn(batch)
        return {"train_loss": loss, "code_size": size, "num_samples": len(batch)}

    def validate_batch(self, batch, batch_info):
        error = tf.reduce_mean((self.decoder(self.encoder(batch)) - batch) ** 2)
        return {"val_loss": error, "num_samples": len(batch)}

    def _learn(self, pixels):
        with tf.GradientTape(persistent=True) as tape:
            code = self.encoder(pixels, training=True)
            error = tf.reduce_mean((self.decoder(code, training=True) - pixels) ** 2)
            size = tf.reduce_mean(code**2)
            penalized = error + 0.001 * size
        gradients, variables = self.gradients(tape, penalized, model=self.encoder, optimizer=self.for_encoder)
        clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.apply_gradients(clipped, variables, optimizer=self.for_encoder)
        self.step(tape, error, model=self.decoder, optimizer=self.for_decoder)
        return error, size


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    args = parser.parse_args()

    config = {"lr": 0.005}
    with TFTrainer(training_operator_cls=Compressor, config=config, num_workers=args.num_workers) as trainer:
        for _ in range(4 if args.smoke else args.epochs):
            result = trainer.train()
            print(
                f"epoch {result['epoch']:.0f}  train_loss {result['train_loss']:.4f}"
                f"  code_size {result['code_size']:.2f}",
                flush=True,
            )
        print(f"val_loss {trainer.validate()['val_loss']:.4f}")


if __name__ == "__main__":
    main()
