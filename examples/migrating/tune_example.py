"""A script for RaySGD: two searches with Ray Tune on a machine with two CPUs. Its imports have changed; and Ray's Tune has, whose
`tune.run` prints other lines than it did."""

import argparse

import numpy as np
import ray
import tensorflow as tf
import torch
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.tf import TFTrainable
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE


class Line(TrainingOperator):
    def setup(self, config):
        x = torch.linspace(-1, 1, 400).unsqueeze(1)
        data = TensorDataset(x, 2 * x + 5)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        loader = DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        self.register_data(train_loader=loader, validation_loader=loader)


def model_creator(config):
    model = tf.keras.models.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.SGD(config["lr"]), loss="mean_squared_error")
    return model


def data_creator(config):
    x = np.linspace(-1, 1, 400).astype("float32").reshape((-1, 1))
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x + 5)).batch(config["batch_size"])
    return data, data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="no difference: it is small already")
    parser.parse_args()
    ray.init(num_cpus=2)

    trainable = TorchTrainer.as_trainable(
        training_operator_cls=Line, num_workers=2, use_gpu=False, use_local=True, config={BATCH_SIZE: 20}
    )
    space = {"lr": tune.grid_search([1e-4, 0.1])}
    analysis = tune.run(
        trainable, config=space, stop={"training_iteration": 2}, metric="val_loss", mode="min", verbose=0
    )
    print("torch: best lr", analysis.get_best_config(metric="val_loss", mode="min")["lr"])

    analysis = tune.run(
        TFTrainable,
        config={
            "model_creator": model_creator,
            "data_creator": data_creator,
            "num_replicas": 2,
            "trainer_config": {"batch_size": 20, "lr": 0.1},
        },
        stop={"training_iteration": 2},
        verbose=0,
    )
    (trial,) = analysis.trials
    print("tf:", trial.status, "validation_loss", round(trial.last_result["validation_loss"], 4))
    ray.shutdown()


if __name__ == "__main__":
    main()
