"""Metrics of any size and type reach the driver with the call's result, and never break the control channel."""

from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train
from raysgd.torch import TorchTrainer
from raysgd.train import Trainer
from tests.torch.small import Line

pytestmark = pytest.mark.elastic

LONG = 20 << 20


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def metrics_of(kind: str) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "long": {"note": "x" * LONG},
        "many": {f"metric-{number}": float(number) for number in range(20_000)},
        "many-long": {f"{number}-" + "n" * 5000: "x" * 5000 for number in range(2000)},
        "nested": {"note": nested(90)},
        "large-number": {"note": 2**900},
    }
    return kinds[kind]


class Measuring(Line):
    """Reports such metrics in every batch, and a plain one."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.step()
        return {"num_samples": len(batch[0]), "plain": 3.0, **metrics_of(self.config["kind"])}


def test_metrics_of_an_operator(ray_cluster: None) -> None:
    config = {"kind": "none", "rows": 48}
    elastic = ElasticConfig(snapshot_every=1)
    with TorchTrainer(training_operator_cls=Measuring, num_workers=2, config=config, elastic=elastic) as trainer:
        for kind in ("long", "many", "many-long", "nested"):
            trainer.apply_all_operators(lambda operator, kind=kind: operator.config.update(kind=kind))
            result = trainer.train()
            assert not trainer.recoveries, "no worker failed"
            assert result["plain"] == 3.0 and result["num_samples"] == 48
            assert {name: result[name] for name in metrics_of(kind)} == metrics_of(kind)


def reporting(config: dict[str, Any]) -> int:
    train.report(**metrics_of(config["kind"]), plain=3.0)
    train.save_checkpoint(**metrics_of(config["kind"]))
    return train.world_rank()


def test_metrics_of_a_function(ray_cluster: None, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Keeping(train.TrainingCallback):
        def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
            seen.extend(results)

    made = Trainer("none", num_workers=2, logdir=tmp_path)
    with made as trainer:
        for kind in ("long", "many", "nested", "large-number"):
            seen.clear()
            assert trainer.run(reporting, {"kind": kind}, callbacks=[Keeping()]) == [0, 1]
            assert len(seen) == 2
            assert all(row["plain"] == 3.0 for row in seen)
            assert all(row[name] == value for row in seen for name, value in metrics_of(kind).items())
