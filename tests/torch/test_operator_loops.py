"""The default loops and overrides of them: their arguments and results, and when schedulers step."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import ConfigError, TrainingOptions
from tests.replicas import torch_rank
from tests.torch.small import Line, Numbers, Recording, inline, operator_of, rows, weights


def epoch_with_all(self: Any, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: Any = 0) -> Any:
    return {"seen": sum(1 for _ in iterator), "given": (info, num_steps, epoch_idx)}


def epoch_with_other_names(self: Any, batches: Any, details: Any, num_steps: Any = None) -> Any:
    return {"seen": sum(1 for _ in batches), "given": (details, num_steps)}


def epoch_bare(self: Any, iterator: Any) -> Any:
    return {"seen": sum(1 for _ in iterator), "given": ()}


def epoch_with_anything(self: Any, iterator: Any, **given: Any) -> Any:
    return {"seen": sum(1 for _ in iterator), "given": (given["info"], given["num_steps"], given["epoch_idx"])}


def test_loops_with_any_documented_signature() -> None:
    for override in (epoch_with_all, epoch_with_other_names, epoch_bare, epoch_with_anything):
        with inline(type("Own", (Line,), {"train_epoch": override})) as trainer:
            result = trainer.train(num_steps=2, info={"a": 1})
            assert result["seen"] == 2
            assert result["given"] == ({"a": 1, "epoch_idx": 0}, 2, 0)[: len(result["given"])]
            assert result["batch_count"] == 2, "although the loop does not return it"
            assert trainer.train(info={"a": 1})["seen"] == 1
    for override in (epoch_with_other_names, epoch_bare):
        with inline(type("Own", (Line,), {"validate": override})) as trainer:
            result = trainer.validate(info={"b": 2})
            assert result["seen"] == 3 and result["given"] in ((), ({"b": 2}, None))


class NotesInfo(Line):
    """Returns what each of the four methods gets as `info`, and adds a key to it."""

    def train_epoch(self, iterator: Any, info: Any) -> Any:
        for batch in iterator:
            self.train_batch(batch, info)
        return {"given": dict(info), "noted": info.setdefault("mine", 1)}

    def validate(self, val_iterator: Any, info: Any) -> Any:
        given = [self.validate_batch(batch, info)["given"] for batch in val_iterator]
        return {"given": given[0]}

    def train_batch(self, batch: Any, batch_info: Any) -> Any:
        assert batch_info.keys() == {"epoch_idx"}
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: Any) -> Any:
        return {"given": dict(batch_info)}


def test_info_is_a_dictionary_of_the_call_if_none_is_passed() -> None:
    with inline(NotesInfo) as trainer:
        assert trainer.train()["given"] == {"epoch_idx": 0}
        assert trainer.train()["given"] == {"epoch_idx": 1}, "what a method adds to it is gone with the call"
        assert trainer.validate()["given"] == {}
        given = {"a": 1}
        assert trainer.validate(info=given)["given"] == given


def test_info_reaches_every_batch() -> None:
    with inline(Recording) as trainer:
        trainer.train()
        given = {"note": "x"}
        trainer.train(num_steps=2, info=given)
        trainer.validate(num_steps=1, info={"more": 1})
        infos = operator_of(trainer).infos
    assert [(info["batch_idx"], info["global_step"], info["epoch_idx"]) for info in infos[:5]] == [
        (0, 0, 0), (1, 1, 0), (2, 2, 0), (0, 3, 1), (1, 4, 1),
    ]  # fmt: skip
    assert infos[4]["note"] == "x"
    assert infos[4]["__num_steps__"] == 2
    assert infos[4]["__use_fp16__"] is False
    assert infos[5] == {"batch_idx": 0, "more": 1}
    assert given == {"note": "x"}


def test_train_batch_is_called_with_its_keyword_and_validate_batch_by_position() -> None:
    class Named(Line):
        def train_batch(self, batch: Any, *, batch_info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
            return {"num_samples": len(batch[0])}

        def validate_batch(self, it: Any, inf: dict[str, Any], /) -> dict[str, Any]:  # type: ignore[override]
            return {"num_samples": len(it[0])}

    with inline(Named) as trainer:
        assert trainer.train()["num_samples"] == trainer.validate()["num_samples"] == 12


def test_the_default_results_have_these_keys_in_this_order() -> None:
    with inline() as trainer:
        train, val = trainer.train(), trainer.validate()
        assert list(train) == ["epoch", "batch_count", "num_samples", "train_loss", "last_train_loss"]
        names = ["val_loss", "last_val_loss", "val_accuracy", "last_val_accuracy"]
        assert list(val) == ["batch_count", "num_samples", *names]
        assert (train["epoch"], train["batch_count"], train["num_samples"]) == (1, 3, 12)
        assert all(type(value) in (int, float) for value in [*train.values(), *val.values()])
        assert val["val_accuracy"] == 0


def test_profile() -> None:
    with inline() as trainer:
        assert "profile" not in trainer.train()
        train, val = trainer.train(profile=True), trainer.validate(profile=True)
        assert set(train["profile"]) == {"mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s"}
        assert set(val["profile"]) == {"mean_validation_s", "mean_eval_fwd_s"}
        assert all(seconds > 0 for seconds in train["profile"].values())
        assert "profile" not in trainer.train()


class Counted:
    """What an operator returns in place of a dict. It is truthy or not, as a user's class may be."""

    def __init__(self, rows: int, *, true: bool = True) -> None:
        self.rows, self.true = rows, true

    def __bool__(self) -> bool:
        return self.true


