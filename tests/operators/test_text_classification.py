"""The ready-made text classifier: it learns which words are good, and its F1 score is that of all workers' texts."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer

pytest.importorskip("torchmetrics")
pytest.importorskip("transformers")
pytest.importorskip("sklearn")


from sklearn import metrics

from raysgd.operators.text_classification import TextClassificationOperator, opinions, train_tokenizer
from tests.local.group import Cluster


def test_learns_which_words_are_good() -> None:
    torch.manual_seed(0)
    with TorchTrainer(
        training_operator_cls=TextClassificationOperator, config={"epochs": 4}, scheduler_step_freq="batch"
    ) as trainer:
        before = trainer.validate()
        trainer.fit(4, validate_every=0)
        result = trainer.validate()
        assert trainer.get_local_operator().optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    assert before["val_f1"] < 0.6 < 0.9 < result["val_f1"] and result["val_accuracy"] > 0.9
    assert result["val_mcc"] > 0.85 and result["num_samples"] == 200


def three_classes() -> list[tuple[str, int]]:
    return [(text, len(text.split()) // 2 - 1 if len(text.split()) < 8 else 0) for text, _ in opinions(37)]


def pairs() -> list[tuple[str, str, int]]:
    return [(text, text[::-1], label) for text, label in opinions(37)]


@pytest.mark.parametrize(("rows", "classes"), [(pairs(), 2), (three_classes(), 3)])
def test_metrics_are_exact_over_all_workers(rows: list[Any], classes: int) -> None:
    """Compare with scikit-learn, on the texts of both workers at once."""
    tokenizer = train_tokenizer(text for row in rows for text in row[:-1])

    def collate(batch: list[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        *texts, labels = zip(*batch, strict=True)
        return dict(tokenizer(*map(list, texts), padding=True, return_tensors="pt")), torch.tensor(labels)

    config = {"tokenizer": tokenizer, "train_data": rows, "validation_data": rows, "classes": classes, "batch_size": 4}
    with (
        Cluster(),
        TorchTrainer(training_operator_cls=TextClassificationOperator, config=config, num_workers=2) as trainer,
    ):
        trainer.train()
        result = trainer.validate()
        scores = trainer.predict(DataLoader(rows, batch_size=3, collate_fn=collate))
    truth, found = torch.tensor([row[-1] for row in rows]), scores.argmax(dim=1)
    average = "binary" if classes == 2 else "macro"
    assert result["num_samples"] == 37 and scores.shape == (37, classes)
    assert result["val_accuracy"] == pytest.approx(metrics.accuracy_score(truth, found))
    assert result["val_f1"] == pytest.approx(metrics.f1_score(truth, found, average=average, zero_division=0), abs=1e-6)
    loss = torch.nn.functional.cross_entropy(scores, truth)
    assert result["val_loss"] == pytest.approx(loss.item(), rel=1e-4)
    if len(found.unique()) > 1:
        assert result["val_mcc"] == pytest.approx(metrics.matthews_corrcoef(truth, found), abs=1e-6)


def test_long_texts_are_cut() -> None:
    config = {"train_data": [("a b c d e f g h", 0), ("b", 1)], "max_length": 5}
    with TorchTrainer(training_operator_cls=TextClassificationOperator, config=config) as trainer:
        tokens, labels = trainer.get_local_operator().collate([("a b c d e f g h", 0), ("b", 1)])
        assert tokens["input_ids"].shape == (2, 5) and tokens["attention_mask"].sum(dim=1).tolist() == [5, 3]
        assert labels.tolist() == [0, 1]
        assert trainer.train()["num_samples"] == 2
