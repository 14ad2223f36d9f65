"""TFTrainer with one worker in this process: training, metrics, checkpoints, and invalid arguments."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from raysgd import AutoCheckpoint, ElasticConfig  # noqa: E402
from raysgd.constants import BATCH_SIZE  # noqa: E402
from raysgd.errors import CheckpointError, ConfigError  # noqa: E402
from raysgd.tf import TFTrainer, TrainingOperator  # noqa: E402
from tests.tf import small  # noqa: E402
from tests.tf.small import ROWS, Small, arrays, data_creator, model_creator  # noqa: E402


def of_creators(config: dict[str, Any] | None = None, **given: Any) -> TFTrainer:
    return TFTrainer(model_creator, data_creator, config or {}, **given)


def alone(epochs: int, **fit: Any) -> Any:
    """Return the results of Keras' own `fit`."""
    train, _ = data_creator({})
    model = model_creator({})
    model.build((None, 8))
    model.fit(train, epochs=epochs, verbose=0, **fit)
    return model


def test_training_equals_keras() -> None:
    model = alone(2)
    with of_creators() as trainer:
        first, second = trainer.train(), trainer.train()
        result = trainer.validate()
        mine = trainer.get_model().get_weights()
    for expected, got in zip(model.get_weights(), mine, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    assert second["train_loss"] < first["train_loss"]
    assert list(first)[:3] == ["epoch", "batch_count", "num_samples"]
    assert (first["batch_count"], first["num_samples"], second["epoch"]) == (6, ROWS, 2)
    assert {"train_accuracy", "last_train_loss"} <= set(first)
    loss, accuracy = model.evaluate(data_creator({})[1], verbose=0)
    assert result["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert result["validation_accuracy"] == pytest.approx(accuracy, rel=1e-5)


def test_fit_config_counts_epochs_and_calls_callbacks() -> None:
    heard: list[Any] = []

    class Listener(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            heard.append((epoch, sorted(logs or {})))
            self.model.stop_training = epoch == 2

    config = {"fit_config": {"epochs": 5, "callbacks": [Listener()], "steps_per_epoch": 6, "verbose": 0}}
    with of_creators(config) as trainer:
        result = trainer.train()
        assert [epoch for epoch, _ in heard] == [0, 1, 2]
        assert heard[0][1] == ["accuracy", "loss"]
        assert result["epoch"] == 3 and "stop_training" not in result
        assert trainer.train()["epoch"] == 8, "the next call has all its epochs"


def test_calls_of_steps_per_epoch_are_epochs_of_endless_data(tmp_path: Path) -> None:
    def endless(config: dict[str, Any]) -> tuple[Any, Any]:
        train, validation = data_creator(config)
        return train.repeat(), validation

    def made(**given: Any) -> TFTrainer:
        checkpoints = AutoCheckpoint(path=tmp_path)
        config = {"fit_config": {"steps_per_epoch": 4, **given}}
        return TFTrainer(model_creator, endless, config, checkpoints=checkpoints, resume="auto")

    with made() as trainer:
        assert [trainer.train()["epoch"] for _ in trainer.epochs(2)] == [1, 2]
        state = trainer.state_dict()
    with made(epochs=2) as trainer:
        assert trainer.resumed_from is not None and [trainer.train()["epoch"] for _ in trainer.epochs(3)] == [4]
        assert trainer.history.of("train")[-1]["epoch"] == 4 and "epoch 4" in repr(trainer)
    assert (state["epoch"], state["position"]["epoch"]) == (2, 1), "there is one pass over the data"
    with TFTrainer(model_creator, endless, {"fit_config": {"steps_per_epoch": 4}}) as trainer:
        for epoch in (0, 5):  # set by the user
            trainer.load_state_dict({**state, "epoch": epoch})
            assert [trainer.train()["epoch"] for _ in range(2)] == [epoch + 1, epoch + 2]
        state["epoch"] = state["position"]["epoch"]
        del state["position"]["counted"]  # as in files of earlier versions
        trainer.load_state_dict(state)
        assert trainer.train(num_steps=2)["epoch"] == 1
        assert trainer.train()["epoch"] == 3
        assert trainer.train(num_steps=2)["epoch"] == 3


class OwnSteps(keras.Model):  # type: ignore[misc]
    def train_step(self, data: Any) -> Any:
        return {"loss": 0.0}


class OwnTest(keras.Model):  # type: ignore[misc]
    def test_step(self, data: Any) -> Any:
        return {"loss": 0.0}


@pytest.mark.parametrize(
    ("kind", "step", "method"), [(OwnSteps, "train_step", "train_batch"), (OwnTest, "test_step", "validate_batch")]
)
def test_a_step_that_would_not_be_called_is_refused(kind: Any, step: str, method: str) -> None:
    def create(config: dict[str, Any]) -> Any:
        x = keras.Input((8,))
        model = kind(x, keras.layers.Dense(3)(x))
        model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    class Registers(Small):
        def setup(self, config: dict[str, Any]) -> None:
            model = create(config)
            self.register(models=model, optimizers=model.optimizer, criterion=model.loss)

    says = f"{kind.__name__} has a {step} of its own, which raysgd does not call: write {method} in a TrainingOperator"
    Registers.train_batch = TrainingOperator.train_batch  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=says):
        TFTrainer(training_operator_cls=Registers)
    with pytest.raises(ConfigError, match=says):
        TFTrainer(create, data_creator)
    loop = {"train_batch": "train_epoch", "validate_batch": "validate"}[method]
    for written in (method, loop):  # which may call the model's step
        TFTrainer(training_operator_cls=type("Written", (Registers,), {written: lambda *given: {}})).shutdown()


def test_validation_data_with_names() -> None:
    class Named(Small):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            data = tf.data.Dataset.from_tensor_slices(small.make_data())
            parts = {"first": data.take(30).batch(8), "rest": data.skip(30).batch(8)}
            self.register_data(train_dataset=data.batch(8), validation_dataset=parts)

    with TFTrainer(training_operator_cls=Named) as trainer:
        found = trainer.validate()
        features, labels = small.make_data()
        model, loss = trainer.get_model(), trainer.get_local_operator().criterion
        for name, part in (("first", slice(30)), ("rest", slice(30, None))):
            output = model(features[part])
            right = float(np.mean(np.argmax(output, axis=1) == labels[part]))
            assert found[f"val_{name}_loss"] == pytest.approx(float(loss(labels[part], output)), rel=1e-5)
            assert found[f"val_{name}_hits"] == pytest.approx(right)
        assert found["num_samples"] == ROWS and found["batch_count"] == 4 + 9


@pytest.mark.parametrize("name", ["train_dataset", "validation_dataset", "test_dataset"])
def test_arrays_are_no_batches(name: str) -> None:
    class Registers(Small):
        def setup(self, config: dict[str, Any]) -> None:
            self.register_data(**{name: small.make_data()})

    with pytest.raises(ConfigError, match=rf"{name} must be .*, got arrays: pass .*from_tensor_slices\(\(x, y\)\)"):
        TFTrainer(training_operator_cls=Registers)
    with pytest.raises(ConfigError, match=r"train_dataset must be .* of batches, got arrays"):
        TFTrainer(model_creator, lambda config: (small.make_data(), None))


class Smoothed(keras.Model):  # type: ignore[misc]
    """Has another loss in trainings than in validations."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + (100.0 if training else 0.0)


class Raised(keras.Model):  # type: ignore[misc]
    """Has the same loss in both, as Keras before 3.3."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight) + 100.0


@pytest.mark.parametrize("kind", [Smoothed, Raised])
def test_a_models_own_loss_knows_whether_it_is_a_training(kind: Any) -> None:
    def create(config: dict[str, Any]) -> Any:
        x = keras.Input((8,))
        model = kind(x, keras.layers.Dense(3)(x))
        model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with TFTrainer(create, data_creator) as trainer:
        assert trainer.train()["train_loss"] > 100
        expected = trainer.get_model().evaluate(data_creator({})[1], verbose=0)
        assert trainer.validate()["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_fit_arguments_that_keras_ignores_are_accepted() -> None:
    ignored = {"workers": 2, "use_multiprocessing": True, "max_queue_size": 10, "shuffle": True}
    with of_creators({"fit_config": {"epochs": 2, **ignored}}) as trainer:
        assert trainer.train()["epoch"] == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"fit_config": {"batch_size": 3}}, r"call .batch\(n\) on the data set"),
        ({"fit_config": {"validation_split": 0.1}}, "returns the validation data second"),
        ({"fit_config": {"class_weight": {0: 2.0}}}, r"give \(x, y, sample_weight\), or write train_batch"),
        ({"fit_config": {"validation_data": 1}}, "validate"),
        ({"fit_config": {"sample": 2}}, "'sample': only epochs, .* have an effect"),
        ({"evaluate_config": {"sample_weight": 1}}, "sample_weight"),
        ({"fit_config": {"epochs": 0}}, "at least 1"),
        ({BATCH_SIZE: 0}, "batch of all workers"),
    ],
)
def test_fit_arguments_without_effect_are_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        of_creators(config)


