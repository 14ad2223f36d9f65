"""The operators that RaySGD has for tests: their epochs call a function of the config, their batches report known scores."""

from typing import Any

import pytest

from raysgd.torch.training_operator import get_test_metrics_operator, get_test_operator
from tests.torch.small import Line, inline


def test_an_epoch_calls_the_configs_function() -> None:
    def counted(operator: Any, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        return {"batches": sum(1 for _ in iterator), "rows": operator.config["rows"], "info": info}

    operator = get_test_operator(Line)
    with inline(operator, config={"custom_func": counted, "rows": 8}) as trainer:
        result = trainer.train(info={"a": 1})
        assert (result["batches"], result["rows"], result["info"]["a"]) == (2, 8, 1)
        assert trainer.validate()["batches"] == 2
    with inline(operator, config={}) as trainer:
        assert trainer.train()["done"] == 1, "without a function, an epoch does nothing"


def test_scores_are_divided_by_the_samples_of_their_batch() -> None:
    config = {"rows": 10, "batch": 4, "scores": [8.0, 4.0, 2.0], "val_scores": [4.0, 4.0, 4.0], "key": "score"}
    with inline(get_test_metrics_operator(Line), config=config) as trainer:
        trained, validated = trainer.train(), trainer.validate()
    assert trained["score"] == pytest.approx((8 + 4 + 2) / 10), "so the mean over samples is their sum over all samples"
    assert trained["last_score"] == 2.0 / 2
    assert validated["score"] == pytest.approx(12 / 10)
    assert config["scores"] == [8.0, 4.0, 2.0]
