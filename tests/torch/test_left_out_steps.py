"""Steps with gradients that are not finite are made on no rank."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raysgd import ConfigError, NonFiniteError, TrainingOptions
from tests.local.runs import train
from tests.torch.small import Line, inline, operator_of, set_scale, weights
from tests.torch.test_exact_gradients import Curve, close, options

MOST_LEFT_OUT = 50  # in a row
pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle", "ignore:Detected call of")


def spoiling(kind: type[Curve], bad: set[int], rank: int, *, leaves_out: bool) -> type[Curve]:
    """Return a class whose gradients are not finite in some steps on one rank; with `leaves_out`, one that does nothing in
    these steps on any rank."""

    class Spoiled(kind):  # type: ignore[misc, valid-type]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["global_step"] not in bad:
                return super().train_batch(batch, batch_info)
            if leaves_out:
                return {"num_samples": len(batch[0])}
            if self.world_rank % self.world_size == rank % self.world_size:
                batch = [batch[0] * math.nan, batch[1]]
            return super().train_batch(batch, batch_info)

    return Spoiled


@settings(max_examples=8, deadline=None)
@given(
    st.integers(4, 40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sets(st.integers(0, 5), max_size=4),
    st.sampled_from([{}, {"clip_norm": 0.05}, {"clip_value": 0.01}]),
    st.booleans(),
)
def test_the_weights_are_those_of_a_run_without_these_batches(
    rows: int, batch: int, workers: int, bad: set[int], more: dict[str, Any], adam: bool
) -> None:
    config = {"rows": rows, "batch": batch, "adam": adam}
    steps = -(-rows // (batch * workers))
    skipped: list[Any] = []
    mine = train(
        spoiling(Curve, bad, 0, leaves_out=False),  # what a later rank repeats in a short step contributes nothing
        config,
        [(None, workers)],
        options=options(on_nonfinite="skip", **more),
        look=lambda trainer, results: skipped.extend(each.get("skipped_steps", 0) for each in results),
    )
    close(mine, train(spoiling(Curve, bad, 0, leaves_out=True), config, [(None, workers)], options=options(**more)))
    assert skipped == [len([step for step in bad if step < steps])] * workers


def test_in_parts_and_windows_the_whole_step_is_left_out() -> None:
    config = {"rows": 24, "batch": 2}
    parts: dict[str, Any] = {"options": options(on_nonfinite="skip"), "batch": "auto"}
    windows: dict[str, Any] = {"options": options(accumulate=2, on_nonfinite="skip")}
    rows: list[Any] = [(parts, 1, {1}, {1}), (windows, 3, {2}, {2, 3})]
    for more, ranks, bad, expected in rows:
        given = {**more, "num_workers": 3, "scheduler_step_freq": "epoch"}
        mine = train(spoiling(Curve, bad, 0, leaves_out=False), config, [(None, ranks)], **given)
        close(mine, train(spoiling(Curve, expected, 0, leaves_out=True), config, [(None, ranks)], **given))


class Bad(Line):
    """Its loss is NaN in the batches that the config names, or from one on."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        if batch_info["global_step"] in self.config["bad"]:
            loss = loss * self.config.get("factor", math.nan)
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"num_samples": len(x), "train_loss": loss.detach()}


def test_too_many_in_a_row_are_an_error_and_the_count_is_state(tmp_path: Any) -> None:
    config = {"bad": range(3, 1000), "rows": 4}
    with inline(Bad, options=TrainingOptions(on_nonfinite="skip"), config=config) as trainer:
        assert trainer.train(num_steps=30)["skipped_steps"] == 27
        before = weights(trainer)
        trainer.save(tmp_path / "state.pt")
    with inline(Bad, options=TrainingOptions(on_nonfinite="skip"), config=config) as trainer:
        trainer.load(tmp_path / "state.pt")
        with pytest.raises(NonFiniteError, match=rf"weight, bias is not finite in step 53.*{MOST_LEFT_OUT - 1} such"):
            trainer.train(num_steps=100)
        assert torch.equal(before, weights(trainer))
        operator_of(trainer).config["bad"] = ()
        assert "skipped_steps" not in trainer.train(num_steps=2)
        operator_of(trainer).config["bad"] = range(1000)
        assert trainer.train(num_steps=MOST_LEFT_OUT - 1)["skipped_steps"] == MOST_LEFT_OUT - 1


def test_an_error_names_parameter_step_rank_and_samples() -> None:
    with inline(Bad, options=TrainingOptions(on_nonfinite="raise", clip_norm=1.0), config={"bad": [1]}) as trainer:
        before = trainer.train(num_steps=1)["num_samples"], weights(trainer)
        with pytest.raises(
            NonFiniteError, match=r"weight, bias .* step 2, epoch 1.* Rank 0 .* 4, 5, 6, 7, and the loss nan"
        ):
            trainer.train()
        assert before[0] == 4 and torch.equal(before[1], weights(trainer))
        operator_of(trainer).config["bad"] = ()
        assert trainer.train()["num_samples"] == 8, "the batch is used again"


