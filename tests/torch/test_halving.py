"""With `on_oom="halve"`, a worker that runs out of memory repeats the step in smaller pieces, with the same gradients."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import ConfigError, TrainingFailedError, TrainingOptions
from raysgd.data import ShardedStream
from raysgd.torch.memory import is_out_of_memory
from tests.torch.small import Numbers, operator_of, weights
from tests.torch.small import inline as bare_inline
from tests.torch.test_constant_batch import Clips
from tests.torch.test_exact_gradients import Curve, Direct, Sampled, close

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
ROWS, BATCH = 50, 16
HALVE = TrainingOptions(on_oom="halve")


def inline(kind: Any, **given: Any) -> Any:
    return bare_inline(kind, **{"scheduler_step_freq": "batch", **given})


def limited(kind: type[Curve], error: type[Exception] = torch.OutOfMemoryError) -> type[Curve]:
    """Return a class that runs out of memory in the forward or backward pass of a batch with more rows than config["fits"],
    from the step config["from"] on, and notes the sizes of the others."""

    class Limited(kind):  # type: ignore[misc, valid-type]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            size, config = len(batch[0]), self.config
            grows = batch_info["global_step"] >= config.get("from", 0) and size > config["fits"]
            if grows and config.get("where") == "forward":
                raise error("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
            if grows:
                self._parts.models[0][0].weight.register_hook(self.fail)
            self.sizes = [*getattr(self, "sizes", []), size]
            return super().train_batch(batch, batch_info)

        def fail(self, gradient: torch.Tensor) -> None:
            for number in list(self._parts.models[0][0].weight._backward_hooks):
                del self._parts.models[0][0].weight._backward_hooks[number]
            self.sizes.pop()
            raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    return Limited


def run(
    kind: type[Curve], options: TrainingOptions, freq: str = "batch", **config: Any
) -> tuple[torch.Tensor, dict[str, Any], Any]:
    given = {"rows": ROWS, "batch": BATCH, "fits": BATCH, **config}
    with inline(kind, config=given, options=options, scheduler_step_freq=freq) as trainer:
        results = [trainer.train(max_retries=0) for _ in range(2)]
        return weights(trainer), results[0], (getattr(operator_of(trainer), "sizes", []), trainer.recoveries)


@pytest.mark.parametrize("kind", [Curve, Direct])
@pytest.mark.parametrize(
    ("error", "where"),
    [(torch.OutOfMemoryError, "forward"), (RuntimeError, "backward"), (MemoryError, "backward")],
)
def test_the_weights_are_those_of_an_undisturbed_run(
    kind: type[Curve], error: type[Exception], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, theirs, _ = run(kind, TrainingOptions(clip_norm=0.5))
    options = TrainingOptions(on_oom="halve", clip_norm=0.5)
    with caplog.at_level(logging.WARNING, "raysgd"):
        mine, result, (sizes, recoveries) = run(limited(kind, error), options, fits=5, where=where, **{"from": 1})
    close(mine, expected)
    assert sizes == [16, *[4] * 8, 2, *([4] * 12), 2][: len(sizes)] and max(sizes[1:]) <= 5
    assert [each.reason for each in recoveries] == ["out of memory"] * 2
    assert (result["num_samples"], result["batch_count"]) == (theirs["num_samples"], theirs["batch_count"]) == (ROWS, 4)
    if kind is Curve or "train_loss" in result:
        assert result["train_loss"] == pytest.approx(theirs["train_loss"])
    lines = [each.getMessage() for each in caplog.records if "more than" in each.getMessage()]
    assert len(lines) == 2 and "no worker processes more than 8 samples at once (16 before)" in lines[0]
    assert "\n" not in lines[0]


def test_with_accumulation() -> None:
    expected, _, _ = run(Curve, TrainingOptions(accumulate=2), "epoch")
    options = TrainingOptions(on_oom="halve", accumulate=2)
    mine, result, (sizes, _) = run(limited(Curve), options, "epoch", fits=5, **{"from": 1})
    close(mine, expected)
    assert result["num_samples"] == ROWS and sizes[:4] == [16, 8, 8, 4]


def test_the_size_is_state_and_ends_at_one_sample(tmp_path: Any) -> None:
    config = {"rows": ROWS, "batch": BATCH, "fits": 4}
    with inline(limited(Curve), config=config, options=HALVE) as trainer:
        trainer.train(num_steps=1)
        trainer.save(tmp_path / "state.pt")
    with inline(limited(Curve), config=config, options=HALVE) as trainer:
        trainer.load(tmp_path / "state.pt")
        trainer.train(num_steps=1)
        assert operator_of(trainer).sizes == [4] * 4 and not trainer.recoveries
        operator_of(trainer).config["fits"] = 0
        with pytest.raises(TrainingFailedError, match=r"one sample at once: .*Use a smaller model"):
            trainer.train()
        assert len(trainer.recoveries) == 2
        operator_of(trainer).config["fits"] = 1
        assert trainer.train()["num_samples"] == ROWS - 2 * BATCH
    with inline(limited(Curve), config=config) as trainer, pytest.raises(torch.OutOfMemoryError):
        trainer.train()


class Normalized(Curve):
    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.MSELoss()
        )
        x = torch.ones(config["rows"], 3).double()
        data = torch.utils.data.TensorDataset(x, x[:, :1])
        self.register_data(train_loader=DataLoader(data, batch_size=config["batch"]))


def test_statistics_of_the_interrupted_attempt_do_not_count() -> None:
    config = {"rows": 32, "batch": 16, "fits": 8, "from": 1}
    with inline(limited(Normalized), config=config, options=HALVE) as trainer:
        trainer.train()
        layer = trainer.get_model()[1]
        assert layer.num_batches_tracked == 1 + 2, "one batch, and two pieces"


def test_memory_that_runs_out_in_the_step_of_the_only_worker_is_an_error() -> None:
    class InStep(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["global_step"] == 1 and not hasattr(self, "failed"):
                self.failed = self.optimizer.register_step_pre_hook(self.fail)
            return super().train_batch(batch, batch_info)

        def fail(self, *_: Any) -> None:
            self.failed.remove()
            raise torch.OutOfMemoryError("CUDA out of memory")

    with inline(InStep, config={"rows": ROWS, "batch": BATCH}, options=HALVE) as trainer:
        with pytest.raises(TrainingFailedError, match="changed a part of the weights"):
            trainer.train()
        with pytest.raises(TrainingFailedError, match="Load the newest checkpoint"):
            trainer.train()


def test_errors_that_are_not_about_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError()) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("not enough values")) and not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    "given", [{"parallel": "fsdp"}, {"gradients": "ranks"}, {"precision": "apex"}, {"ddp_args": {"static_graph": True}}]
)
def test_options_that_cannot_be_combined(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="on_oom='halve'"):
        TrainingOptions(on_oom="halve", **given)


def test_other_values_and_unwrapped_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_oom must be 'halve' or 'raise'"):
        TrainingOptions(on_oom="half")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"on_oom='halve' .* parallel=None"):
        inline(Curve, num_workers=2, options=TrainingOptions(on_oom="halve", parallel=None))


def stream() -> Any:
    return ShardedStream(lambda shard: iter(range(8)), num_shards=2, batch_size=4)


@pytest.mark.parametrize(
    "loader",
    [lambda: [torch.ones(4)], stream, lambda: DataLoader(Numbers(8), batch_size=None)],
    ids=["iterable", "stream", "items"],
)
def test_data_that_cannot_be_divided_is_refused(loader: Any) -> None:
    class Other(Curve):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.register_data(train_loader=loader())

    config = {"rows": 4, "batch": 2}
    with (
        inline(Other, config=config, options=HALVE) as trainer,
        pytest.raises(ConfigError, match="on_oom='halve' divides"),
    ):
        trainer.train()


def test_code_that_cannot_run_in_pieces_is_refused_in_the_first_batch() -> None:
    for kind, found in ((Clips, "clip with TrainingOptions"), (Sampled, "batch sampler")):
        with (
            inline(kind, config={"rows": 20, "batch": 4}, options=HALVE) as trainer,
            pytest.raises(ConfigError, match=found),
        ):
            trainer.train()
