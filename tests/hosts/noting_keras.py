"""An operator for TensorFlow that notes its samples. It is apart from `driver.py`, because importing TensorFlow takes seconds."""

import keras
import numpy as np
import tensorflow as tf

from raysgd.tf import TrainingOperator

ROWS = 400


class NotingKeras(TrainingOperator):
    """Notes its samples."""

    def setup(self, config):
        keras.utils.set_random_seed(3)
        self.model, self.optimizer, self.criterion = self.register(
            models=keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]),
            optimizers=keras.optimizers.SGD(0.01),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        features = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
        features[:, 0] = np.arange(ROWS) / ROWS
        data = tf.data.Dataset.from_tensor_slices((features, (features[:, 1] > 0).astype("int64")))
        self.register_data(train_dataset=data.shuffle(ROWS).batch(8))
        self.noted = []

    def train_batch(self, batch, batch_info):
        if self._counts:
            self.noted += np.rint(batch[0][:, 0] * ROWS).astype(int).tolist()
        return super().train_batch(batch, batch_info)
