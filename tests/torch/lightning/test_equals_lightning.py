"""With the same module, seed and data, raysgd ends with the same weights as Lightning's own Trainer."""

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import TorchTrainer, TrainingOperator, TrainingOptions  # noqa: E402
from tests.replicas import operator_alone  # noqa: E402
from tests.torch.lightning import modules  # noqa: E402

EPOCHS = 3


def by_lightning(module, **options):
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("name", ["Net", "Scheduled"])
def test_equal_weights(name):
    module_cls = getattr(modules, name)
    theirs = module_cls()
    reference = by_lightning(theirs)

    operator_cls = TrainingOperator.from_ptl(module_cls)
    with TorchTrainer(training_operator_cls=operator_cls, config={}) as trainer:
        for _ in range(EPOCHS):
            trained = trainer.train()
            validated = trainer.validate()
        ours = trainer.get_model()
        rates = trainer.apply_all_operators(
            lambda operator: [each.param_groups[0]["lr"] for each in operator.optimizers]
        )[0]

    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key
    assert rates == [each.param_groups[0]["lr"] for each in reference.optimizers]
    assert trained["num_samples"] == modules.ROWS
    assert validated["val_loss"] == pytest.approx(reference.callback_metrics["val_loss"].item())
    assert validated["num_samples"] == modules.VAL_ROWS


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_equal_weights_with_clipping(algorithm):
    theirs = modules.Net()
    by_lightning(theirs, gradient_clip_val=0.03, gradient_clip_algorithm=algorithm)

    options = TrainingOptions(**{f"clip_{algorithm}": 0.03})
    operator = operator_alone(TrainingOperator.from_ptl(modules.Net), options=options)
    for epoch in range(EPOCHS):
        operator.train_epoch(operator.module.train_dataloader(), epoch_idx=epoch)
    ours = operator.module.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in theirs.state_dict().items())


def test_the_model_does_not_refer_to_raysgd():
    with TorchTrainer(training_operator_cls=TrainingOperator.from_ptl(modules.Net), config={}) as trainer:
        trainer.train(num_steps=1)
        model = trainer.get_model()
    assert type(model) is modules.Net
    assert "log" not in vars(model)
    with pytest.raises(RuntimeError, match="not attached"):
        _ = model.trainer


def test_hooks_run_in_lightnings_order():
    theirs = modules.Watched(batch_size=80)
    by_lightning(theirs)

    operator_cls = TrainingOperator.from_ptl(modules.Watched)
    with TorchTrainer(training_operator_cls=operator_cls, config={"batch_size": 80}) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
            trainer.validate()
        ours = trainer.get_local_operator().module.calls

    def within_training(calls):
        """Return the calls without those of validations: Lightning validates inside the epoch, and a script after it."""
        return [call for call in calls if "validation" not in call[0]]

    def within_validation(calls):
        return [call for call in calls if "validation" in call[0]]

    assert within_training(ours) == within_training(theirs.calls)
    assert within_validation(ours) == within_validation(theirs.calls)
