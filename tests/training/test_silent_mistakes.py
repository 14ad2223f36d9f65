"""Mistakes that raise no error: one line names each, once, at the moment when it acts."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import AutoCheckpoint, ConfigError, TorchTrainer, TrainingOptions, shutdown_all
from raysgd.callbacks import Callback, EarlyStopping
from tests.local.group import Cluster, Fault
from tests.torch.small import Line, inline, operator_of, weights


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class SteppedAround(Line):
    """Steps its schedule where the trainer does."""

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.scheduler.step()
        return result


def step_schedule(operator: Any) -> None:
    operator.scheduler.step()


BESIDE = "ExponentialLR was stepped between two loops of raysgd"


@pytest.mark.parametrize(
    ("operator", "between", "rate", "said"),
    [
        (SteppedAround, None, 0.1 / 64, BESIDE),
        (Line, lambda trainer: trainer.apply_all_operators(step_schedule), 0.1 / 64, BESIDE),
        (Line, lambda trainer: trainer.load_state_dict(trainer.state_dict()), 0.1 / 8, ""),
        (Line, None, 0.1 / 8, ""),
    ],
)
def test_a_schedule_that_two_step_is_named_once(
    operator: type[Line], between: Callable[[TorchTrainer], Any] | None, rate: float, said: str, caplog: Any
) -> None:
    with inline(operator, config={"scheduler": halving}, scheduler_step_freq="epoch", seed=1) as trainer:
        for _ in range(3):
            trainer.train()
            if between is not None:
                between(trainer)
        found = trainer.apply_all_operators(lambda each: each.optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([rate])
    assert said in "".join(caplog.messages) and len(caplog.messages) == bool(said)


@pytest.mark.parametrize(("plain", "lines"), [(True, 1), (False, 0)])
def test_a_callback_cannot_stop_a_plain_loop(plain: bool, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with inline(Line, config={"lr": 0.0}, callbacks=[EarlyStopping("val_loss", patience=1)]) as trainer:
        for _ in range(6) if plain else trainer.epochs(6):
            trainer.train()
            trainer.validate()
        trainer.train()
        assert len(trainer.history.of("train")) == (7 if plain else 3)
    assert len([each for each in caplog.messages if "EarlyStopping wants training to stop" in each]) == lines


def zero_on_rank_0(operator: Any) -> None:
    if operator.is_first:
        torch.nn.init.zeros_(operator.unwrapped().weight)


def test_weights_that_one_rank_changes_between_calls_are_named_in_the_next_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Cluster(), inline(Line, num_workers=2) as trainer:
        for _ in range(3):
            trainer.train()
        trainer.apply_all_operators(zero_on_rank_0)
        trainer.train()
        assert "do not train the same model: the parameter weight of self.model" in caplog.text


@pytest.mark.parametrize("changes", [True, False])
def test_a_copy_of_an_operator_that_is_changed_is_named(changes: bool, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(), inline(Line, num_workers=2) as trainer:
        trainer.train()
        copy = trainer.get_local_operator()
        copy.model(torch.ones(1, 2))
        copy.optimizer.param_groups[0]["lr"] = 0.0 if changes else 0.1
        trainer.train()
        trainer.train()
        assert trainer.apply_all_operators(lambda each: each.optimizer.param_groups[0]["lr"]) == [0.1, 0.1]
    said = "get_local_operator() returned. That is a copy"
    assert len([each for each in caplog.messages if said in each]) == changes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("does", ["trains it", "evaluates it"])
def test_a_copy_of_the_model_that_is_changed_is_named(does: str, workers: int, caplog: Any) -> None:
    with Cluster(), inline(Line, num_workers=workers) as trainer:
        trainer.train()
        copy = trainer.get_model()
        if does == "trains it":
            copy.load_state_dict({name: torch.zeros_like(each) for name, each in copy.state_dict().items()})
        else:
            copy.half().train().float()(torch.ones(1, 2)).sum().backward()
        before = weights(trainer)
        for _ in range(2):
            trainer.train()
        assert before.any() and not torch.equal(before, weights(trainer))
    said = "the script has changed what get_model() returned. That is a copy, so training continues without"
    assert len([each for each in caplog.messages if said in each]) == (does == "trains it")


@pytest.mark.parametrize(("batch", "said"), [(4, 0), (6, 1)])
def test_a_resume_with_another_batch_size_is_named(batch: int, said: int, tmp_path: Path, caplog: Any) -> None:
    for size, epochs in ((4, 1), (batch, 2)):
        checkpoints = AutoCheckpoint(path=tmp_path / "run")
        with (
            Cluster(),
            inline(Line, config={"batch": size}, num_workers=2, checkpoints=checkpoints, resume="auto") as trainer,
        ):
            trainer.fit(epochs, 0, progress=False)
    line = (
        "the batches of the checkpoint's run have 2 parts with batch_size=4, and those of this trainer have 2 with 6 ("
    )
    assert len([each for each in caplog.messages if line in each and "\n" not in each]) == said


def one_cycle(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


class Cycling(Line):
    """Plans its schedule for the optimizer's steps, or for `steps`."""

    def setup(self, config: dict[str, Any]) -> None:
        def planned(optimizer: Any) -> Any:
            return one_cycle(optimizer, config.get("steps") or self.total_steps(epochs=config["epochs"]))

        super().setup({**config, "scheduler": planned})


