"""Behaviour that TorchTrainer and TFTrainer have in common."""

import json
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.callbacks import Callback, Underway  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.background import Background  # noqa: E402
from tests.tf.small import Small  # noqa: E402

SCRIPT = Path(__file__).with_name("same_as_torch.py")


class Empty(Small):
    """The data sets named in the config have no batch."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        parts = self._parts
        data = {"train_dataset": parts.train_dataset, "validation_dataset": parts.validation_dataset}
        self.register_data(**{name: each.take(0) if name in config["empty"] else each for name, each in data.items()})


def test_an_epoch_without_a_batch_is_an_error() -> None:
    with (
        TFTrainer(training_operator_cls=Empty, config={"empty": ["train_dataset"]}) as trainer,
        pytest.raises(ConfigError, match="train_dataset returned no batch"),
    ):
        trainer.train()


def test_a_validation_without_a_batch_is_an_error() -> None:
    with (
        TFTrainer(training_operator_cls=Empty, config={"empty": ["validation_dataset"]}) as trainer,
        pytest.raises(ConfigError, match="validation_dataset returned no batch"),
    ):
        trainer.validate()


class ShortLoop(Small):
    """A training loop that accepts only the arguments that it uses."""

    def train_epoch(self, iterator: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batches": sum(1 for _ in iterator)}


class ShortValidation(Small):
    """A validation that accepts only the arguments that it uses."""

    def validate(self, val_iterator: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batches": sum(1 for _ in val_iterator)}


def test_a_training_loop_gets_the_arguments_that_it_accepts() -> None:
    with TFTrainer(training_operator_cls=ShortLoop) as trainer:
        assert trainer.train()["batches"] == 11


def test_a_validation_gets_the_arguments_that_it_accepts() -> None:
    with TFTrainer(training_operator_cls=ShortValidation) as trainer:
        assert trainer.validate()["batches"] == 11


class LastProgress(Callback):
    """Keeps the last progress message of the training calls."""

    def on_progress(self, now: Underway) -> None:
        self.progress = now.progress


def test_the_last_progress_message_of_a_call_is_its_end() -> None:
    heard = LastProgress()
    with TFTrainer(training_operator_cls=Small, callbacks=[heard]) as trainer:
        trainer.train()
    assert (heard.progress.batches, heard.progress.finished) == (11, True)


@pytest.fixture(scope="module")
def facts(background: Background) -> dict[str, Any]:
    done = background.run(str(SCRIPT), connected=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"{SCRIPT.name} failed:\n{done.stdout}\n{done.stderr}"
    facts: dict[str, Any] = json.loads(lines[0].removeprefix("FACTS "))
    return facts


@pytest.mark.elastic
@pytest.mark.slow
def test_an_interrupted_validation_is_repeated_from_where_it_began(facts: dict[str, Any]) -> None:
    """Of two calls of `validate(num_steps=2)`, the second continues after the batches of the first one, also after a failure."""
    assert facts["validated"] == [9.5, 29.5]


@pytest.mark.elastic
@pytest.mark.slow
def test_a_loaded_state_survives_the_failure_of_all_workers(facts: dict[str, Any]) -> None:
    saved, trained, after = facts["kernels"]
    assert trained != saved
    assert after == saved
