"""Background saves: the state at the call of `save`, the handle, errors, and memory."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raysgd import CheckpointError, ConfigError, NotActiveError
from raysgd.torch import TorchTrainer
from raysgd.trainer.saves import Saves
from tests import storing
from tests.storage import damage
from tests.torch.small import Line, inline, weights

MIB = 1 << 20


class Extra(Line):
    """Its extra state is what the test sets."""

    def state_dict(self) -> Any:
        return Slow(*self.config["slow"]) if "slow" in self.config else None


class Slow:
    """Is pickled after these seconds, or when the test sets this event, or fails then. A deep copy is immediate."""

    def __init__(self, until: float | threading.Event, fails: bool) -> None:
        self.until, self.fails = until, fails

    def __deepcopy__(self, memo: Any) -> "Slow":
        return self

    def __reduce__(self) -> Any:
        self.until.wait(60) if isinstance(self.until, threading.Event) else time.sleep(self.until)
        if self.fails:
            raise TypeError("this cannot be saved")
        return Slow, (0.0, False)


@pytest.fixture(params=["inline", "ray"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return {"use_ray": True}
    return {}


def test_training_continues_while_a_state_is_saved_and_failures_are_reported(
    where: dict[str, Any], tmp_path: Path
) -> None:
    """A failed save is reported by its handle, or else by the next call."""
    with inline(Extra, config={}, **where) as trainer:
        trainer.train()
        saved = weights(trainer)
        handle = trainer.save(tmp_path / "then.pt", blocking=False)
        trainer.train()
        assert handle.result(60) == handle.path == str(tmp_path / "then.pt")
        assert handle.done() and handle.exception() is None and "done" in repr(handle)
        assert not torch.equal(weights(trainer), saved)
        trainer.load(handle.path)
        assert torch.equal(weights(trainer), saved)

        trainer.apply_all_operators(lambda operator: operator.config.update(slow=(0.0, True)))
        unseen = trainer.save(tmp_path / "x.pt", blocking=False)
        while not unseen.done():
            time.sleep(0.02)
        with pytest.raises(CheckpointError, match=r"x\.pt in the background failed: .*this cannot be saved"):
            trainer.train()
        trainer.train()
        seen = trainer.save(tmp_path / "y.pt", blocking=False)
        assert "this cannot be saved" in str(seen.exception(60))
        trainer.train()  # an error that was raised once is not raised again
        with pytest.raises((TypeError, CheckpointError), match="this cannot be saved"):
            trainer.save(tmp_path / "z.pt")
        assert os.listdir(tmp_path) == ["then.pt"]


def for_tensorflow() -> Any:
    small = pytest.importorskip("tests.tf.small")
    from raysgd.tf import TFTrainer

    return TFTrainer(small.model_creator, small.data_creator)


@pytest.mark.parametrize("make", [inline, for_tensorflow])
def test_every_call_reports_a_save_that_has_failed(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(saves: Saves) -> None:
        raise CheckpointError("an earlier save failed")

    with make() as trainer:
        state, path = trainer.state_dict(), trainer.save(tmp_path / "there")
        calls: dict[str, Callable[[], Any]] = {
            "train": trainer.train,
            "validate": trainer.validate,
            "test": trainer.test,
            "predict": lambda: trainer.predict(np.zeros((4, 8), "float32")),
            "state_dict": trainer.state_dict,
            "load_state_dict": lambda: trainer.load_state_dict(state),
            "save": lambda: trainer.save(tmp_path / "x"),
            "load": lambda: trainer.load(path),
            "apply_all_workers": lambda: trainer.apply_all_workers(int),
        }
        with monkeypatch.context() as patch:
            patch.setattr(Saves, "raise_failed", fails)
            for call in calls.values():
                with pytest.raises(CheckpointError, match="an earlier save failed"):
                    call()


def test_only_true_and_false_choose_how_to_save(tmp_path: Path) -> None:
    with inline() as trainer:
        for name in ("blocking", "sharded"):
            with pytest.raises(ConfigError, match=f"{name} must be True or False, got 'no'"):
                trainer.save(tmp_path / "x.pt", **{name: "no"})
    assert os.listdir(tmp_path) == []


def test_save_returns_before_the_file_exists_and_shutdown_waits_for_it(tmp_path: Path) -> None:
    """The tensors are written after the rest, when training has changed those of the trainer."""
    gate = threading.Event()
    trainer = inline(Extra, config={"slow": (gate, False)})
    saved = weights(trainer)
    handle = trainer.save(tmp_path / "slow.pt", blocking=False)
    trainer.train()
    assert not handle.done() and "running" in repr(handle)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    threading.Timer(0.5, gate.set).start()
    trainer.shutdown()
    assert handle.done()
    with inline(Extra) as other:
        other.load(tmp_path / "slow.pt", trusted=True)
        assert torch.equal(weights(other), saved)


def test_the_newest_save_to_a_path_stays(tmp_path: Path) -> None:
    with inline(Extra, config={}) as trainer:
        trainer.apply_all_operators(lambda operator: operator.config.update(slow=(0.5, False)))
        earlier = trainer.save(tmp_path / "x.pt", blocking=False)
        trainer.apply_all_operators(lambda operator: operator.config.clear())
        trainer.train()
        newest = weights(trainer)
        trainer.save(tmp_path / "x.pt")
        earlier.result(60)
        trainer.load(tmp_path / "x.pt", trusted=True)
        assert torch.equal(weights(trainer), newest)


def test_each_failed_save_is_reported(tmp_path: Path) -> None:
    gate = threading.Event()  # closed until both saves run: otherwise the second save would raise the first one's error
    with inline(Extra, config={"slow": (gate, True)}) as trainer:
        handles = [trainer.save(tmp_path / name, blocking=False) for name in ("a.pt", "b.pt")]
        gate.set()
        while not all(handle.done() for handle in handles):
            time.sleep(0.02)
        for name in ("a", "b"):
            with pytest.raises(CheckpointError, match=rf"{name}\.pt in the background failed"):
                trainer.train()
        trainer.train()


def test_shutdown_reports_each_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    trainer = inline(Extra, config={"slow": (gate, True)})
    for name in ("a.pt", "b.pt"):
        trainer.save(tmp_path / name, blocking=False)
    gate.set()
    with pytest.raises(CheckpointError, match=r"a\.pt in the background failed"):
        trainer.shutdown()
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelname == "ERROR"] == [
        f"the save to {tmp_path / 'b.pt'} in the background failed"
    ]


def test_shutdown_waits_for_saves_with_a_limit(
    where: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All saves together have one limit. The old files are unchanged, and the workers are ended."""
    storing.save_limits(monkeypatch, SHUTDOWN_S=0.5)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"the old one")
    gate = threading.Event()
    trainer = inline(Extra, config={"slow": (60.0 if where else gate, False)}, **where)
    handles = [trainer.save(tmp_path / name, blocking=False) for name in ("a.pt", "b.pt")]
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"a\.pt in the background failed: the save was abandoned"):
        trainer.shutdown()
    assert time.monotonic() - began < 20
    for name, handle in zip(("a.pt", "b.pt"), handles, strict=True):
        assert isinstance(handle.exception(), CheckpointError)
        assert (tmp_path / name).read_bytes() == b"the old one"
        (said,) = (
            m for m in caplog.messages if m.startswith(f"the save to {tmp_path / name} in the background was abandoned")
        )
        assert "not complete 0.5 s after shutdown" in said and "unchanged" in said
    with pytest.raises(NotActiveError):
        trainer.train()
    gate.set()
    if where:  # of this process's own thread, the drafts go when it comes to its end
        assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]
    for thread in threading.enumerate():
        if thread.name == "raysgd-save":  # without Ray, the pickling, which cannot be stopped, is in this process
            thread.join(timeout=60)


class Big(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        model = nn.ParameterList([nn.Parameter(torch.rand(16 * MIB // 4)) for _ in range(8)])
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def train_epoch(self, iterator: Any, info: Any) -> dict[str, Any]:
        return {}


def begin(operator: Any = None) -> float:
    """Forget the peak of this process's memory. Return how many MB it holds now."""
    damage.RESET.write_text("5")
    return damage.held("VmRSS")


def peak(operator: Any = None) -> float:
    return damage.held("VmHWM")


def test_no_process_holds_more_than_the_state_twice(ray_cluster: None, tmp_path: Path) -> None:
    if not damage.RESET.exists():
        pytest.skip("only Linux reports the peak memory of a process")
    with TorchTrainer(training_operator_cls=Big, use_ray=True, use_gpu=False) as trainer:
        for blocking, copies in ((True, 0.3), (False, 1.3)):
            worker, driver = trainer.apply_all_operators(begin)[0], begin()
            saved = trainer.save(tmp_path / "big.pt", blocking=blocking)
            if not blocking:
                saved.result(60)
            assert trainer.apply_all_operators(peak)[0] - worker < copies * 128
            assert peak() - driver < 0.3 * 128
        assert (tmp_path / "big.pt").stat().st_size > 128 * MIB