def test_callbacks_of_compiled_models_warn_for_operators(caplog: pytest.LogCaptureFixture) -> None:
    with TFTrainer(training_operator_cls=Small, config={"fit_config": {"epochs": 2, "callbacks": []}}):
        assert "config['fit_config'] has callbacks, which only compiled models use, so it has no effect" in caplog.text


def test_steps_within_a_call_of_keras_are_refused() -> None:
    def create(config: dict[str, Any]) -> Any:
        model = model_creator(config)
        model.compile(optimizer=model.optimizer, loss=model.loss, steps_per_execution=4)
        return model

    with pytest.raises(ConfigError, match=r"compiled with steps_per_execution=4, .* Leave it out"):
        TFTrainer(create, data_creator)


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="training_operator_cls, or model_creator"):
        TFTrainer()
    with pytest.raises(ConfigError, match="not both"):
        TFTrainer(model_creator, data_creator, training_operator_cls=Small)
    with pytest.raises(ConfigError, match="mean the same, and differ"):
        of_creators(num_replicas=2, num_workers=3)
    with pytest.raises(ConfigError, match="min_workers is a field of ElasticConfig: pass elastic="):
        of_creators(min_workers=1)
    with pytest.raises(TypeError, match="TFTrainer takes no argument 'num_replica': did you mean 'num_replicas'"):
        of_creators(num_replica=2)
    with pytest.raises(
        ConfigError, match=r"compares the weights of the ranks, and a TFTrainer does not compare them: leave it"
    ):
        of_creators(elastic=ElasticConfig(on_divergence="raise"))
    with pytest.raises(ConfigError, match="compiled model"):
        TFTrainer(lambda config: small.make_model(), data_creator)