class ReturnsItsOwn(Line):
    """Returns an object from each loop, as RaySGD's segmentation example does with its confusion matrix."""

    def train_epoch(self, iterator: Any, info: Any) -> Any:
        return self.count(iterator, info)

    def validate(self, val_iterator: Any, info: Any) -> Any:
        return self.count(val_iterator, info)

    def count(self, iterator: Any, info: Any) -> Any:
        found = sum(len(features) for features, _ in iterator)
        return info["made"] if "made" in info else Counted(found, true=info.get("true", True))


def test_without_reduction_an_object_of_the_operators_own_is_returned() -> None:
    with inline(ReturnsItsOwn) as trainer:
        for call, name in ((trainer.train, "train_epoch"), (trainer.validate, "validate")):
            for true in (True, False):
                (found,) = call(reduce_results=False, info={"true": true})
                assert type(found) is Counted and found.rows == 12
            assert call(reduce_results=False, info={"made": None}) == [None]
            assert call(reduce_results=False, info={"made": 2.5}) == [2.5]
            remedy = rf"{name} must return a dict of results, got <.*Counted.*call trainer.{call.__name__}\(reduce_results=False\)"
            with pytest.raises(TypeError, match=remedy):
                call()
        assert [row["epoch"] for row in trainer.history.of("train")] == [1, 2, 3, 4]
        assert not [name for row in trainer.history for name in row if name.startswith("__")]


@pytest.mark.parametrize("method", ["train_batch", "validate_batch", "train_epoch", "validate"])
def test_methods_must_return_a_dict(method: str) -> None:
    for answer in (None, 1.0, [1]):
        operator = type("Own", (Line,), {method: lambda self, given, info, answer=answer: answer})
        with inline(operator) as trainer, pytest.raises(TypeError, match=f"^Own.{method} must return a dict"):
            trainer.train() if method.startswith("train") else trainer.validate()


def test_the_default_batch_methods_name_missing_parts() -> None:
    for missing in ("model", "optimizer", "criterion"):
        with inline() as trainer:
            delattr(operator_of(trainer), missing)
            with pytest.raises(ConfigError, match=f"train_batch needs self.{missing}: set it"):
                trainer.train()


