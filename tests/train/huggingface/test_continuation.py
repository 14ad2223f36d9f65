"""A Hugging Face Trainer in one process: it is stopped anywhere, runs again, and has the bits of an undisturbed run."""

import enum
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from raysgd import train
from raysgd.train import Checkpoint
from raysgd.train.huggingface.attributes import Attributes
from raysgd.train.huggingface.continuation import Continuation
from raysgd.train.huggingface.elastic import ignores_items
from raysgd.train.huggingface.sampler import PartSampler
from raysgd.train.huggingface.transformers import Elastic, RayTrainReportCallback, prepare_trainer
from raysgd.train.huggingface.windows import Windows
from tests.replicas import FunctionRank, Interrupted
from tests.train.huggingface.small import (
    STOPPING,
    MeanLoss,
    Recording,
    Tokens,
    arguments,
    make_model,
    make_trainer,
    result_of,
    train_func,
)

DROPOUT = {"kind": "bert", "dropout": 0.1, "samples": 48}


class Rank(FunctionRank):
    """Receives checkpoints that are folders."""

    def _deliver(self, message: Any, body: Any) -> None:
        self.messages.append((message, pickle.loads(body[: message.metrics_size]), None))


@pytest.fixture
def rank() -> Iterator[FunctionRank]:
    made = Rank()
    yield made
    made.close()


