"""With a count, a step's gradient is the mean over all that its losses are means over, on any number of workers."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from raysgd import ConfigError, TorchTrainer
from raysgd.torch import TrainingOperator
from raysgd.torch.step.weights import labels_counted
from tests.local.group import Cluster
from tests.local.runs import train
from tests.torch.counted import IGNORED, Counting, Default, Weighted, by_hand, data_of, entered, model_of
from tests.torch.test_exact_gradients import options

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")

ROWS = 23


def check(
    operator: type[TrainingOperator],
    size: int,
    schedule: list[tuple[int | None, int]],
    *,
    rows: int = ROWS,
    accumulate: int = 1,
    clip_norm: float | None = None,
    weight: Any = None,
    full: int = 0,
    **more: Any,
) -> None:
    """Compare an epoch with one that was written by hand."""
    workers = more.get("num_workers") or schedule[0][1]
    found: list[torch.Tensor] = []

    def look(trainer: Any, _: Any) -> None:
        found[:] = trainer.apply_all_operators(entered) if issubclass(operator, Counting) else []

    given = options(accumulate=accumulate, clip_norm=clip_norm)
    freq = "epoch" if accumulate > 1 else "batch"
    mine = train(
        operator, {"rows": rows, "batch": size}, schedule, options=given, scheduler_step_freq=freq, look=look, **more
    )
    theirs, weights = by_hand(rows, size * workers * accumulate, clip=clip_norm, weight=weight, full=full)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for each in found:
        torch.testing.assert_close(each, weights, rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 0.05]), st.integers(1, 3))
@example(3, 2, 0.05, 1)
@example(2, 2, None, 2)
def test_ragged_tokens(workers: int, batch: int, clip_norm: float | None, accumulate: int) -> None:
    if workers * batch * accumulate in (1, 2, 4):
        return  # a step without a token, which is 0/0 by hand
    check(Counting, batch, [(None, workers)], accumulate=accumulate, clip_norm=clip_norm)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 0.05]))
@example(3, 2, None)
def test_parts_of_missing_workers(fewer: int, batch: int, clip_norm: float | None) -> None:
    check(Counting, batch + 1, [(1, 4), (None, fewer)], clip_norm=clip_norm, batch="auto")


@pytest.mark.parametrize("kind", [Default, Weighted])
@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_default_methods_count_what_the_criterion_counts(kind: Any, workers: int, accumulate: int) -> None:
    check(kind, 3, [(None, workers)], weight=kind.weight, accumulate=accumulate)


class Full(Default):
    full = ROWS


class Late(Default):
    full = 14


def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each tensor that ranks add."""
    made: list[int] = []
    original = Cluster._reduce

    def reduce(self: Cluster, tensor: torch.Tensor, *given: Any) -> None:
        made.append(tensor.numel())
        original(self, tensor, *given)

    monkeypatch.setattr(Cluster, "_reduce", reduce)
    return made


def test_where_nothing_is_ignored_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sums(monkeypatch)
    check(Full, 3, [(None, 2)], full=ROWS)
    assert made == [4, 4], "both ranks agree once that counts are not needed"