@pytest.mark.parametrize(
    ("config", "freq", "said"),
    [
        ({"epochs": 3}, "epoch", 1),
        ({"epochs": 3}, "batch", 0),
        ({"epochs": 3, "batch": 12}, "epoch", 0),  # an epoch is one step
        ({"steps": 3}, "epoch", 0),
    ],
)
def test_a_schedule_whose_end_is_never_reached_is_named(config: Any, freq: str, said: int, caplog: Any) -> None:
    with inline(Cycling, config=config, scheduler_step_freq=freq) as trainer:
        for _ in range(3):
            trainer.train()
    line = (
        "OneCycleLR ends with its step 9, and makes 1 until the end of this call of train(): it makes one in each epoch"
    )
    assert len([each for each in caplog.messages if line in each]) == said


@pytest.mark.parametrize("rows", [16, 12])
def test_other_rows_within_an_epoch_are_named(rows: int, tmp_path: Path, caplog: Any) -> None:
    with inline(Line, config={"rows": 12, "shuffle": True}) as trainer:
        trainer.train(num_steps=1)
        trainer.save(tmp_path / "line.pt")
    with inline(Line, config={"rows": rows, "shuffle": True}) as trainer:
        trainer.load(tmp_path / "line.pt")
        assert trainer.train()["num_samples"] == 8
        assert trainer.train()["num_samples"] == rows
    said = "within an epoch of 12 rows, but train_loader has 16 here"
    assert len([each for each in caplog.messages if said in each]) == (rows != 12)


def test_what_torch_says_of_frozen_layers_has_the_cure() -> None:
    class Frozen(Line):
        def train_batch(self, batch: Any, batch_info: Any) -> Any:
            raise RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")

    with inline(Frozen) as trainer, pytest.raises(RuntimeError, match="Expected to have") as caught:
        trainer.train()
    notes = getattr(caught.value, "__notes__", [])
    assert "frozen after self.register()" in "".join(notes) or not hasattr(caught.value, "add_note")


def breaking(self: Any, iterator: Any, info: Any = None) -> dict[str, Any]:
    for number, batch in enumerate(iterator):
        self.train_batch(batch, info)
        if number + 1 == self.config["batches"]:
            break
    return {}


def in_chunks(self: Any, iterator: Any, info: Any = None) -> dict[str, Any]:
    while chunk := list(islice(iterator, 2)):
        for batch in chunk:
            self.train_batch(batch, info)
    return {}


def twice(self: Any, iterator: Any, info: Any = None) -> dict[str, Any]:
    for _ in range(self.config["passes"]):
        for batch in iterator:
            self.train_batch(batch, info)
    return {}


@pytest.mark.parametrize(
    ("loop", "config", "said"),
    [
        (breaking, {"batches": 2}, "has left its loop 1 batch before the end of the epoch"),
        (breaking, {"batches": 3}, ""),
        (breaking, {"batches": 4}, ""),
        (twice, {"passes": 2}, "iterates a second time over the batches that it got"),
        (twice, {"passes": 1}, ""),
        (in_chunks, {}, ""),
    ],
)
def test_a_loop_that_does_not_make_one_pass_is_named_once(loop: Any, config: Any, said: str, caplog: Any) -> None:
    with inline(type("Own", (Line,), {"train_epoch": loop}), config=config) as trainer:
        for _ in range(2):
            trainer.train()
    assert len(caplog.messages) == bool(said) and said in caplog.text