def run(rank: FunctionRank, function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Run a function to its end, also if it is stopped. Return its result, and the number of attempts."""
    attempt = {"run": time.monotonic_ns(), "number": 1}
    while isinstance(found := rank.run(function, *arguments, **attempt, reports=len(rank.messages)), Interrupted):
        rank.clear()
        attempt["number"] += 1
    return found, attempt["number"]


def stopping(rank: FunctionRank, where: str, step: int) -> Callable[[str, int], None]:
    """Return what stops the function once at this place."""
    stopped: list[int] = []

    def on_place(here: str, at: int) -> None:
        if here == where and at >= step and not stopped:
            stopped.append(at)
            rank.interrupt()
            time.sleep(0.2)  # the signal comes here, if nothing holds it up

    return on_place


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("ledger", "rates", "step", "epoch", "evaluations"):
        assert one[name] == other[name], name
    assert [name for name, value in one["weights"].items() if not torch.equal(value, other["weights"][name])] == []


class Watched(torch.optim.AdamW):
    """Calls `on_place` when its step is made."""

    on_place: Any = staticmethod(lambda where, step: None)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        first = next(each for group in self.param_groups for each in group["params"])
        self.on_place("in the optimizer", int(self.state[first]["step"]))
        return found


@pytest.mark.parametrize("where", ["forward", "before", "in the optimizer", "after", "evaluation", "save"])
def test_it_is_stopped_once(rank: FunctionRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """In one process, the masks of dropout are equal, too."""
    config = {
        **DROPOUT,
        "folder": str(tmp_path),
        "arguments": {"save_strategy": "steps", "save_steps": 5},
        "optimizer": Watched,
    }
    undisturbed, attempts = run(rank, train_func, config)
    assert attempts == 1
    stop = stopping(rank, where, 5)
    monkeypatch.setattr(Watched, "on_place", staticmethod(stop))
    found, attempts = run(rank, lambda: train_func({**config, "on_place": stop}))
    assert attempts == 2
    assert_equal(found, undisturbed)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_worker_is_missing_from_the_beginning(rank: FunctionRank, tmp_path: Path, kind: str) -> None:
    """A step has the samples of both workers. The loss of an evaluation is what transformers has with both: that of models that do
    not divide it by the number of labels is multiplied by the number of workers, since transformers 5."""
    config = {"kind": kind, "samples": 48, "folder": str(tmp_path)}
    expected = rank.run(train_func, {**config, "arguments": {"gradient_accumulation_steps": 4}}, run=1)
    found = rank.run(train_func, {**config, "arguments": {"gradient_accumulation_steps": 2}}, run=2, workers=2)
    multiplies = kind == "bert" and hasattr(Trainer, "loss_is_scaled_for_ga")
    evaluations = [(step, loss * 2 if multiplies else loss) for step, loss in expected.pop("evaluations")]
    assert [step for step, _ in found["evaluations"]] == [step for step, _ in evaluations] != []
    for (_, loss), (_, usual) in zip(found.pop("evaluations"), evaluations, strict=True):
        assert loss == pytest.approx(usual, rel=1e-6)
    assert_equal({**found, "evaluations": []}, {**expected, "evaluations": []})
    assert found["step"] == 6


def train_scaled(config: dict[str, Any], backward: list[float]) -> dict[str, Any]:
    """Train with a loss scaler, as in fp16, which transformers refuses on a CPU. Note the losses of which gradients are computed."""
    trainer = make_trainer(config)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    own = trainer.accelerator.backward

    def note(loss: Any, **options: Any) -> None:
        backward.append(float(loss.detach()))
        own(loss, **options)

    trainer.accelerator.backward = note
    prepare_trainer(trainer).train()
    return result_of(trainer)


@pytest.mark.parametrize(
    ("given", "factor"),
    [({"kind": "bert"}, 2), ({"kind": "llama"}, 2), ({"kind": "mean", "own_loss": True}, 1), ({"means": True}, 1)],
)
def test_which_steps_overflow_does_not_depend_on_the_ranks(
    rank: FunctionRank, tmp_path: Path, given: dict[str, Any], factor: int
) -> None:
    """Both workers have the losses that each of them has with the other one: those of a process that has all parts, where they are
    multiplied by the ranks or divided by the batches of a rank's step, times `factor`. The weights are those without a scaler."""
    config = {**given, "samples": 48, "folder": str(tmp_path), "arguments": {"max_grad_norm": 0}}
    all_parts = {**config, "arguments": {"max_grad_norm": 0, "gradient_accumulation_steps": 4}}
    expected, backward = list[float](), list[float]()
    rank.run(train_scaled, all_parts, expected, run=1)
    unscaled = rank.run(train_func, config, run=2, workers=2)
    found = rank.run(train_scaled, config, backward, run=3, workers=2)
    assert backward[:4] == [loss * factor for loss in expected[:4]]
    assert_equal(found, unscaled)
    assert found["losses"] == unscaled["losses"]


@pytest.mark.parametrize(("where", "step"), [("evaluation", 10), ("end", 0)])
def test_early_stopping_and_the_best_model(rank: FunctionRank, tmp_path: Path, where: str, step: int) -> None:
    """At the end, the weights are already those of the best model, and the last commit has the newest ones."""
    config = {"kind": "bert", "samples": 64, "patience": 2, "arguments": STOPPING}
    undisturbed, _ = run(rank, train_func, {**config, "folder": str(tmp_path / "undisturbed")})
    assert undisturbed["best"][0] < undisturbed["step"] < 160, "it stopped early"
    stop = stopping(rank, where, step)
    found, attempts = run(rank, lambda: train_func({**config, "folder": str(tmp_path / "stopped"), "on_place": stop}))
    assert attempts == 2
    assert_equal(found, undisturbed)
    assert [found[name] == undisturbed[name] for name in ("best", "files")] == [True, True]


BY_LENGTH = (
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)


@pytest.mark.parametrize(
    ("kind", "accumulation", "given"), [("llama", 1, {}), ("llama", 2, {}), ("bert", 2, {}), ("llama", 2, BY_LENGTH)]
)
def test_undisturbed_it_has_the_bits_of_a_plain_trainer(
    rank: FunctionRank, tmp_path: Path, kind: str, accumulation: int, given: dict[str, Any]
) -> None:
    """Of one process, also with dropout, with batches that do not divide the samples, and with an order that has no seed."""
    given = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 1, **given}
    config = {"kind": kind, "dropout": 0.1, "samples": 43, "folder": str(tmp_path), "arguments": given}
    plain, _ = run(rank, lambda: train_func({**config, "elastic": False}))
    undisturbed, _ = run(rank, train_func, config)
    assert undisturbed["losses"] == plain["losses"] and len(plain["losses"]) > 1
    assert_equal(undisturbed, plain)