@pytest.mark.parametrize("more", [{}, {"on_nonfinite": "skip"}])
def test_fp16_leaves_out_such_steps_and_goes_on_with_a_smaller_scale(more: Any, tmp_path: Path) -> None:
    config = {"bad": [1, 4, 5], "factor": math.inf}
    with inline(Bad, options=TrainingOptions(precision="fp16", **more), config=config) as trainer:
        scaler = set_scale(trainer, 64.0)
        assert trainer.train()["skipped_steps"] == 1
        assert scaler.get_scale() == 32.0
        before = weights(trainer)
        assert trainer.train(num_steps=1).get("skipped_steps") is None
        assert not torch.equal(before, weights(trainer))
        before = weights(trainer)
        assert trainer.train(num_steps=2)["skipped_steps"] == 2
        assert torch.equal(before, weights(trainer))
        assert scaler.get_scale() == 8.0
        assert "skipped_steps" not in trainer.train() and "skipped_steps" not in trainer.validate()
        trainer.save(tmp_path / "saved.pt")
    with inline(Bad, options=TrainingOptions(precision="fp16", **more), config={"bad": ()}) as trainer:
        trainer.load(tmp_path / "saved.pt")
        assert operator_of(trainer)._amp_scaler.get_scale() == 8.0


def test_a_window_with_one_bad_batch_is_one_skipped_step() -> None:
    options = TrainingOptions(precision="fp16", accumulate=3, clip_norm=1.0)
    with inline(Bad, options=options, config={"bad": [1]}) as trainer:
        before = weights(trainer)
        assert trainer.train()["skipped_steps"] == 1
        assert torch.equal(before, weights(trainer))
        trainer.train()
        assert not torch.equal(before, weights(trainer))


def test_bf16_leaves_out_nothing() -> None:
    with inline(Bad, options=TrainingOptions(precision="bf16"), config={"bad": [0]}) as trainer:
        assert "skipped_steps" not in trainer.train()


def test_schedulers_created_later_and_closures() -> None:
    class Later(Bad):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if not hasattr(self, "own"):
                self.own = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            result = super().train_batch(batch, batch_info)
            self.own.step()
            return result

    with inline(Later, options=TrainingOptions(on_nonfinite="skip"), config={"bad": [0], "lr": 1.0}) as trainer:
        assert trainer.train()["skipped_steps"] == 1
        assert operator_of(trainer).optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)

    class Closure(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.optimizer.step(lambda: 0.0)
            return {}

    with (
        inline(Closure, options=TrainingOptions(on_nonfinite="skip")) as trainer,
        pytest.raises(ConfigError, match="passes a closure"),
    ):
        trainer.train()


def test_what_cannot_be_combined_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"on_nonfinite": "ignore"},
        {"on_nonfinite": "raise", "precision": "fp16"},
        {"on_nonfinite": "skip", "precision": "apex"},
        {"on_nonfinite": "skip", "comm_hook": "powersgd"},
    ]
    for each in wrong:
        with pytest.raises(ConfigError, match="on_nonfinite"):
            TrainingOptions(**each)


def test_unwrapped_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel=None"):
        inline(Bad, num_workers=2, options=TrainingOptions(parallel=None, on_nonfinite="skip"))


def test_sparse_gradients_and_several_optimizers() -> None:
    class Words(Line):
        def setup(self, config: dict[str, Any]) -> None:
            torch.manual_seed(0)
            first, second = nn.Embedding(12, 2, sparse=True), nn.Linear(2, 1)
            self.models, self.optimizers, self.criterion = self.register(
                models=[first, second],
                optimizers=[torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)],
                criterion=nn.MSELoss(),
            )
            self.register_data(**self.loaders(config))

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            x, y = batch
            found = self.models[0]((x[:, 0] * 10).long())
            factor = math.nan if batch_info["global_step"] == 1 else 1.0
            loss = self.criterion(self.models[1](found), y) + (found * factor).sum()
            self.zero_grad()
            self.backward(loss)
            for optimizer in self.optimizers:
                self.step(optimizer)
            return {}

    with inline(Words, options=TrainingOptions(on_nonfinite="skip")) as trainer:
        assert trainer.train()["skipped_steps"] == 1
        assert all(bool(each.isfinite().all()) for model in trainer.get_model() for each in model.parameters())


class AfterTheStep(Line):
    """Makes a step of its own in `on_step`, whose gradients are not finite."""

    def on_step(self, info: dict[str, Any]) -> None:
        self.zero_grad()
        self.backward(self.model(torch.full((1, 2), torch.inf)).sum())
        self.step()


def test_a_step_that_is_made_outside_of_a_loops_step_counts_too() -> None:
    with inline(AfterTheStep, options=TrainingOptions(on_nonfinite="skip"), config={"batch": 2}) as trainer:
        assert trainer.train()["skipped_steps"] == 6
