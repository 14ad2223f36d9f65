"""With `ElasticConfig(batch="global")`, steps and memory stay the same, and so do the weights, whatever the number of workers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd import ConfigError, ElasticConfig, TrainingOptions
from raysgd.data import ShardedStream
from tests.local.runs import train
from tests.peek import send_ahead
from tests.torch.small import inline
from tests.torch.test_exact_gradients import OPTIONS, Curve, Direct, Sampled, close, options

pytestmark = pytest.mark.filterwarnings("ignore:the training loader does not shuffle")


class TwoPasses(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.zero_grad()
        self.backward(0.5 * self.criterion(self.model(x), y))
        self.backward(0.5 * self.criterion(self.model(-x), y))
        self.step()
        return {}


# Stages of an epoch: the steps of each, and the ranks during it. The last stage has the rest of the steps.
STAGES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=3)


def in_stages(stages: list[tuple[int, int]], last: int, steps: int) -> list[tuple[int | None, int]]:
    """Return the stages that begin before the epoch ends."""
    found: list[tuple[int | None, int]] = []
    for count, ranks in stages:
        if steps > count:
            found.append((count, ranks))
            steps -= count
    return [*found, (None, last)]


def noting(kind: type[Curve], sizes: list[int], infos: list[dict[str, Any]]) -> type[Curve]:
    """Return a class that notes the size of each batch, and on rank 0 what it is told."""

    class Notes(kind):  # type: ignore[misc, valid-type]
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            sizes.append(len(batch[0]))
            if self.world_rank == 0:
                infos.append(batch_info)
            return super().train_batch(batch, batch_info)

    return Notes


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(2, 5),
    STAGES,
    st.integers(1, 6),
    st.sampled_from([Curve, TwoPasses]),
    OPTIONS,
    st.booleans(),
)
def test_any_schedule_ends_with_the_weights_of_an_undisturbed_run(
    rows: int, batch: int, workers: int, stages: Any, last: int, kind: type[Curve], more: dict[str, Any], adam: bool
) -> None:
    whole = batch * workers
    steps, sizes, infos, counts = -(-rows // whole), [], [], []
    config = {"rows": rows, "batch": batch, "adam": adam}
    mine = train(
        noting(kind, sizes, infos),
        config,
        in_stages(stages, last, steps),
        num_workers=workers,
        batch="global",
        options=options(**more),
        look=lambda trainer, results: counts.append(results[0]["batch_count"]),
    )
    close(mine, train(kind, {**config, "batch": whole}, [(None, 1)], options=options(**more)))
    assert max(sizes) <= batch
    assert sum(counts) == steps
    assert sorted({info["global_step"] for info in infos}) == list(range(steps))


def test_the_batches_of_a_batch_sampler_are_pieces() -> None:
    sizes: list[int] = []
    config = {"rows": 23, "batch": 1}  # batches of 1, 4, 2, 3, 1, 4, 2, 3, 1, 2 rows, three in each step
    mine = train(noting(Sampled, sizes, []), config, [(2, 2), (None, 1)], num_workers=3, batch="global")
    close(mine, train(Sampled, config, [(None, 3)]))
    assert max(sizes) == 4


def test_metrics_of_pieces_are_those_of_the_batch() -> None:
    found: list[dict[str, Any]] = []
    for ranks in (1, 3):
        train(
            Curve,
            {"rows": 20, "batch": 2},
            [(None, ranks)],
            num_workers=3,
            batch="global",
            look=lambda trainer, results: found.append(
                {
                    "loss": sum(r["train_loss"] * r["num_samples"] for r in results) / 20,
                    "samples": sum(r["num_samples"] for r in results),
                    "steps": trainer.apply_all_operators(lambda operator: operator.global_step)[0],
                    "batches": results[0]["batch_count"],
                }
            ),
        )
    assert found[0] == pytest.approx(found[1]) and found[0]["steps"] == found[0]["batches"] == 4


class StepsTwice(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        super().train_batch(batch, batch_info)
        return super().train_batch(batch, batch_info)


class Clips(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.backward(self.criterion(self.model(batch[0]), batch[1]))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.step()
        return {}


class Closure(Direct):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.step(lambda: self.criterion(self.model(batch[0]), batch[1]))
        return {}


class ClearsTheModel(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.model.zero_grad()
        self.backward(self.criterion(self.model(batch[0]), batch[1]))
        self.step()
        return {}


class StepsItsSchedule(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        self.schedule.step()
        return result


class RunsItsOwnBackward(Curve):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.zero_grad()
        self.criterion(self.model(batch[0]), batch[1]).backward()
        self.step()
        return {}


REFUSED = [
    (StepsTwice, "makes a step and then computes gradients"),
    (Clips, r"changes gradients between.*clip_norm"),
    (ClearsTheModel, r"does not clear its gradients with self\.zero_grad\(\)"),
    (RunsItsOwnBackward, r"call self\.zero_grad\(\), self\.backward\(loss\) and self\.step\(optimizer\)"),
    (StepsItsSchedule, "steps its scheduler"),
]


@pytest.mark.parametrize(("kind", "says"), REFUSED)
def test_batches_that_cannot_be_divided_are_refused_before_a_worker_is_lost(kind: type[Curve], says: str) -> None:
    more: dict[str, Any] = {"num_workers": 2, "scheduler_step_freq": "manual"}
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match=f"several pieces.*{says}.*batch='per_worker'"):
            train(kind, {"rows": 8, "batch": 2}, [(None, ranks)], batch="global", **more)
    train(kind, {"rows": 8, "batch": 2}, [(None, 2)], **more)


@pytest.mark.parametrize(
    ("kind", "says"), [(Direct, r"calls optimizer\.step\(\) itself"), (Closure, "passes a closure")]
)
def test_a_direct_step_is_refused_before_a_worker_is_lost(kind: type[Curve], says: str) -> None:
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match=rf"batch='global'\) acts in self.step\(\), .*{says}"):
            train(kind, {"rows": 8, "batch": 2}, [(None, ranks)], num_workers=2, batch="global")


def test_a_loop_that_steps_a_scheduler_after_a_piece_is_an_error() -> None:
    class Loops(Curve):
        def train_epoch(self, iterator: Any, *given: Any, **named: Any) -> dict[str, Any]:
            for batch in iterator:
                self.train_batch(batch, {})
                self.schedule.step()
            return {}

    more: dict[str, Any] = {"num_workers": 2, "scheduler_step_freq": "manual", "batch": "global"}
    train(Loops, {"rows": 8, "batch": 2}, [(None, 2)], **more)
    with pytest.raises(ConfigError, match=r"several pieces.*steps its scheduler"):
        train(Loops, {"rows": 8, "batch": 2}, [(None, 1)], **more)


def test_gradients_that_are_cleared_between_two_pieces_are_an_error() -> None:
    class ClearsBoth(Curve):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.model.zero_grad()
            return super().train_batch(batch, batch_info)

    train(ClearsBoth, {"rows": 8, "batch": 2}, [(None, 2)], num_workers=2, batch="global")
    with pytest.raises(ConfigError, match="clears or changes gradients between two"):
        train(ClearsBoth, {"rows": 8, "batch": 2}, [(None, 1)], num_workers=2, batch="global")


def test_other_means_are_refused() -> None:
    for means in (TrainingOptions(gradients="ranks"), TrainingOptions(parallel=None)):
        with pytest.raises(ConfigError, match=r"batch=.global.*cannot be combined"):
            inline(Curve, num_workers=2, elastic=ElasticConfig(batch="global"), options=means)


def test_pieces_that_are_sent_to_the_device_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    send_ahead(monkeypatch)
    whole = train(Curve, {"rows": 23, "batch": 6}, [(None, 1)])
    for stages in ([(None, 1)], [(2, 1), (None, 2)]):
        close(train(Curve, {"rows": 23, "batch": 3}, stages, num_workers=2, batch="global"), whole)


class Streamed(Curve):
    """Reads two shards of unequal lengths."""

    def loader(self, data: Any, config: dict[str, Any]) -> Any:
        half = len(data) // 3
        parts = [range(half), range(half, len(data))]
        return ShardedStream(lambda shard: (data[row] for row in parts[shard]), 2, batch_size=config["batch"])


def test_the_batches_of_a_sharded_stream_have_pieces() -> None:
    sizes: list[int] = []
    config = {"rows": 23, "batch": 2}
    mine = train(noting(Streamed, sizes, []), config, [(2, 1), (None, 1)], num_workers=3, batch="global")
    close(mine, train(Streamed, {**config, "batch": 6}, [(None, 1)]))
    assert max(sizes) == 2 and sum(sizes) >= 23
