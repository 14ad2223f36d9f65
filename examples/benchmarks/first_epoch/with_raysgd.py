"""raysgd: a trainer, one epoch, shut down."""

import ray
from contenders import BenchmarkOperator
from workloads import WORKLOADS, Setting

from raysgd import TorchTrainer

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
config = {"setting": Setting(WORKLOADS["tiny"].shortened(50), 2)}
with TorchTrainer(training_operator_cls=BenchmarkOperator, num_workers=2, config=config) as trainer:
    trainer.train()
    print("first epoch done", flush=True)