def replace_optimizer(operator: Any) -> None:
    operator.optimizer = torch.optim.SGD(operator.model.parameters(), lr=0.5)


@pytest.mark.parametrize(
    "change", [replace_optimizer, lambda operator: operator.optimizer.param_groups[0].update(lr=1)]
)
def test_an_optimizer_that_is_replaced_is_named_once(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    with inline(Line) as trainer:
        trainer.train()
        trainer.apply_all_operators(change)
        trainer.train()
        trainer.train()
        assert trainer.state_dict()["optimizers"][0]["param_groups"][0]["lr"] == (0.1 if caplog.messages else 1)
    said = [each for each in caplog.messages if "self.optimizer is no longer the optimizer" in each]
    assert len(said) == (change is replace_optimizer)


class Divided(Line):
    """Accumulates as in a loop by hand."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.criterion(self.model(batch[0]), batch[1])
        if self.config["by"] != "its own count":
            self.zero_grad()
        self.backward(loss / self.config.get("number", 1))
        if self.config["by"] != "its own count" or batch_info["batch_idx"] % 3 == 2:
            self.step()
        return {"train_loss": loss.item()}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"by": "hand", "number": 3}, "got a loss that was divided by 3, as many batches as share a step"),
        ({"by": "hand", "number": 2}, ""),
        ({"by": "raysgd"}, ""),
        (
            {"by": "its own count"},
            "raysgd counts the batches for TrainingOptions(accumulate=3). Call self.zero_grad()",
        ),
    ],
)
def test_accumulation_by_hand_beside_raysgds_is_named_once(config: Any, said: str, caplog: Any) -> None:
    with inline(Divided, config=config, options=TrainingOptions(accumulate=3)) as trainer:
        trainer.train()
        trainer.train()
    assert len(caplog.messages) == bool(said) and said in caplog.text


class OtherHead(Line):
    """Replaces a layer, before or after its optimizer is created."""

    def setup(self, config: dict[str, Any]) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 5))
        if config["first"]:
            model[1] = torch.nn.Linear(2, 1)
        optimizer = self.make_optimizer(model, 0.1)
        model[1] = model[1] if config["first"] else torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss()
        )
        self.register_data(**self.loaders(config))


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_is_replaced_after_its_optimizer_was_created_is_named(first: bool, caplog: Any) -> None:
    with inline(OtherHead, config={"first": first}) as trainer:
        trainer.train()
    said = "the optimizer SGD holds parameters that no registered model has: 2."
    assert [said in each for each in caplog.messages] == [True] * (not first)


class Centers(torch.nn.Module):
    """A criterion that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.nn.Parameter(torch.zeros(1))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target - self.center).pow(2).mean()


class TrainedCriterion(Line):
    def setup(self, config: dict[str, Any]) -> None:
        model, criterion = torch.nn.Linear(2, 1), Centers()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        registered = self.register(models=model, optimizers=optimizer, criterion=criterion)
        self.model, self.optimizer, self.criterion = registered
        self.register_data(**self.loaders(config))


def test_a_criterion_that_is_trained_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """No checkpoint has its parameters."""
    with inline(TrainedCriterion) as trainer:
        trainer.train()
    assert [each for each in caplog.messages if "holds parameters that no registered model has: 1." in each]


def test_a_parameter_group_that_is_added_after_setup_is_refused_in_the_next_call() -> None:
    def add(operator: Any) -> None:
        operator.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

    with Cluster(faults=[Fault("kill", "reduced", rank=1, step=4)]), inline(Line, num_workers=2) as trainer:
        trainer.train()
        trainer.apply_all_operators(add)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"SGD has parameter groups of \[2, 1\] parameters, and had \[2\]"):
                trainer.train()
        trainer.apply_all_operators(lambda each: each.optimizer.param_groups.pop() and None)
        assert trainer.train()["num_samples"] == 12


WITHIN = "this loop begins within epoch 1 of the data, which an earlier call has begun: its first epoch is the rest of it, from batch"


@pytest.mark.parametrize(
    ("first", "num_steps", "said"), [(1, None, f"{WITHIN} 2 of 3. "), (3, None, ""), (0, None, ""), (1, 2, "")]
)
def test_a_loop_that_begins_within_an_epoch_says_so(first: int, num_steps: Any, said: str, caplog: Any) -> None:
    with inline(Line) as trainer:
        trainer.train(num_steps=first)
        trainer.fit(2, 0, num_steps=num_steps, progress=False)
        trainer.fit(1, 0, progress=False)
    assert len([each for each in caplog.messages if "begins within epoch" in each]) == bool(said or num_steps)
    assert said in caplog.text


