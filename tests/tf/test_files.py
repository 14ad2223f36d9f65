"""A damaged checkpoint of a TFTrainer is loaded as it was saved, or refused with an error that names it and the
cause. A refused file changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
import numpy as np  # noqa: E402
from click.testing import CliRunner  # noqa: E402

from raysgd import CheckpointError  # noqa: E402
from raysgd.cli import main  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.peek import models_of  # noqa: E402
from tests.storage.damage import flipped  # noqa: E402
from tests.tf.file_cases import (  # noqa: E402
    WRONG,
    Bench,
    Stateful,
    changed,
    of,
    plain,
    saved_part,
    without,
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.trainer.shutdown()


def test_raysgd_info_describes_a_file(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(bench.data)
    done = CliRunner().invoke(main, ["info", str(tmp_path / "model.ckpt")])
    assert done.exit_code == 0 and "TFTrainer.save()" in done.output and "float32" in done.output
    content = bench.data.index(b"NUMPY", len(bench.data) // 2)  # and no header of the archive, which nothing reads
    (tmp_path / "model.ckpt").write_bytes(flipped(bench.data, 8 * content))
    assert CliRunner().invoke(main, ["info", str(tmp_path / "model.ckpt")]).exit_code == 1


# -- wrong contents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", WRONG)
def test_wrong_contents_are_refused(bench: Bench, what: str) -> None:
    """The file is well-formed and has correct checksums, and only its values are wrong."""
    keys, value = WRONG[what]
    bench.refuses(what, changed(bench.data, *keys, to=value))


def test_missing_contents_are_refused_or_not_needed(bench: Bench) -> None:
    for key in ("models", "optimizers", "format"):
        bench.refuses(f"no {key}", without(bench.data, key))
    bench.path.write_bytes(without(bench.data, "validation_position"))
    bench.load()
    bench.now = of(bench.trainer)


def test_after_an_error_in_load_state_dict_only_a_load_is_accepted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = bench.trainer
    bench.path.write_bytes(bench.data)
    with monkeypatch.context() as patch:
        patch.setattr(Stateful, "fails_on", 0)
        with pytest.raises(
            CheckpointError, match=r"saved\.ckpt: .*ZeroDivisionError: planned \(in load_state_dict.*Now the state"
        ):
            bench.load()
        for call in (trainer.train, trainer.validate, trainer.state_dict, trainer.get_model):
            with pytest.raises(CheckpointError, match=r"^the state of this trainer is undefined.*Only load\(\)"):
                call()
        bench.path.write_bytes(changed(bench.data, "global_step", to=-4))
        with pytest.raises(CheckpointError, match=r"global_step is -4.*Now the state of this trainer is undefined"):
            bench.load()
    bench.path.write_bytes(bench.data)
    assert saved_part(bench.load()) == bench.saved
    assert trainer.train(num_steps=1)["batch_count"] == 1
    bench.now = of(trainer)


def test_a_dictionary_in_memory_is_checked_too(bench: Bench) -> None:
    state = bench.trainer.state_dict()
    for name, value in {"global_step": "4", "models": [[1]], "format": 5}.items():
        with pytest.raises(CheckpointError):
            bench.trainer.load_state_dict({**state, name: value})
        assert of(bench.trainer) == bench.now
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for operator in (deep, {"a": 10**5000}):
        with pytest.raises(CheckpointError):
            bench.trainer.load_state_dict({**state, "operator": operator})
    bench.trainer.load_state_dict(state)
    bench.now = of(bench.trainer)


# -- several workers ----------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.slow
def test_no_rank_loads_a_file_that_another_rank_refuses(ray_cluster: None, tmp_path: Path) -> None:
    """The state of every rank is unchanged, and the group continues without a restart. After an error of one, a load heals all."""

    def everything(trainer: TFTrainer) -> Any:
        ranks, state = trainer.apply_all_operators(whole_of_a_rank), trainer.state_dict()
        return plain(
            {**state, "position": {**state["position"], "loads": 0, "changes": 0}}
        ), ranks  # which count such calls

    with TFTrainer(training_operator_cls=Stateful, num_workers=2, config={"marks": str(tmp_path)}) as trainer:
        trainer.train(num_steps=4)
        path = Path(trainer.save(tmp_path / "saved.ckpt"))
        data = path.read_bytes()
        trainer.train(num_steps=3)
        before = everything(trainer)
        assert len(before[1]) == 2
        for what in list(WRONG)[::6]:
            keys, value = WRONG[what]
            path.write_bytes(changed(data, *keys, to=value))
            with pytest.raises(CheckpointError, match=r"saved\.ckpt"):
                trainer.load(path)
            assert everything(trainer) == before, what
        path.write_bytes(data)
        (tmp_path / "rank 1 fails").touch()
        with pytest.raises(CheckpointError, match=r"saved\.ckpt: rank 1: .*ZeroDivisionError: planned.*Now the state"):
            trainer.load(path)
        with pytest.raises(CheckpointError, match="the state of this trainer is undefined"):
            trainer.train()
        (tmp_path / "rank 1 fails").unlink()
        trainer.load(path)
        assert trainer.train()["num_samples"] == 61, "the rest of the epoch"
        assert trainer.recoveries == []


def whole_of_a_rank(operator: Any) -> Any:
    models = [weight.numpy().tobytes() for model in models_of(operator) for weight in model.weights]
    numbers = [np.asarray(each).tobytes() for each in operator.optimizer.variables]
    return models, numbers, operator.seen, operator.best, operator.global_step