class ScheduleFree(torch.optim.SGD):
    """Has another set of weights for evaluations, as schedule-free optimizers have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_the_weights_of_an_optimizer_that_changes_them_elsewhere_are_copied(rank: FunctionRank, tmp_path: Path) -> None:
    config = {**DROPOUT, "folder": str(tmp_path), "optimizer": ScheduleFree}
    undisturbed, _ = run(rank, train_func, config)
    stop = stopping(rank, "before", 5)
    found, attempts = run(rank, lambda: train_func({**config, "on_place": stop}))
    assert attempts == 2
    assert_equal(found, undisturbed)


def test_only_what_the_optimizer_changes_is_kept(rank: FunctionRank, tmp_path: Path) -> None:
    """As under PEFT. The rest is as the function creates it."""

    def function(on_place: Any = None) -> dict[str, Any]:
        trainer = make_trainer({"kind": "bert", "samples": 16, "folder": str(tmp_path)})
        for name, parameter in trainer.model.named_parameters():
            parameter.requires_grad = "classifier" in name
        trainer.on_place = on_place or trainer.on_place
        before = [len(trainer.get_train_dataloader()), trainer.evaluate()["eval_loss"]]
        prepare_trainer(trainer)
        assert before == [len(trainer.get_train_dataloader()), trainer.evaluate()["eval_loss"]]
        trainer.train()
        return result_of(trainer)

    undisturbed, _ = run(rank, function)
    found, attempts = run(rank, function, stopping(rank, "forward", 2))
    assert attempts == 2
    assert_equal(found, undisturbed)
    kept = rank.committed()["trainer"]["moving"]
    assert sorted(kept["weights"]) == ["classifier.bias", "classifier.weight"]


def test_a_checkpoint_of_the_trainer_is_reported_once(rank: FunctionRank, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2}

    def function(on_place: Any = None) -> int:
        trainer = make_trainer({"kind": "mean", "samples": 32, "folder": str(tmp_path / "out"), "arguments": saving})
        trainer.on_place = on_place or trainer.on_place
        trainer.add_callback(RayTrainReportCallback())
        trainer.callback_handler.callbacks.reverse()  # so that the function is stopped after the report
        prepare_trainer(trainer).train()
        found = train.get_checkpoint()
        assert isinstance(found, Checkpoint)
        with found.as_directory() as folder:
            assert {"trainer_state.json", "optimizer.pt"} <= {
                path.name for path in Path(folder, "checkpoint").iterdir()
            }
        return int(trainer.state.global_step)

    steps, attempts = run(rank, function, stopping(rank, "save", 4))
    assert (steps, attempts) == (8, 2)
    rows = [metrics for _, metrics, _ in rank.messages]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert all("eval_loss" in row and "learning_rate" in row for row in rows)


def test_a_run_continues_from_a_reported_checkpoint(rank: FunctionRank, tmp_path: Path) -> None:
    """After the failure of all workers, or in another run."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    config = {**DROPOUT, "samples": 48, "folder": str(tmp_path), "arguments": saving}
    undisturbed, _ = run(rank, train_func, config)

    def function() -> dict[str, Any]:
        trainer = make_trainer(config)
        prepare_trainer(trainer).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        return result_of(trainer)

    found, _ = run(rank, function)
    assert found["ledger"] == undisturbed["ledger"][4:]
    assert all(torch.equal(value, undisturbed["weights"][name]) for name, value in found["weights"].items())


def test_the_mixin(rank: FunctionRank, tmp_path: Path) -> None:
    class Doubled(Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            return 2 * super().compute_loss(*given, **more)

    class Right(Elastic, Doubled):
        pass

    class Wrong(Elastic, Trainer):  # type: ignore[misc]
        compute_loss = Doubled.compute_loss

    def function(kind: Any) -> tuple[Any, float]:
        args = arguments(str(tmp_path), max_steps=2, eval_strategy="no")
        trainer = kind(model=MeanLoss(), args=args, train_dataset=Tokens(16, False))
        trainer.train()
        return args.gradient_accumulation_steps, trainer.state.log_history[0]["loss"]

    accumulation, doubled = run(rank, function, Right)[0]
    assert accumulation == 2 and doubled > 1.5
    with pytest.raises(ValueError, match="Wrong overrides compute_loss of Elastic: put Elastic before the class"):
        rank.run(function, Wrong)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Tokens(8, False)[index] for index in range(8))