def test_a_loop_that_is_resumed_within_an_epoch_says_only_from_where(tmp_path: Path, caplog: Any) -> None:
    for _ in range(2):
        with inline(Line, checkpoints=AutoCheckpoint(path=tmp_path / "run"), resume="auto") as trainer:
            for _ in trainer.epochs(2 if trainer.resumed_from else 1):
                trainer.train(num_steps=None if trainer.resumed_from else 1)
    assert "training resumes from" in caplog.text and "begins within epoch" not in caplog.text


@pytest.mark.parametrize("validates", [0, 1])
def test_a_best_checkpoint_without_its_metric_is_named_once(validates: int, tmp_path: Path, caplog: Any) -> None:
    with inline(Line, checkpoints=AutoCheckpoint(path=tmp_path / "run", best="val_loss")) as trainer:
        trainer.fit(1, 0, progress=False)
        trainer.fit(1, validates, progress=False)
        assert (trainer.best_checkpoint is None) == (not validates)
    said = "AutoCheckpoint(best='val_loss') had no effect, because no result had this metric"
    assert caplog.messages == [said] * (not validates)


class Counting(Line):
    """Counts its batches, and names a metric without a prefix."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.trained = self.validated = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.trained += 1
        return {**super().train_batch(batch, batch_info), "share": 0.5}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.validated += 1
        return super().validate_batch(batch, batch_info)

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        found = super().loaders(config)
        if config.get("named"):
            found["validation_loader"] = dict.fromkeys(("easy", "hard"), found["validation_loader"])
        return found


class OwnEpoch(Counting):
    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        return {**super().train_epoch(iterator, info, num_steps, epoch_idx), "train_own": 1.0}


class Adding(Callback):
    def extra_metrics(self, result: Any) -> dict[str, Any]:
        return {"val_extra": 1.0}


class Sometimes(Counting):
    """Measures more in later batches than in the first one."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(batch, batch_info) | ({"train_acc": 1.0} if self.trained % 2 == 0 else {})

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().validate_batch(batch, batch_info) | {"val_auc" if self.validated % 3 else "val_acc": 1.0}


# A metric, what was meant, and how many batches were trained and validated when it is named.
WRONG = [("train_los", "train_loss", (1, 0)), ("last_train_los", "train_loss", (1, 0)), ("val_los", "val_loss", (3, 1))]
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("train_loss", {}),
    ("last_val_loss", {}),
    ("share", {}),
    ("seconds", {}),
    ("val_hard_loss", {"config": {"named": True}}),
    ("train_own", {"operator": OwnEpoch}),
    ("train_acc", {"operator": Sometimes}),
    ("val_acc", {"operator": Sometimes}),
    ("val_extra", {"callbacks": [Adding()]}),
]


def naming(way: str, metric: str, folder: Path, **given: Any) -> TorchTrainer:
    callbacks = given.pop("callbacks", [])
    if way == "best":
        given["checkpoints"] = AutoCheckpoint(path=folder / "run", best=metric)
    else:
        callbacks = [*callbacks, EarlyStopping(metric)]
    return inline(given.pop("operator", Counting), callbacks=callbacks, **given)