def test_one_worker_trains_like_a_plain_loop() -> None:
    """The weights are equal bit for bit, also with shuffling, dropout and several epochs."""

    class Dropping(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return super().train_batch((nn.functional.dropout(batch[0]), batch[1]), batch_info)

    with inline(Dropping, config={"shuffle": True, "rows": 13}) as trainer:
        torch.manual_seed(11)
        for _ in range(3):
            trainer.train()
            trainer.validate()
        trained = weights(trainer)

    plain = Line({"shuffle": True, "rows": 13})
    loaders = plain.loaders(plain.config)
    torch.manual_seed(11)
    for _ in range(3):
        for x, y in loaders["train_loader"]:
            plain.optimizer.zero_grad()
            plain.criterion(plain.model(nn.functional.dropout(x)), y).backward()
            plain.optimizer.step()
        for _ in loaders["validation_loader"]:
            pass
    assert torch.equal(nn.utils.parameters_to_vector(plain.model.parameters()), trained)


def test_an_operator_works_without_a_trainer() -> None:
    """The methods accept plain iterables, for example in a notebook."""
    operator = Recording({})
    result = operator.train_epoch([torch.tensor([1, 2])], {"x": 1})
    assert (result["batch_count"], result["num_samples"], operator.global_step) == (1, 2, 1)
    assert operator.validate(DataLoader(Numbers(4), batch_size=2))["num_samples"] == 4
    assert "info" in inspect.signature(operator.validate).parameters


def test_v1_operators_find_native_amp_under_its_old_name() -> None:
    class Old(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            assert self.use_fp16_native and self._amp_scaler is not None
            with self._amp.autocast():
                return super().train_batch(batch, batch_info)

    with inline(Old, use_fp16=True) as trainer:
        assert trainer.train()["batch_count"] > 0


# -- training that does not train ---------------------------------------------------------------------------


class OwnLoader(Line):
    def train_epoch(self, iterator: Any, info: Any) -> Any:
        loader = self.loaders(self.config)["train_loader"]
        return {"num_samples": sum(self.train_batch(batch, info)["num_samples"] for batch in loader)}


def test_an_own_loop_that_leaves_the_iterator_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with inline(OwnLoader) as trainer:
        result = trainer.train()
        assert (result["epoch"], result["num_samples"]) == (0, 12)
        (message,) = caplog.messages
        assert "OwnLoader.train_epoch has not used the iterator that it got" in message
        assert "counts no batches and no samples, and the epoch stays 0" in message
        trainer.train()
        assert len(caplog.messages) == 1


class Damaged(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise LookupError("sample 5 is damaged")
        return torch.ones(2), torch.ones(1)


class CatchesErrors(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": DataLoader(Damaged(12), batch_size=2)}

    def train_epoch(self, iterator: Any) -> dict[str, Any]:
        while True:
            try:
                batch = next(iterator)
            except LookupError:
                continue
            except StopIteration:
                return {}
            self.train_batch(batch, {})


def test_an_error_of_the_data_that_a_loop_has_caught_is_not_lost() -> None:
    with inline(CatchesErrors) as trainer:
        with pytest.raises(LookupError, match="sample 5 is damaged"):
            trainer.train()
        assert trainer.state_dict()["position"]["step"] == 2


class Wrapped(Line):
    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        return super().train_epoch((batch for batch in iterator), info, num_steps, epoch_idx)


def test_a_repeated_batch_does_not_count_in_a_loop_over_a_wrapped_iterator() -> None:
    """The last step has one sample, which rank 1 has only to take part in it."""
    for kind in (Line, Wrapped):
        rank = torch_rank(kind, {"rows": 5, "batch": 2}, rank=1, ranks=2)
        assert rank.train()["num_samples"] == 2


class Carrying(Line):
    """Sets attributes in each batch."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.hidden: Any = None
        self.calls, self.kept, self.same = 300, None, self.criterion

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.hidden, self.new, self.kept = torch.ones(1), [batch], torch.zeros(1)
        self.calls, self.criterion, self.same = self.calls + 1, self.same, self.criterion
        return super().train_batch(batch, batch_info)


class Kept(Carrying):
    def state_dict(self) -> Any:
        return {"kept": self.kept} if self.config["keeps"] else {"kept": 0, "hidden": 0, "new": 0, "calls": 0}


class Alien(Carrying):
    def state_dict(self) -> Any:
        return [self.hidden, self.new]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Carrying, "train_batch has changed self.calls, self.hidden, self.kept, self.new, which"),
        (Kept, "train_batch has changed self.calls, self.hidden, self.new, which checkpoints"),
        (Alien, ""),
        (Line, ""),
    ],
)
def test_attributes_that_a_batch_has_set_and_nothing_saves_are_named_once(
    kind: Any, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    with inline(kind, config={"keeps": True}) as trainer:
        trainer.train()
        assert [each[: len(names)] for each in caplog.messages] == [names] * bool(names)
        trainer.train()
    with inline(Kept, config={"keeps": False}) as trainer:
        trainer.train()
    assert len(caplog.messages) == bool(names)


class OneMore(Line):
    """Makes one more step, on data of its own."""

    def train_epoch(self, iterator: Any, info: Any) -> Any:
        result = super().train_epoch(iterator, info)
        x, y = rows(4)
        self.zero_grad()
        self.backward(self.criterion(self.model(x), y))
        assert self.step()
        return result


@pytest.mark.parametrize("batch", [3, 4])  # windows of 6 and 6 rows, or of 8 and 4
def test_a_step_after_the_last_batch_has_gradients_of_its_own(batch: int) -> None:
    with inline(OneMore, config={"batch": batch}, options=TrainingOptions(accumulate=2)) as trainer:
        trainer.train()
        found = weights(trainer)
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(2, 1), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for some in (slice(2 * batch), slice(2 * batch, 12), slice(4)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[some]), y[some]).backward()
        optimizer.step()
    torch.testing.assert_close(found, torch.cat([each.detach().flatten() for each in model.parameters()]))
