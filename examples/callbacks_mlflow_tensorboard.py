"""Logs a training to MLflow and TensorBoard, and reads back what was written. Needs raysgd[mlflow,tensorboard]."""

import argparse
import os
import tempfile

import torch
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import MLflowCallback, TensorBoardCallback


class Parabola(TrainingOperator):
    """A small net learns y = x * x."""

    def setup(self, config):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 512).reshape(-1, 1)
        model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.MSELoss(),
        )
        self.register_data(train_loader=DataLoader(TensorDataset(x, x * x), batch_size=32, shuffle=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="3 epochs instead of 20")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logdir", default=None, help="where to write; by default a temporary directory")
    options = parser.parse_args()
    logdir = os.path.abspath(options.logdir or tempfile.mkdtemp())
    store = f"sqlite:///{logdir}/mlflow.db"

    mlflow = MLflowCallback(store, experiment_name="parabola", tags={"from": "an example"})
    with TorchTrainer(
        training_operator_cls=Parabola,
        num_workers=options.workers,
        config={"lr": 0.01},
        callbacks=[mlflow, TensorBoardCallback()],
        logdir=logdir,
    ) as trainer:
        for _ in range(3 if options.smoke else 20):
            trainer.train()
    print(trainer.history)

    print("MLflow has")
    client = MlflowClient(store)
    run = client.get_run(mlflow.run_id)
    print(f"  status {run.info.status}, lr {run.data.params['lr']}")
    for point in client.get_metric_history(mlflow.run_id, "train_loss"):
        print(f"  step {point.step}  train_loss {point.value:.4f}")

    print("TensorBoard has")
    events = EventAccumulator(logdir)
    events.Reload()
    for event in events.Scalars("train/train_loss"):
        print(f"  step {event.step}  train_loss {event.value:.4f}")
    print(f"look at them: tensorboard --logdir {logdir}, or mlflow ui --backend-store-uri {store}")


if __name__ == "__main__":
    main()
