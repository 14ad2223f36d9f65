"""`TorchTrainer(parts=...)`: one worker computes the parts of several, and what cannot be divided is refused."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from raysgd import ConfigError, ElasticConfig, TrainingOptions
from raysgd.torch import TorchTrainer
from tests.torch.small import Line, Numbers, Recording, weights


class Sizes(Line):
    """Keeps how many rows each part has, and which one it is."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[tuple[int, int]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((batch_info["part"], len(batch[0])))
        return super().train_batch(batch, batch_info)


class Direct(Line):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        return {"num_samples": len(batch[0])}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


def trainer_of(operator: Any = Line, *, parts: int, **given: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=operator, **{"parts": parts, "use_gpu": False, "use_ray": False, "seed": 1, **given}
    )


def test_one_worker_computes_the_parts_of_a_batch_one_after_another() -> None:
    # Ten rows: two batches of four, and one of two rows, which repeats parts.
    config = {"rows": 10, "batch": 4}
    with trainer_of(Sizes, parts=4, config=config) as run, trainer_of(Sizes, parts=1, config=config) as whole:
        results = [each.train() for each in (run, whole)]
        seen = run.get_local_operator().seen
        assert seen == [(part, 1) for _ in range(3) for part in range(4)]
        assert [each["batch_count"] for each in results] == [3, 3]
        assert [each["num_samples"] for each in results] == [10, 10]
        assert results[0]["train_loss"] == pytest.approx(results[1]["train_loss"])
        assert torch.allclose(weights(run), weights(whole), rtol=1e-6)
        assert run.batch_mode == "parts"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer than workers": (
        {"parts": 1, "num_workers": 2},
        "parts must be a whole number of at least 2, got 1",
    ),
    "as many as workers": (
        {"num_workers": 4, "elastic": ElasticConfig(shares="speed")},
        "shares='speed' deals the parts of a batch.*TorchTrainer\\(parts=16",
    ),
    "sharded": (
        {"num_workers": 2, "elastic": ElasticConfig(shares="speed"), "options": TrainingOptions(parallel="fsdp")},
        "shares='speed' and parallel='fsdp' cannot be combined",
    ),
    "SyncBatchNorm": (
        {"num_workers": 2, "elastic": ElasticConfig(shares="speed"), "options": TrainingOptions(sync_batchnorm=True)},
        "shares='speed' and sync_batchnorm=True cannot be combined",
    ),
    "Horovod": (
        {"num_workers": 2, "elastic": ElasticConfig(shares="speed"), "backend": "horovod"},
        "shares='speed' cannot be combined with backend='horovod'",
    ),
    "per worker": (
        {"elastic": ElasticConfig(batch="per_worker")},
        "parts=4 cannot be combined with batch='per_worker'",
    ),
}
REFUSED_LATER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no division": (Line, {"config": {"batch": 6}}, "parts=4 does not divide the 6 rows.* pass one of 1, 2, 3, 6, or"),
    "a batch sampler": (
        Recording,
        {
            "config": {
                "loader": lambda: DataLoader(
                    Numbers(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, False)
                )
            }
        },
        "this loader has a batch sampler",
    ),
    "a stream": (Recording, {"config": {"loader": lambda: DataLoader(Stream(), batch_size=4)}}, "leave parts out"),
    "its own steps": (Direct, {}, "parts=4 needs .*but train_batch calls optimizer.step\\(\\) itself"),
    "an option": (Line, {"options": TrainingOptions(parallel=None)}, "parts=4 .* the operator averages the gradients"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.horovod if name == "Horovod" else ()) for name in REFUSED]
)
def test_arguments_that_exclude_parts_are_refused(name: str) -> None:
    given, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says):
        trainer_of(**{"parts": 4, "use_ray": None, **given})


@pytest.mark.parametrize("shares", ["fast", [3, 1], 2])
def test_shares_that_are_none_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="shares must be 'equal' or 'speed', got"):
        ElasticConfig(shares=shares)


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_what_cannot_be_divided_is_refused_before_a_step(name: str) -> None:
    operator, given, says = REFUSED_LATER[name]
    with trainer_of(operator, parts=4, **given) as run:
        before = weights(run).clone()
        with pytest.raises(ConfigError, match=says):
            run.train()
        assert name == "its own steps" or torch.equal(weights(run), before)
