"""Training and evaluations leave each module in the mode that it had at the end of `setup`."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.torch.small import Line, inline, operator_of, rows


class NormsInEvalMode(nn.Sequential):
    """Keeps its BatchNorm layer in eval mode, whatever it is asked for."""

    def train(self, mode: bool = True) -> "NormsInEvalMode":
        super().train(mode)
        self[0].eval()
        return self


class Distilled(Line):
    """A student learns from a teacher, which `setup` has put into eval mode, as the first layer of the student."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        student = nn.Sequential(nn.BatchNorm1d(2), NormsInEvalMode(nn.BatchNorm1d(2)), nn.Linear(2, 1))
        student[0].eval()
        self.bare_teacher = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)).eval()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
        (self.student, self.teacher), self.optimizer = self.register(
            models=[student, self.bare_teacher], optimizers=optimizer
        )
        self.register_data(**self.loaders(config))
        self.answers: list[torch.Tensor] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = nn.functional.mse_loss(self.student(batch[0]), self.teacher(batch[0]).detach())
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        self.answers.append(self.teacher(rows()[0]).detach())
        return {"train_loss": loss.detach()}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"in_train_mode": any(each.training for model in self._registered.wrapped for each in model.modules())}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        return torch.full((len(batch[0]), 1), float(self.student.training or self.teacher.training))


def modes(operator: Any) -> tuple[list[bool], bool]:
    student = [
        operator.student.training,
        *(each.training for each in operator.student),
        operator.student[1][0].training,
    ]
    return student, any(each.training for each in operator.bare_teacher.modules())


def test_a_frozen_teacher_stays_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    with inline(Distilled) as trainer:
        operator = operator_of(trainer)
        for _ in range(2):
            trainer.train()
            assert modes(operator) == ([True, False, True, True, False], False)
            assert trainer.validate()["in_train_mode"] == 0
            assert trainer.predict(torch.utils.data.TensorDataset(*rows())).sum() == 0
            assert modes(operator) == ([True, False, True, True, False], False)
        assert all(torch.equal(each, operator.answers[0]) for each in operator.answers), "no dropout"
        assert not operator.bare_teacher[0].running_mean.any() and not operator.student[0].running_mean.any()
        assert not operator.student[1][0].running_mean.any(), "its own `train` puts it into eval mode"
    assert not caplog.records


def test_a_model_that_is_trained_in_eval_mode_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Pretrained(Line):
        def make_model(self) -> nn.Module:
            return nn.Linear(2, 1).eval()

    with inline(Pretrained) as trainer:
        trainer.train()
        trainer.train()
        assert not operator_of(trainer).model.training
    assert [each.getMessage() for each in caplog.records] == [
        "setup has left the model Linear in eval mode, in which from_pretrained() returns one, but an optimizer trains it. It trains "
        "without dropout, and with fixed statistics of BatchNorm. Call train() on the model in setup. Ignore this if you want that"
    ]