class Batches:
    """As `iter_torch_batches` of a Ray Dataset's shard returns them."""

    __module__ = "ray.data.iterator"

    def __iter__(self) -> Iterator[Any]:
        rows = Tokens(8, False)
        return iter([default_collate([rows[0], rows[1]]), default_collate([rows[2]])])


def test_batches_of_ray_data(rank: FunctionRank, tmp_path: Path) -> None:
    """As in Ray: the Trainer takes them as they are, and starts again after a worker failure."""

    def function() -> tuple[list[int], list[int]]:
        args = arguments(str(tmp_path), max_steps=2, gradient_accumulation_steps=1, eval_steps=2)
        data = {"train_dataset": Batches(), "eval_dataset": {"one": Batches()}}
        trainer = prepare_trainer(Trainer(model=MeanLoss().eval(), args=args, **data))
        trainer.model.train = lambda mode=True: trainer.model  # a batch of one sample has no variance
        trainer.train()
        assert not isinstance(trainer, Elastic)
        return [len(each["labels"]) for each in trainer.get_train_dataloader()], trainer.state.log_history

    sizes, logs = run(rank, function)[0]
    assert sizes == [2, 1]
    assert any("eval_one_loss" in each for each in logs)


class EndsEpochs(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({"accelerator_config": {"split_batches": True}}, {}, "with split_batches: leave it out, or pass"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"ignore_data_skip": True}, {}, "ignore_data_skip"),
        (
            {"average_tokens_across_devices": False},
            {},
            "average_tokens_across_devices=False, which weighs tokens by their rank",
        ),
        ({"max_steps": 2}, {"train_dataset": Endless()}, "an IterableDataset"),
        (
            {"optim": "galore_adamw_layerwise", "optim_target_modules": ["head"]},
            {},
            "changes weights in the backward pass",
        ),
        ({}, {"callbacks": [EndsEpochs()]}, "ended an epoch early"),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 32}, {}, "so no step is left"),
    ],
)
def test_what_cannot_continue_is_refused(
    rank: FunctionRank, tmp_path: Path, given: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    def function() -> None:
        args = arguments(str(tmp_path), eval_strategy="no", **given)
        prepare_trainer(Trainer(model=MeanLoss(), args=args, **{"train_dataset": Tokens(16, False), **more})).train()

    with pytest.raises(ValueError, match=message):
        rank.run(function)


def test_a_function_trains_one_elastic_trainer(rank: FunctionRank, tmp_path: Path) -> None:
    def function() -> None:
        for _ in range(2):
            args = arguments(str(tmp_path), max_steps=1, eval_strategy="no")
            prepare_trainer(Trainer(model=MeanLoss(), args=args, train_dataset=Tokens(16, False))).train()

    with pytest.raises(ValueError, match="has trained with two prepared Trainers"):
        rank.run(function)


def test_arguments_of_the_driver_are_refused(tmp_path: Path) -> None:
    """Each of two workers would train a model of its own."""
    args: TrainingArguments = arguments(str(tmp_path), eval_strategy="no")
    rank = FunctionRank(0, 2)
    try:
        with pytest.raises(ValueError, match="are for 1 processes, and 2 workers run this function"):
            rank.run(lambda: prepare_trainer(Trainer(model=MeanLoss(), args=args, train_dataset=Tokens(16, False))))
    finally:
        rank.close()


class OwnLoss(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs, **kwargs)["loss"]


def reads_in_a_closure(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return (lambda: inputs["loss"] / num_items_in_batch)()


def reads_two_at_once(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return inputs / num_items_in_batch


def reads_in_a_list(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return sum([each / num_items_in_batch for each in inputs])


def divides_by_micro_batches(trainer: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return (lambda: inputs / trainer.args.gradient_accumulation_steps)()


def reads_all(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    return inputs / locals()["num_items_in_batch"]


def reads_none(
    model: Any, inputs: Any, return_outputs: bool = False, *, num_items_in_batch: Any = None, **kwargs: Any
) -> Any:
    return model(**inputs).loss


def test_a_loss_that_ignores_the_number_of_labels() -> None:
    reading = [
        Trainer.compute_loss,
        OwnLoss.compute_loss,
        reads_in_a_closure,
        reads_two_at_once,
        reads_in_a_list,
        divides_by_micro_batches,
        reads_all,
        wraps(reads_none)(partial(reads_none)),
    ]
    assert [ignores_items(each) for each in [*reading, reads_none]] == [False] * 8 + [True]


class OwnLoader(Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=8))


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        (OwnLoss, "llama", "OwnLoss.compute_loss can read num_items_in_batch"),
        (OwnLoader, "mean", "has batches of 8: let both be equal"),
    ],
)
def test_classes_that_would_have_other_gradients_are_refused(
    rank: FunctionRank, tmp_path: Path, kind: Any, model: str, message: str
) -> None:
    def function() -> int:
        data = Tokens(16, texts=model == "llama")
        trainer = kind(model=make_model(model), args=arguments(str(tmp_path), eval_strategy="no"), train_dataset=data)
        prepare_trainer(trainer).train()
        return int(trainer.state.global_step)

    with pytest.raises(ValueError, match=message):
        rank.run(function)
    if kind is OwnLoss and hasattr(Trainer, "loss_is_scaled_for_ga"):
        kind.loss_is_scaled_for_ga = False
        assert rank.run(function) == 4


class OwnElastic(Elastic, Trainer):  # type: ignore[misc]
    pass


def test_a_class_with_elastic_is_prepared_too(rank: FunctionRank, tmp_path: Path) -> None:
    def function() -> Any:
        args = arguments(str(tmp_path), max_steps=1, eval_strategy="no")
        trainer = OwnElastic(model=MeanLoss(), args=args, train_dataset=Tokens(16, texts=False))
        with pytest.raises(ValueError, match="OwnElastic is elastic, which cannot be switched off"):
            prepare_trainer(trainer, elastic=False)
        again = prepare_trainer(prepare_trainer(trainer, seed=7))
        again.train()
        return type(again).__mro__.count(Elastic), again.seed_of_parts, again.state.global_step

    assert rank.run(function) == (1, 7, 1)


class Draws(TrainerCallback):  # type: ignore[misc]
    """Leaves the random numbers elsewhere, as the parts of another rank would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.rand(3)


@pytest.mark.parametrize("given", [{"weighted": True}, {"arguments": BY_LENGTH}])
def test_with_a_seed_an_order_does_not_depend_on_the_rank(
    rank: FunctionRank, tmp_path: Path, given: dict[str, Any]
) -> None:
    def function(draws: bool) -> dict[str, Any]:
        trainer = make_trainer({**DROPOUT, "folder": str(tmp_path), **given})
        if draws:
            trainer.add_callback(Draws)
        prepare_trainer(trainer, seed=7).train()
        return result_of(trainer)

    assert_equal(run(rank, function, True)[0], run(rank, function, False)[0])


def test_a_sampler_sees_the_accumulation_of_the_first_attempt(rank: FunctionRank, tmp_path: Path) -> None:
    """Of it and the batch size, `group_by_length` makes its groups."""

    accumulations: list[int] = []

    class Sees(Recording):
        def _get_train_sampler(self, *data: Any) -> Any:
            accumulations.append(self.args.gradient_accumulation_steps)
            return super()._get_train_sampler(*data)

    def function() -> None:
        trainer = make_trainer({**DROPOUT, "folder": str(tmp_path), "arguments": {"max_steps": 1}})
        trainer.__class__ = Sees
        prepare_trainer(trainer).train()

    rank.run(function, workers=2)
    assert accumulations == [2]


def test_an_order_is_drawn_once_in_an_epoch() -> None:
    """Of samplers without a seed, such as those for lengths, a second order would have other samples."""
    sampler = PartSampler(Windows(8, 2, 2, 1, 0, 1), RandomSampler(range(8)), lambda: 0)
    first = list(sampler)
    assert list(sampler) == first


class Epochs(Tokens):
    """Has other samples in each epoch, as with an augmentation."""

    def __init__(self, epochs: list[int]) -> None:
        super().__init__(32, texts=False)
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        self._epochs.append(epoch)


def test_a_data_set_knows_the_epoch(rank: FunctionRank, tmp_path: Path) -> None:
    epochs: list[int] = []

    def function(on_place: Any) -> None:
        trainer = make_trainer({"kind": "mean", "folder": str(tmp_path)})
        trainer.train_dataset, trainer.on_place = Epochs(epochs), on_place
        prepare_trainer(trainer).train()

    assert run(rank, function, stopping(rank, "forward", 6))[1] == 2
    assert epochs == [0, 1, 1]


def frozen(trainer: Any) -> list[Any]:
    trainer.model.embed.weight.requires_grad = False
    torch.nn.init.normal_(trainer.model.embed.weight)
    return [*trainer.model.head.parameters()]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (frozen, "embed.weight, which the optimizer does not change, has other values than before"),
        (lambda trainer: torch.nn.Linear(2, 2).parameters(), "has 2 parameters that are not in the model"),
    ],
)
def test_parameters_that_a_commit_does_not_have(
    rank: FunctionRank, tmp_path: Path, parameters: Any, message: str
) -> None:
    stop = stopping(rank, "forward", 2)

    def function() -> None:
        trainer = make_trainer({"kind": "mean", "samples": 16, "folder": str(tmp_path)})
        torch.seed()
        trainer.optimizer, trainer.on_place = torch.optim.SGD(parameters(trainer), lr=0.1), stop
        prepare_trainer(trainer).train()

    with pytest.raises(ValueError, match=message):
        run(rank, function)


class Iterates(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.places = (place for place in range(9))


class Accumulates(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.gradient_accumulation_steps = 3


class Moves(TrainerCallback):  # type: ignore[misc]
    """Changes weights that the optimizer does not have."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.embed.weight.mul_(0.9)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Iterates, "cannot copy the attribute places of Iterates, a generator"),
        (Accumulates, "gradient_accumulation_steps was changed to 3"),
        (Moves, "embed.weight, which the optimizer does not change, was changed by a callback"),
    ],
)
def test_callbacks_whose_changes_a_commit_cannot_have(
    rank: FunctionRank, tmp_path: Path, kind: Any, message: str
) -> None:
    def function() -> None:
        trainer = make_trainer({"kind": "mean", "samples": 32, "folder": str(tmp_path)})
        trainer.model.embed.weight.requires_grad = False
        trainer.add_callback(kind())
        prepare_trainer(trainer).train()

    with pytest.raises(ValueError, match=message):
        rank.run(function)


class Shrinks(TrainerCallback):  # type: ignore[misc]
    """Changes weights after the optimizer's step."""

    def __init__(self, on_place: Any) -> None:
        self.on_place = on_place

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.head.weight.mul_(0.9)
        self.on_place("shrunk", state.global_step)


@pytest.mark.parametrize("step", [1, 2])
def test_a_callback_changes_weights(rank: FunctionRank, tmp_path: Path, step: int) -> None:
    """From the second step on, commits are copies. In the first, the weights before the change are lost, which is an error."""

    def function(on_place: Any) -> dict[str, Any]:
        trainer = make_trainer({"kind": "mean", "samples": 32, "folder": str(tmp_path)})
        trainer.add_callback(Shrinks(on_place))
        prepare_trainer(trainer).train()
        return result_of(trainer)

    undisturbed, _ = run(rank, function, lambda where, step: None)
    if step == 1:
        with pytest.raises(ValueError, match="changed weights or the optimizer's state outside of"):
            run(rank, function, stopping(rank, "shrunk", step))
    else:
        assert_equal(run(rank, function, stopping(rank, "shrunk", step))[0], undisturbed)


def test_an_evaluation_at_the_start_is_made_once(rank: FunctionRank, tmp_path: Path) -> None:
    evaluated: list[int] = []

    class Evaluates(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluated.append(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and len(evaluated) == 1:
                evaluated.append(-1)
                rank.interrupt()
                time.sleep(0.2)

    def function() -> None:
        args = arguments(str(tmp_path), max_steps=3, eval_strategy="steps", eval_steps=3, eval_on_start=True)
        data = Tokens(32, texts=False)
        trainer = Trainer(model=MeanLoss(), args=args, train_dataset=data, eval_dataset=data, callbacks=[Evaluates()])
        prepare_trainer(trainer).train()

    assert run(rank, function)[1] == 2 and evaluated == [0, -1, 3]


def test_the_first_commit_is_not_made(rank: FunctionRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is stopped as its first step begins, and begins anew."""
    stopped: list[int] = []
    own = Continuation._look_for_changes

    def look(self: Continuation) -> None:
        own(self)
        if not stopped:
            stopped.append(1)
            monkeypatch.setattr(type(self._session), "ensure_whole", stop)

    def stop(self: Any) -> None:
        monkeypatch.undo()
        rank.interrupt()
        time.sleep(0.2)

    monkeypatch.setattr(Continuation, "_look_for_changes", look)
    assert run(rank, train_func, {"kind": "mean", "samples": 32, "folder": str(tmp_path)})[1] == 2


class Begins(TrainerCallback):  # type: ignore[misc]
    """Makes the optimizer's state before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.step()


@pytest.mark.filterwarnings("ignore:train.elastic.. was called outside")
def test_a_callback_steps_before_the_first_step_and_outside_of_a_trainer(rank: FunctionRank, tmp_path: Path) -> None:
    def function() -> dict[str, Any]:
        trainer = make_trainer({"kind": "mean", "samples": 32, "folder": str(tmp_path)})
        trainer.add_callback(Begins())
        prepare_trainer(trainer).train()
        return result_of(trainer)

    found = rank.run(function)
    assert found["step"] == 8
    assert_equal(function(), found)


class Holds(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.locks, self.counts = {"a": threading.Lock()}, {"a": 0}
        self.teacher, self.shadow, self.rows = torch.nn.Linear(3, 3), [torch.zeros(3)], [{"a": 1}]


def test_what_has_not_changed_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensor.data` is changed without a new version of the tensor. A lock stays as it is, and a count beside it is kept."""
    owner = Holds()
    watched = Attributes({"Holds": owner}, {})

    def refuse(*given: Any) -> Any:
        raise AssertionError("something was copied")

    with monkeypatch.context() as patch:
        patch.setattr("raysgd.train.huggingface.attributes.copied", refuse)
        patch.setattr("copy.deepcopy", refuse)
        assert watched.changed() == {"Holds": {}}
    owner.teacher.weight.data.mul_(0.5)
    owner.shadow[0] += 1
    owner.rows[0]["a"] = owner.counts["a"] = 2
    kept = watched.changed()
    assert {*kept["Holds"]} == {"teacher", "shadow", "rows", "counts"}
    weight = owner.teacher.weight.detach().clone()
    again = Holds()
    Attributes({"Holds": again}, {}).put_back(kept)
    assert torch.equal(again.teacher.weight, weight) and torch.equal(again.shadow[0], torch.ones(3))
    assert (again.rows, again.counts) == ([{"a": 2}], {"a": 2})


class Mode(enum.Enum):
    FIRST, SECOND = 1, 2


def test_another_function_layer_or_member_of_an_enum_is_put_back_and_leaves_the_first_one_as_it_is() -> None:
    owner: Any
    kept = {}
    for attempt in range(2):
        owner, layers = Holds(), {"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)}
        weights = [each.weight for each in layers.values()]
        owner.mode, owner.layer = Mode.FIRST, layers["one"]
        owner.bound, owner.part = owner.on_log, partial(max, 1)
        watched = Attributes({"Holds": owner}, layers)
        if attempt:
            watched.put_back(kept)
        else:
            owner.mode, owner.layer = Mode.SECOND, layers["two"]
            owner.bound, owner.part = owner.on_save, partial(max, 5)
            kept = watched.changed()
    assert owner.mode is Mode.SECOND and owner.layer is layers["two"]
    assert owner.bound == owner.on_save and owner.part(0) == 5
    assert [each.weight for each in layers.values()] == weights and Mode.FIRST.value == 1


def test_what_stops_being_copyable_is_refused() -> None:
    owner = Holds()
    watched = Attributes({"Holds": owner}, {})
    owner.counts["a"] = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot copy the attribute counts of Holds, a dict"):
        watched.changed()