@pytest.mark.parametrize("way", ["best", "stopping"])
@pytest.mark.parametrize(("metric", "meant", "when"), WRONG)
def test_a_metric_that_is_not_measured_is_named_in_a_first_batch(
    metric: str, meant: str, when: tuple[int, int], way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is an error after the validation only, because later batches can have it."""
    fails = (
        nullcontext() if way == "stopping" and "train" in metric else pytest.raises(ConfigError, match="did you mean")
    )
    with naming(way, metric, tmp_path) as trainer:
        operator, named = operator_of(trainer), list[tuple[int, int]]()

        def note(record: Any) -> bool:
            if f"{metric!r}) names a metric" in record.getMessage() and meant in record.getMessage():
                named.append((operator.trained, operator.validated))
            return True

        caplog.handler.addFilter(note)
        with fails:
            trainer.fit(1, progress=False)
        assert named == [when] and operator.validated == 3


@pytest.mark.parametrize("way", ["best", "stopping"])
@pytest.mark.parametrize(("metric", "given"), RIGHT)
def test_a_metric_that_is_measured_or_may_be_is_none(metric: str, given: Any, way: str, tmp_path: Path) -> None:
    with naming(way, metric, tmp_path, **given) as trainer:
        trainer.fit(2, progress=False)
        assert any(metric in row for row in trainer.history)


class OwnValidate(TorchTrainer):
    """Changes each validation."""

    def validate(self, *args: Any, **given: Any) -> Any:
        return super().validate(*args, **given) | {"own": True}


@pytest.mark.parametrize(("given", "validations"), [({}, 2), ({"validate_every": 2}, 1), ({"validation_steps": 1}, 0)])
def test_fit_validates_as_a_subclass_of_the_trainer_does(
    given: dict[str, int], validations: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with OwnValidate(training_operator_cls=Line, use_gpu=False) as trainer:
        trainer.fit(2, **given)
        assert len(trainer.history.of("validate")) == validations or "validation_steps" in given
    assert capsys.readouterr().out.count("own") == validations


def leave(trainer: TorchTrainer, *, trains: bool) -> None:
    for epoch in trainer.epochs(5):
        if epoch < 2 or trains:
            trainer.train()
        if epoch == 2:
            break


def test_a_trainer_that_has_ended_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a notebook, each cell of which begins with shutdown_all()."""
    with inline(Line, checkpoints=AutoCheckpoint(path=tmp_path / "run")) as trainer:
        leave(trainer, trains=True)
    for _ in range(3):
        shutdown_all()
    trainer.shutdown()
    assert len([each for each in caplog.messages if "left the loop" in each]) == 1


@pytest.mark.parametrize(("trains", "loops", "lines"), [(True, 1, 1), (False, 1, 0), (True, 2, 0)])
def test_a_loop_that_is_left_without_its_checkpoint_is_named(
    trains: bool, loops: int, lines: int, tmp_path: Path, caplog: Any
) -> None:
    with inline(Line, checkpoints=AutoCheckpoint(path=tmp_path / "run")) as trainer:
        leave(trainer, trains=trains)
        if loops == 2:
            trainer.fit(1, 0, progress=False)
    assert len(caplog.messages) == lines
    assert not lines or "in epoch 2, which had trained. An automatic checkpoint" in caplog.text
    assert (
        not lines or f"and the newest one is {tmp_path / 'run' / 'loop1-epoch00001-step000000003.pt'}. " in caplog.text
    )


def test_a_loop_that_an_error_ends_is_not_named_as_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError), inline(Line, checkpoints=AutoCheckpoint(path=tmp_path / "run")) as trainer:
        for _ in trainer.epochs(2):
            trainer.train()
            raise RuntimeError
    assert "was left" not in caplog.text


class CountsSteps(Line):
    """Counts its steps as raysgd does, in `train_batch` or in a loop of its own."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        self.global_step += self.config["adds"]
        return {**result, "at": batch_info["global_step"]}


def own_loop(self: Any, iterator: Any, info: Any = None) -> dict[str, Any]:
    for batch in iterator:
        self.train_batch(batch, {"global_step": self.global_step})
        self.global_step += 1
    return {}


@pytest.mark.parametrize(("methods", "adds"), [({}, 1), ({}, 0), ({"train_epoch": own_loop}, 0)])
def test_steps_that_are_counted_twice_count_once(methods: Any, adds: int) -> None:
    with inline(type("Own", (CountsSteps,), methods), config={"adds": adds}) as trainer:
        at = [trainer.train().get("last_at") for _ in range(2)]
        assert trainer.state_dict()["global_step"] == 6
    assert at == ([None, None] if methods else [2, 5])


class Weighted(Line):
    """Has an attribute that changes between two calls."""

    weight = saved = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict["saved"]


def set_weight(operator: Any) -> None:
    operator.weight = operator.weight + 1


def set_saved(operator: Any) -> None:
    operator.saved = operator.saved + 1


@pytest.mark.parametrize(
    ("change", "num_workers", "lines"),
    [(set_weight, 2, 1), (set_weight, 1, 0), (set_saved, 2, 0), (lambda operator: operator.weight, 2, 0)],
)
def test_an_attribute_that_later_workers_lack_is_named_once(
    change: Any, num_workers: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Cluster(), inline(Weighted, num_workers=num_workers) as trainer:
        for _ in range(2):
            trainer.train()
            trainer.apply_all_operators(change)
    said = "a function of apply_all_operators() has set self.weight, which checkpoints and workers that join later will not"
    assert [said in each for each in caplog.messages] == [True] * lines