def test_counts_travel_from_the_first_batch_on_that_ignores_something(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sums(monkeypatch)
    check(Late, 3, [(None, 2)], full=14)
    assert made == [4, 4] * 2 + [1, 1] * 2, "the batches are 6, 6, 6 and 5 rows"


def test_the_gradient_scaler() -> None:
    class Half(Counting):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._amp_scaler.load_state_dict({**self._amp_scaler.state_dict(), "scale": 64.0})

        def counted(self, kept: torch.Tensor) -> Any:
            assert self.use_fp16_native
            return kept.sum()

    for accumulate, workers in ((1, 2), (2, 3)):
        config, given = {"rows": ROWS, "batch": 2}, options(precision="fp16", accumulate=accumulate)
        mine = train(Half, config, [(None, workers)], options=given, scheduler_step_freq="epoch")
        theirs, _ = by_hand(ROWS, 2 * workers * accumulate)
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.003)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(
    ("accumulate", "schedule"), [(1, [(None, 3)]), (2, [(None, 2)]), (1, [(1, 4), (None, 3)]), (1, [(1, 4), (None, 1)])]
)
def test_counts_that_weigh_where_gradients_arrive(
    accumulate: int, schedule: Any, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16, which leaves this model in double precision. Some batches count nothing, and have a gradient of NaN. On a GPU, no
    count is read."""
    if not reads:
        monkeypatch.setattr("raysgd.torch.step.weights._checked", lambda count: count)
    given, config = options(precision="bf16", accumulate=accumulate), {"rows": ROWS, "batch": 2}
    workers, found = schedule[0][1], list[torch.Tensor]()

    def look(trainer: Any, _: Any) -> None:
        found[:] = trainer.apply_all_operators(entered)

    freq = "epoch" if accumulate > 1 else "batch"
    mine = train(Counting, config, schedule, options=given, scheduler_step_freq=freq, batch="auto", look=look)
    theirs, weights = by_hand(ROWS, 2 * workers * accumulate)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for each in found:
        torch.testing.assert_close(each, weights, rtol=1e-12, atol=1e-12)


class OwnBackward(Default):
    def backward(self, loss: torch.Tensor, optimizer: Any = None) -> None:  # type: ignore[override]
        super().backward(loss, optimizer)


def test_a_backward_of_older_code_has_no_argument_count() -> None:
    check(OwnBackward, 3, [(None, 2)])


class OfRows(nn.CrossEntropyLoss):
    """Has a mean of its own."""

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores, labels, reduction="none").sum(1).mean()


class Mixed(Default):
    """Has probabilities in place of labels in some batches. The ranks differ in which."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        loader = DataLoader(data_of(config["rows"], ROWS), batch_size=config["batch"], collate_fn=mixed)
        self.register_data(train_loader=loader)


def mixed(rows: list[Any]) -> Any:
    x, y = map(torch.stack, zip(*rows, strict=True))
    return x, nn.functional.one_hot(y, 5).transpose(1, 2).double() if x[0, 0, 0] > 0 else y


class OfRowsOnly(Default):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.criterion = OfRows()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_subclass_of_a_criterion_with_a_mean_of_its_own_counts_samples(workers: int) -> None:
    alone = train(OfRowsOnly, {"rows": ROWS, "batch": 6}, [(None, 1)])
    mine = train(OfRowsOnly, {"rows": ROWS, "batch": 6 // workers}, [(None, workers)])
    torch.testing.assert_close(mine, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
def test_labels_that_are_probabilities_in_some_batches(workers: int) -> None:
    check(Mixed, 6 // workers, [(None, workers)], full=ROWS)


def test_one_worker_may_count_in_some_batches_only() -> None:
    class Some(Default):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["batch_idx"] % 2:
                return super().train_batch(batch, batch_info)
            self.zero_grad()
            self.backward(self.criterion(self.model(batch[0]), batch[1]))
            self.step()
            return {}

    check(Some, 3, [(None, 1)])


def test_where_own_code_would_run_twice_counts_travel_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notes(Late):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            begun.append(self.world_rank)
            return super().train_batch(batch, batch_info)

    begun: list[int] = []
    made = sums(monkeypatch)
    check(Notes, 3, [(None, 2)], full=14)
    assert sorted(begun) == [0] * 4 + [1] * 4 and made == [4, 4] + [1, 1] * 4
    made.clear()
    check(Late, 3, [(None, 2)], full=14, accumulate=2)
    assert made == [4, 4] + [1, 1] * 2


def test_the_log_says_why_a_batch_is_trained_again(caplog: pytest.LogCaptureFixture) -> None:
    check(Late, 3, [(None, 2)], full=14)
    (line,) = [each for each in caplog.messages if each.startswith("batch: ")]
    assert "is trained again, because its loss is the first that is not a mean over equally many labels" in line


def test_a_count_of_the_mean_of_metrics() -> None:
    """Also in a validation, whose batches the ranks divide in another way."""
    results: list[Any] = []
    config = {"rows": ROWS, "batch": 3}
    for workers in (1, 2, 3):
        with (
            Cluster(),
            TorchTrainer(training_operator_cls=Default, config=config, num_workers=workers, use_gpu=False) as trainer,
        ):
            results.append(trainer.validate())
    data = data_of(ROWS)
    x, y = data.tensors
    with torch.no_grad():
        mean = float(cross_entropy(model_of()(x).flatten(0, 1), y.flatten()))
    for each in results:
        assert each["val_loss"] == pytest.approx(mean, rel=1e-12) and type(each["val_loss"]) is float


class Causal(nn.Module):
    """Computes its loss as causal language models of transformers do."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.inner(x)
        return {"logits": logits, "loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class OwnLoss(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model = Causal()
        self.model, self.optimizer = self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.2))
        x, y = data_of(config["rows"]).tensors
        rows = [{"x": each, "labels": labels} for each, labels in zip(x, y, strict=True)]
        self.register_data(train_loader=DataLoader(rows, batch_size=config["batch"]))


def test_models_with_their_own_loss_count_shifted_labels() -> None:
    alone = train(OwnLoss, {"rows": ROWS, "batch": 6}, [(None, 1)])
    torch.testing.assert_close(train(OwnLoss, {"rows": ROWS, "batch": 3}, [(None, 2)]), alone, rtol=1e-12, atol=1e-12)


class Masked(Causal):
    """Its loss and gradients are NaN where nothing counts."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, kept = self.inner(x), (labels != IGNORED)[:, 1:].flatten()
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels.clamp(min=0)[:, 1:].flatten(), reduction="none")
        return {"logits": logits, "loss": (losses * kept).sum() / kept.sum()}


def test_a_model_whose_own_loss_is_nan_on_a_rank_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(OwnLoss, {"rows": ROWS, "batch": 3}, [(None, 1)])
    monkeypatch.setitem(globals(), "Causal", Masked)
    torch.testing.assert_close(train(OwnLoss, {"rows": ROWS, "batch": 1}, [(None, 3)]), alone, rtol=1e-12, atol=1e-12)


def test_ranks_that_do_not_agree_are_told() -> None:
    class Disagrees(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return kept.sum() if self.world_rank else None

    with pytest.raises(
        ConfigError, match=r"1 of 2 ranks have passed count to self.backward, and the others have not: pass"
    ):
        train(Disagrees, {"rows": 12, "batch": 3}, [(None, 2)])


@pytest.mark.parametrize(
    ("first", "text"), [(True, "without a count after others with one"), (False, "with a count after")]
)
def test_a_rank_that_changes_its_mind_is_told(first: bool, text: str) -> None:
    class Changes(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return kept.sum() if (self.global_step == 0) == first else None

    with pytest.raises(ConfigError, match=text):
        train(Changes, {"rows": 12, "batch": 3}, [(None, 2)])


@pytest.mark.parametrize("first", [False, True])
def test_passes_of_ones_own_beside_those_of_the_default_methods(first: bool) -> None:
    """They count samples."""

    class Both(Default):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.decay(batch) if first else None
            result = super().train_batch(batch, batch_info)
            self.decay(batch)
            return result

        def decay(self, batch: Any) -> None:
            self.zero_grad()
            self.backward(self.model(batch[0]).square().mean())
            self.step()

    several = train(Both, {"rows": ROWS, "batch": 3}, [(None, 2)])
    torch.testing.assert_close(several, train(Both, {"rows": ROWS, "batch": 6}, [(None, 1)]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [-1, float("nan"), "many", torch.ones(2)])
def test_a_count_is_a_number(count: Any) -> None:
    class Wrong(Counting):
        def counted(self, kept: torch.Tensor) -> Any:
            return count

    with pytest.raises(ConfigError, match="count must be a number of 0 or more"):
        train(Wrong, {"rows": 6, "batch": 3}, [(None, 1)])


def test_counts_need_means_over_samples() -> None:
    with pytest.raises(ConfigError, match=r"count=\.\.\.\) cannot be combined with gradients='ranks'"):
        train(Counting, {"rows": 12, "batch": 3}, [(None, 2)], options=options(gradients="ranks"))


def test_two_losses_in_a_batch_of_several() -> None:
    class Twice(Counting):
        def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
            super().backward(0.5 * loss, *given, **named)
            super().backward(self.witness([0]), *given, **named)

    with pytest.raises(ConfigError, match="was called twice in a batch that shares its step"):
        train(Twice, {"rows": 12, "batch": 3}, [(None, 2)], options=options(accumulate=2), scheduler_step_freq="epoch")


def test_labels_of_eight_bits_with_weights_of_classes() -> None:
    labels = torch.tensor([2, 0, 1, 2], dtype=torch.uint8)
    assert labels_counted(labels, 0, torch.tensor([1.0, 2.0, 4.0])) == 10
