"""Workers on one node see each other's GPUs. Ray assigns logical GPUs, so no device is needed."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
from dataclasses import dataclass

import ray

from raysgd import ElasticConfig, train
from raysgd.train import Backend, BackendConfig, Trainer


class Sharing(Backend):
    share_cuda_visible_devices = True


class SharingConfig(BackendConfig):
    backend_cls = Sharing


def visible():
    return os.environ["CUDA_VISIBLE_DEVICES"]


ray.init(address="local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
for config in (SharingConfig(), BackendConfig()):
    with Trainer(config, num_workers=2, use_gpu=True, elastic=ElasticConfig(grow=False)) as trainer:
        print(sorted(trainer.run(visible)), sorted(trainer.worker_group.workers[0].metadata.gpu_ids))
"""


@pytest.mark.nightly
def test_share_cuda_visible_devices() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    shared, own = done.stdout.splitlines()[-2:]
    assert shared in ("['0,1', '0,1'] ['0', '1']", "['1,0', '1,0'] ['0', '1']")
    assert own.startswith("['0', '1']"), "without the flag, each worker sees its own GPU"
