"""Migrating from RaySGD v1, after: the same script, with `ray.util.sgd` replaced by `raysgd`.

Compare: diff examples/migrate_v1_before.py examples/migrate_v1_after.py
"""

import argparse

import ray
import torch

from raysgd import TorchTrainer
from raysgd.torch import TrainingOperator
from raysgd.utils import BATCH_SIZE, AverageMeterCollection, override


class LineOperator(TrainingOperator):
    @override(TrainingOperator)
    def setup(self, config):
        model = torch.nn.Linear(1, config.get("hidden_size", 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=scheduler,
        )

        x = torch.linspace(-1, 1, 400).unsqueeze(1)
        train_set = torch.utils.data.TensorDataset(x, 2 * x + 5)
        val_set = torch.utils.data.TensorDataset(x[::4], 2 * x[::4] + 5)
        self.register_data(
            train_loader=torch.utils.data.DataLoader(train_set, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=torch.utils.data.DataLoader(val_set, batch_size=config[BATCH_SIZE]),
        )

    @override(TrainingOperator)
    def validate(self, val_iterator, info):
        meter = AverageMeterCollection()
        self.model.eval()
        with torch.no_grad():
            for features, target in val_iterator:
                output = self.model(features)
                loss = self.criterion(output, target)
                worst = (output - target).abs().max()
                meter.update({"val_loss": loss.item(), "worst": worst.item()}, n=target.size(0))
        return meter.summary()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()

    ray.init(num_cpus=args.num_workers)
    trainer = TorchTrainer(
        training_operator_cls=LineOperator,
        num_workers=args.num_workers,
        use_gpu=False,
        config={"lr": 0.1, BATCH_SIZE: 40},
        backend="gloo",
        scheduler_step_freq="epoch",
    )
    for epoch in range(2 if args.smoke else 5):
        stats = trainer.train(info={"epoch_idx": epoch})
        print(f"epoch {epoch}  train_loss {stats['train_loss']:.4f}  last {stats['last_train_loss']:.4f}")
    print(trainer.validate())
    model = trainer.get_model()
    print(f"slope {model.weight.item():.3f}  intercept {model.bias.item():.3f}")
    trainer.shutdown()
    print("success!")


if __name__ == "__main__":
    main()
