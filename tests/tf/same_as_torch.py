"""Two workers of a TFTrainer fail at moments that a TorchTrainer survives. The script prints the results as JSON."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from raysgd.tf import TFTrainer, TrainingOperator


class Counting(TrainingOperator):
    """Validates on the numbers 0 to 49, ten at a time. Once, the process of rank 1 is killed in the third batch."""

    def setup(self, config: dict[str, Any]) -> None:
        import keras

        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=keras.optimizers.SGD(0.0001), criterion=keras.losses.MeanSquaredError()
        )
        numbers = tf.data.Dataset.range(50).map(lambda n: (tf.reshape(tf.cast(n, tf.float32), (1,)),) * 2)
        self.register_data(train_dataset=numbers.batch(10), validation_dataset=numbers.batch(10))
        self.validated = 0

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.validated += 1
        mark = Path(self.config["marks"], "killed")
        if self.validated == 3 and self.world_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"val_mean": float(tf.reduce_mean(batch[0])), "num_samples": len(batch[0])}


def main() -> None:
    with tempfile.TemporaryDirectory() as marks:
        config = {"marks": marks}
        with TFTrainer(training_operator_cls=Counting, config=config, num_workers=2) as trainer:
            facts = {"validated": [trainer.validate(num_steps=2)["val_mean"] for _ in range(2)]}
            trainer.train()
            path = trainer.save(Path(marks, "a.ckpt"))
            saved = trainer.state_dict()["models"]
            trainer.train()
            trained = trainer.state_dict()["models"]
            processes = trainer.apply_all_workers(os.getpid)
            trainer.load(path)
            for process in processes:
                os.kill(process, signal.SIGKILL)
            after = trainer.state_dict()["models"]
            facts |= {"kernels": [float(models[0][0][0][0]) for models in (saved, trained, after)]}
            facts |= {"recoveries": [recovery.reason for recovery in trainer.recoveries]}
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
