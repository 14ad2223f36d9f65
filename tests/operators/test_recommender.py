"""The ready-made recommender: it learns tastes, and the area under the curve is that of all workers' rows."""

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from raysgd import TorchTrainer

pytest.importorskip("torchmetrics")
pytest.importorskip("sklearn")

from sklearn.metrics import average_precision_score, roc_auc_score

from raysgd.operators.recommender import FactorizationNet, RecommenderOperator, generated_clicks
from tests.local.group import Cluster


def test_learns_who_clicks_on_what() -> None:
    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=RecommenderOperator) as trainer:
        before = trainer.validate()
        for _ in range(4):
            trainer.train()
        result = trainer.validate()
    assert before["val_auc"] < 0.6 < 0.85 < result["val_auc"]
    assert result["val_average_precision"] > 0.75 and result["val_calibration_error"] < 0.05
    assert result["val_loss"] < before["val_loss"] and result["num_samples"] == 4000


def test_metrics_are_exact_over_all_workers() -> None:
    """Compare with scikit-learn, on the rows of both workers at once."""
    data = Subset(generated_clicks()[1], range(301))
    config = {"train_data": data, "validation_data": data, "batch_size": 16}
    with Cluster(), TorchTrainer(training_operator_cls=RecommenderOperator, config=config, num_workers=2) as trainer:
        trainer.train()
        result = trainer.validate()
        found = trainer.predict(data)
    clicked = torch.stack([row[-1] for row in data])
    assert result["num_samples"] == 301
    assert result["val_auc"] == pytest.approx(roc_auc_score(clicked, found), abs=1e-5)
    assert result["val_average_precision"] == pytest.approx(average_precision_score(clicked, found), abs=1e-5)
    assert result["val_click_rate"] == pytest.approx(float(clicked.float().mean()))
    loss = nn.functional.binary_cross_entropy(found, clicked.float())
    assert result["val_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_the_pairs_are_the_products_of_each_two_embeddings() -> None:
    model = FactorizationNet((5, 6, 7), 2, width=4)
    for part in (*model.weights, model.deep[-1]):
        nn.init.zeros_(part.weight)
    nn.init.zeros_(model.deep[-1].bias)
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    one, two, three = (table(each) for table, each in zip(model.embeddings, rows.unbind(dim=1), strict=True))
    expected = (one * two + one * three + two * three).sum(dim=1)
    assert torch.allclose(model(rows, torch.zeros(2, 2)), expected, atol=1e-6)
