"""TFTrainer on two workers: `predict`, `test`, `seed` and preemption notices. Each trainer serves several of them, because
starting one takes seconds."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import ElasticConfig  # noqa: E402
from raysgd.tf import TFTrainer, TrainingOperator  # noqa: E402
from tests.faults import until  # noqa: E402
from tests.peek import drain_node, set_limits  # noqa: E402
from tests.tf.small import ROWS, arrays, fire, make_data  # noqa: E402

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.elastic]

X, Y = make_data()
X[:, 7] = np.arange(ROWS) / ROWS  # the number of the row
BOTH = ElasticConfig(min_workers=2)


class Noisy(TrainingOperator):
    """Draws dropout on each rank, and noise for the data. Notes the rows that it has trained on, and preemption notices."""

    def setup(self, config: dict[str, Any]) -> None:
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=keras.Sequential([keras.Input((8,)), *layers]),
            optimizers=keras.optimizers.Adam(0.01),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=keras.metrics.SparseCategoricalAccuracy(name="hits"),
        )

        def noisy() -> Any:
            for x, y in zip(X, Y, strict=True):
                yield np.append(x[:7] + np.random.normal(0, 0.1, 7), x[7]), y

        spec = (tf.TensorSpec((8,), tf.float32), tf.TensorSpec((), tf.int64))
        train = tf.data.Dataset.from_generator(noisy, output_signature=spec)
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        self.register_data(
            train_dataset=train.shuffle(ROWS).batch(10), validation_dataset=data.batch(10), test_dataset=data.batch(7)
        )
        self.marks = Path(config["marks"])

    def _note(self, name: str, text: str) -> None:
        with (self.marks / name).open("a") as file:
            file.write(text)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.world_rank == 1 and (self.marks / "armed").exists():
            fire("term", str(self.marks))
        if (self.marks / "slow").exists():
            time.sleep(0.05)
        if self._counts:
            self._note("rows", "".join(f"{row} " for row in np.rint(batch[0][:, 7] * ROWS).astype(int)))
        return super().train_batch(batch, batch_info)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        if self.world_rank == 1 and batch_info["batch_idx"] == 1 and (self.marks / "fatal").exists():
            fire("kill", str(self.marks))
        return super().predict_batch(batch, batch_info), tf.fill([len(tf.nest.flatten(batch)[0])], self.world_rank)

    def on_preemption_notice(self, deadline_s: float | None) -> None:
        self._note("notices", f"{os.getpid()} {deadline_s}\n")


def started(folder: Path, seed: int) -> TFTrainer:
    folder.mkdir()
    return TFTrainer(training_operator_cls=Noisy, config={"marks": str(folder)}, num_workers=2, seed=seed, elastic=BOTH)


def rows_of(folder: Path) -> Counter[int]:
    """Return how often each row was trained on since the last time, and forget it."""
    file = folder / "rows"
    found = Counter(map(int, file.read_text().split()))
    file.unlink()
    return found


def dropout(operator: Any) -> list[float]:
    """Return what a rank's dropout layer draws next."""
    return operator.model.layers[1](tf.ones((1, 64)), training=True).numpy().ravel().tolist()


def bits(trainer: TFTrainer) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays(trainer.state_dict())])


@pytest.fixture(scope="module")
def first(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what an undisturbed trainer with seed 7 finds."""
    with started(tmp_path_factory.mktemp("first") / "marks", seed=7) as trainer:
        return {
            "train": trainer.train(),
            "weights": bits(trainer),
            "dropout": trainer.apply_all_operators(dropout),
            "validate": trainer.validate(),
            "test": trainer.test(),
            "predict": trainer.predict(X, batch_size=9),
            "expected": trainer.get_model().predict(X, verbose=0),
        }


def test_outputs_are_in_the_order_of_the_data_and_a_test_measures_what_a_validation_does(first: dict[str, Any]) -> None:
    outputs, ranks = first["predict"]
    assert outputs.shape == (ROWS, 3) and Counter(ranks.tolist()) == {0: 56, 1: 45}
    np.testing.assert_allclose(outputs, first["expected"], rtol=1e-5, atol=1e-6)
    tested = {name.replace("test_", "val_"): value for name, value in first["test"].items() if "last" not in name}
    validated = {name: value for name, value in first["validate"].items() if "last" not in name}
    assert (tested.pop("batch_count"), validated.pop("batch_count")) == (15, 11)
    assert tested == pytest.approx(validated) and tested["num_samples"] == ROWS
    assert tested["val_hits"] == pytest.approx((first["expected"].argmax(1) == Y).mean())


def test_a_seed_repeats_every_bit_and_a_prediction_survives_a_worker(first: dict[str, Any], tmp_path: Path) -> None:
    with started(tmp_path / "marks", seed=7) as trainer:
        assert trainer.train() == first["train"]
        assert np.array_equal(bits(trainer), first["weights"])
        drawn = trainer.apply_all_operators(dropout)
        assert drawn == first["dropout"] and drawn[0] != drawn[1], "each rank draws its own numbers"
        (tmp_path / "marks" / "fatal").touch()
        outputs, _ = trainer.predict((X, Y), batch_size=9)
        assert (tmp_path / "marks" / "kill").exists()
        assert [recovery.reason for recovery in trainer.recoveries] == ["worker death"]
        np.testing.assert_allclose(outputs, first["expected"], rtol=1e-5, atol=1e-6)
        assert trainer.test() == pytest.approx(first["test"])


@pytest.mark.nightly
def test_replacements_join_when_preempted_workers_leave(
    first: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, notice_s=600.0)  # on a slow machine, the replacement may need more than 20 s
    marks = tmp_path / "marks"
    notices = marks / "notices"
    with started(marks, seed=8) as trainer:

        def train_until_recovered(number: int) -> None:
            for _ in until(lambda: len(trainer.recoveries) >= number):
                assert trainer.train()["num_samples"] == ROWS
                assert rows_of(marks) == Counter(range(ROWS))
            change = trainer.recoveries[-1]
            assert (change.reason, change.batches_redone, change.in_place) == ("preemption", 0, False)
            assert (change.world_size_before, change.world_size_after) == (2, 2)

        trainer.train()
        assert rows_of(marks) == Counter(range(ROWS))
        assert not np.array_equal(bits(trainer), first["weights"]), "another seed gives other weights"

        (marks / "slow").touch()
        (marks / "armed").touch()
        pids = trainer.apply_all_workers(os.getpid)
        train_until_recovered(1)
        assert trainer.recoveries[0].removed_ranks == (1,)
        assert notices.read_text() == f"{pids[1]} None\n"

        # Both workers are on the only node, which Ray drains now, until both know it.
        notices.unlink()
        pids = trainer.apply_all_workers(os.getpid)
        drain_node(trainer, monkeypatch, notices.exists, 60.0)
        train_until_recovered(2)
        assert trainer.recoveries[1].removed_ranks == (0, 1)
        told = dict(line.split() for line in notices.read_text().splitlines())
        assert told.keys() == {str(pid) for pid in pids} and all(50 < float(left) <= 60 for left in told.values())
        assert not set(pids) & set(trainer.apply_all_workers(os.getpid))
