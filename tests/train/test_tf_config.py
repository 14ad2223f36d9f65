"""TF_CONFIG on real workers. This does not need TensorFlow."""

import json
import os
from pathlib import Path

import pytest

from raysgd.train import TensorflowConfig, Trainer


class Unchecked(TensorflowConfig):
    def check(self) -> None:
        """Accept that TensorFlow is not installed."""


def test_each_worker_has_its_own_index_in_one_cluster(ray_cluster: None, tmp_path: Path) -> None:
    trainer = Trainer(Unchecked(), num_workers=2, logdir=tmp_path)
    with trainer:
        configs = [json.loads(text) for text in trainer.run(lambda: os.environ["TF_CONFIG"])]
    assert configs[0]["cluster"]["worker"] == configs[1]["cluster"]["worker"]
    assert len(set(configs[0]["cluster"]["worker"])) == 2
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(2)]


@pytest.mark.more
@pytest.mark.elastic
def test_after_a_failure_new_processes_form_the_cluster(ray_cluster: None, tmp_path: Path) -> None:
    def function() -> tuple[int, int]:
        mark = tmp_path / "killed"
        if not mark.exists() and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            mark.touch()
            os._exit(1)
        if not mark.exists():
            import time

            time.sleep(60)
        return os.getpid(), len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])

    trainer = Trainer(Unchecked(), num_workers=2, logdir=tmp_path)
    with trainer:
        before = trainer.worker_group.execute(os.getpid)
        results = trainer.run(function)
    assert {size for _, size in results} == {len(results)}
    assert not {pid for pid, _ in results} & set(before), "TensorFlow cannot meet twice in one process"
