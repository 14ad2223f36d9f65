"""raysgd: a trainer, which starts Ray, one epoch, shut down; and once more, in the same script."""

import time

from contenders import BenchmarkOperator
from workloads import WORKLOADS, Setting

from raysgd import TorchTrainer

print(f"imported {time.time()}", flush=True)
config = {"setting": Setting(WORKLOADS["tiny"].shortened(50), 2)}
with TorchTrainer(training_operator_cls=BenchmarkOperator, num_workers=2, config=config) as trainer:
    print(f"connected {time.time()}", flush=True)
    trainer.train()
    print("first epoch done", flush=True)
began = time.time()
with TorchTrainer(training_operator_cls=BenchmarkOperator, num_workers=2, config=config) as trainer:
    trainer.train(num_steps=1)
    print(f"second {time.time() - began}", flush=True)