class OfKeras2:
    """Stands for a model of tf_keras, with what raysgd uses of a model before it is registered."""

    optimizer, compiled, trainable_variables = object(), True, ()


def test_a_model_of_keras_2_is_refused_at_once() -> None:
    says = r"models must be a model of Keras 3, .*OfKeras2.*In place of Keras 2 .*TF_USE_LEGACY_KERAS is set\), `import keras`"

    class Old(Small):
        def setup(self, config: dict[str, Any]) -> None:
            self.register(models=OfKeras2(), optimizers=keras.optimizers.SGD(0.1))

    with pytest.raises(ConfigError, match=says):
        TFTrainer(lambda config: OfKeras2(), data_creator)
    with pytest.raises(ConfigError, match=says):
        TFTrainer(training_operator_cls=Old)


def test_a_foreign_checkpoint_changes_nothing(tmp_path: Path) -> None:
    class Other(Small):
        def setup(self, config: dict[str, Any]) -> None:
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
            self.register(models=model, optimizers=keras.optimizers.SGD(0.1))

    with TFTrainer(training_operator_cls=Other) as trainer:
        path = trainer.save(tmp_path / "other.ckpt")
    with of_creators() as trainer:
        before = arrays(trainer.state_dict())
        with pytest.raises(CheckpointError, match=r"other.ckpt: model 0 has 4 variables here and 2"):
            trainer.load(path)
        for old, new in zip(before, arrays(trainer.state_dict()), strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_an_accumulated_batch_counts_if_an_error_follows_it(policy: str) -> None:
    class Accumulating(Small):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
            if policy == "mixed_float16":
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            _, self.optimizer, _ = self.register(models=self.model, optimizers=optimizer, criterion=self.criterion)

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            result = super().train_batch(batch, batch_info)
            if self.global_step == 2 and not marks:
                marks.append("failed")
                raise ZeroDivisionError("planned")
            return result

    marks: list[str] = []
    with TFTrainer(training_operator_cls=Accumulating) as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert trainer.train()["batch_count"] == 11 - 3
        assert trainer.get_local_operator().global_step == 11


class Pair(TrainingOperator):
    """Two models with an optimizer each, trained by a custom batch method."""

    def setup(self, config: dict[str, Any]) -> None:
        keras.mixed_precision.set_dtype_policy(config.get("policy", "float32"))
        try:
            models = [keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]) for _ in range(2)]
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.0)]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        features, labels = small.make_data()
        data = tf.data.Dataset.from_tensor_slices((features, labels.astype("float32")))
        self.register_data(train_dataset=data.batch(20))
        self.learn = tf.function(self._learn)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"loss": self.learn(*batch), "num_samples": len(batch[0])}

    def _learn(self, x: Any, y: Any) -> Any:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                error = tf.cast(model(x, training=True)[:, 0], tf.float32) - y
                loss = tf.reduce_mean(error**2)
            self.step(tape, loss, model=model, optimizer=optimizer)
        return loss


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_several_models_in_a_custom_batch_in_any_precision(policy: str) -> None:
    with TFTrainer(training_operator_cls=Pair, config={"policy": policy}) as trainer:
        start = trainer.state_dict()["models"]
        for _ in range(3):
            result = trainer.train()
        end = trainer.state_dict()["models"]
    assert result["num_samples"] == ROWS and np.isfinite(result["loss"])
    moved = [float(np.abs(new[0] - old[0]).max()) for old, new in zip(start, end, strict=True)]
    assert moved[0] > 0.01 and moved[1] == 0


def test_a_batch_returns_numbers_of_any_kind_under_names() -> None:
    values: dict[Any, Any] = {"nan": float("nan"), "scalar": tf.constant(2.0), "half": np.float16(2)}

    class Returning(Small):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return {**super().train_batch(batch, batch_info), **values}

    with TFTrainer(training_operator_cls=Returning, config={}) as trainer:
        result = trainer.train()
        values[1] = 1.0
        with pytest.raises(TypeError, match=r"Returning\.train_batch .*name of a metric must be a string, got 1"):
            trainer.train()
        del values[1]
        values["vector"] = tf.ones(3)
        with pytest.raises(
            TypeError, match=r"Returning\.train_batch .*the metric 'vector' is not a number, .*return num"
        ):
            trainer.train()
    assert (result["scalar"], result["half"]) == (2.0, 2.0) and np.isnan(result["nan"])
