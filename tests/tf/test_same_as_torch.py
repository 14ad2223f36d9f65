"""Behaviour that TorchTrainer and TFTrainer have in common."""

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.callbacks import Callback, Underway  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.tf.small import Small  # noqa: E402


class Empty(Small):
    """The data sets named in the config have no batch."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        parts = self._parts
        data = {"train_dataset": parts.train_dataset, "validation_dataset": parts.validation_dataset}
        self.register_data(**{name: each.take(0) if name in config["empty"] else each for name, each in data.items()})


@pytest.mark.parametrize("name", ["train_dataset", "validation_dataset"])
def test_data_without_a_batch_is_an_error(name: str) -> None:
    with TFTrainer(training_operator_cls=Empty, config={"empty": [name]}) as trainer:
        call = trainer.train if name == "train_dataset" else trainer.validate
        with pytest.raises(ConfigError, match=f"{name} returned no batch"):
            call()


class Short(Small):
    """Its loops accept only the arguments that they use."""

    def train_epoch(self, iterator: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"batches": sum(1 for _ in iterator)}

    validate = train_epoch  # type: ignore[assignment]


def test_a_loop_gets_the_arguments_that_it_accepts() -> None:
    with TFTrainer(training_operator_cls=Short) as trainer:
        assert trainer.train()["batches"] == trainer.validate()["batches"] == 11


class LastProgress(Callback):
    """Keeps the last progress message of the training calls."""

    def on_progress(self, now: Underway) -> None:
        self.progress = now.progress


def test_the_last_progress_message_of_a_call_is_its_end() -> None:
    heard = LastProgress()
    with TFTrainer(training_operator_cls=Small, callbacks=[heard]) as trainer:
        trainer.train()
    assert (heard.progress.batches, heard.progress.finished) == (11, True)
