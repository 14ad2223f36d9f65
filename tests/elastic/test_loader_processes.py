"""If a process of a DataLoader is killed, its rank gets a new loader, and every sample is still used exactly once."""

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from raysgd import ElasticConfig, TrainingFailedError, train
from raysgd.torch.data import loading
from raysgd.train import Trainer
from raysgd.train.replica import _must_finish
from tests.faults import Ground, LedgerOperator, Numbered
from tests.tiers import NIGHTLY
from tests.torch.small import Line, inline, rows

pytestmark = pytest.mark.elastic

SAMPLES = 96


def fatal(marks: str, index: int) -> None:
    """End the process that loads this sample, once for each file `kill-INDEX` (which names the signal), or always."""
    once, always = Path(marks) / f"kill-{index}", Path(marks) / f"always-{index}"
    try:
        number = int(once.read_text())
        once.unlink()
    except FileNotFoundError:
        if not always.exists():
            return
        number = int(always.read_text())
    os.kill(os.getpid(), number)


class Fatal(Numbered):
    """Samples whose loading can kill the process that loads them."""

    def __init__(self, size: int, marks: str) -> None:
        super().__init__(size)
        self.marks = marks

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        fatal(self.marks, index)
        if (Path(self.marks) / f"raise-{index}").exists():
            raise RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly")
        return super().__getitem__(index)


class FatalOperator(LedgerOperator):
    """Both loaders have two processes each; `config["options"]` has more options for them."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        options = {"batch_size": 4, "num_workers": 2, **config.get("options", {})}
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(Fatal(SAMPLES, config["marks"]), shuffle=True, generator=generator, **options)
        validation = DataLoader(Fatal(50, f"{config['marks']}/validation"), **options)
        self.register_data(train_loader=loader, validation_loader=validation)


class OwnLoop(FatalOperator):
    """A custom epoch that catches errors in batches."""

    def train_epoch(self, iterator: Iterator[Any], info: dict[str, Any], **_: Any) -> dict[str, Any]:
        count = 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return {"num_samples": count}
            except Exception:
                continue
            count += self.train_batch(batch, info)["num_samples"]


@pytest.fixture(scope="module", params=["for each pass", pytest.param("persistent", marks=pytest.mark.more)])
def shared(
    request: pytest.FixtureRequest, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    options = {"persistent_workers": True, "prefetch_factor": 4} if request.param == "persistent" else {}
    marks = tmp_path_factory.mktemp("loaders")
    (marks / "validation").mkdir()
    config = {"samples": SAMPLES, "options": options}
    elastic = ElasticConfig(hang_timeout_s=60, grow=False)
    ground = Ground(marks, operator=FatalOperator, num_workers=2, config=config, elastic=elastic)
    yield ground
    ground.trainer.shutdown()


@pytest.fixture
def ground(shared: Ground) -> Iterator[Ground]:
    """Between two epochs."""
    yield shared
    for path in shared.marks.glob("*-*"):
        path.unlink()
    shared.trainer.train()
    shared.trained()


def loader_processes(trainer: Any) -> list[list[int]]:
    answers: list[list[int]] = trainer.apply_all_workers(lambda: [p.pid for p in multiprocessing.active_children()])
    return answers


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill_now_and_then(workers: list[int], kills: int, chance: random.Random, over: threading.Event) -> None:
    """Kill random loader processes of random workers at random moments."""
    while kills and not over.wait(chance.uniform(0.02, 0.4)):
        if found := children(chance.choice(workers)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)
                kills -= 1


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_killed_at_any_moment(ground: Ground) -> None:
    workers, over = ground.trainer.apply_all_workers(os.getpid), threading.Event()
    arguments = (workers, 50 if NIGHTLY else 3, random.Random(11), over)
    killer = threading.Thread(target=kill_now_and_then, args=arguments, daemon=True)
    killer.start()
    try:
        while killer.is_alive():
            assert ground.trainer.train(max_retries=-1)["num_samples"] == SAMPLES
            ground.assert_epoch_exact()
            with contextlib.suppress(TrainingFailedError):  # more than three times in one validation
                assert ground.trainer.validate()["num_samples"] == 50
    finally:
        over.set()
    assert ground.trainer.apply_all_workers(os.getpid) == workers
    assert {r.reason for r in ground.trainer.recoveries} <= {"data loader"}


@pytest.mark.parametrize(
    ("number", "told"),
    [
        pytest.param(signal.SIGKILL, "SIGKILL", id="SIGKILL"),
        pytest.param(signal.SIGBUS, "shared memory", id="SIGBUS"),
        pytest.param(signal.SIGSEGV, "SIGSEGV", id="SIGSEGV", marks=pytest.mark.more),
    ],
)
def test_killed_in_an_epoch(ground: Ground, number: int, told: str, caplog: Any) -> None:
    (ground.marks / "kill-50").write_text(str(int(number)))
    pids, before = ground.trainer.apply_all_workers(os.getpid), len(ground.trainer.recoveries)
    with caplog.at_level(logging.WARNING, logger="raysgd"):
        result = ground.trainer.train()
    ground.assert_epoch_exact()
    assert result["num_samples"] == SAMPLES
    (recovery,) = ground.trainer.recoveries[before:]
    assert (recovery.reason, recovery.removed_ranks, recovery.in_place) == ("data loader", (), True)
    assert (recovery.world_size_before, recovery.world_size_after, recovery.batches_redone) == (2, 2, 0)
    assert "rank" in recovery.detail and "node" in recovery.detail and told in recovery.detail
    assert any("train_loader" in r.getMessage() and "restart" in r.getMessage().lower() for r in caplog.records)
    assert ground.trainer.apply_all_workers(os.getpid) == pids, "the workers themselves continue to run"


def test_killed_in_validation(ground: Ground) -> None:
    usual = ground.trainer.validate()
    before = len(ground.trainer.recoveries)
    (ground.marks / "validation" / "kill-30").write_text(str(int(signal.SIGKILL)))
    assert ground.trainer.validate() == usual
    (recovery,) = ground.trainer.recoveries[before:]
    assert recovery.reason == "data loader" and "validation_loader" in recovery.detail
    assert ground.trained() == Counter(), "validation trains nothing"


def test_killed_while_idle(ground: Ground) -> None:
    """Between two calls in one epoch, the loader's processes wait for the rest of the epoch."""
    ground.trainer.train(num_steps=3)
    for pid in (pids[0] for pids in loader_processes(ground.trainer) if pids):
        os.kill(pid, signal.SIGKILL)
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_max_retries_limits_failures_and_the_error_mentions_memory(ground: Ground) -> None:
    (ground.marks / "always-50").write_text(str(int(signal.SIGKILL)))
    before = len(ground.trainer.recoveries)
    with pytest.raises(TrainingFailedError, match=r"(?s)max_retries=1.*data loader.*rank.*memory.*num_workers"):
        ground.trainer.train(max_retries=1)
    assert len(ground.trainer.recoveries) == before + 2
    (ground.marks / "always-50").unlink()
    ground.trainer.train()
    ground.assert_epoch_exact()


def test_a_user_error_with_the_same_text_is_not_retried(ground: Ground) -> None:
    (ground.marks / "raise-50").touch()
    before = len(ground.trainer.recoveries)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        ground.trainer.train()
    assert len(ground.trainer.recoveries) == before


@pytest.mark.parametrize("error", [FileNotFoundError, ConnectionResetError])
def test_an_error_of_a_sampler_waits_for_the_processes_only_once(monkeypatch: Any, error: type[OSError]) -> None:
    waited = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds

    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise error("no indices")

    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: waited, sleep=sleep))
    loader = DataLoader(TensorDataset(*rows()), sampler=Failing(), num_workers=1, prefetch_factor=1)
    with pytest.raises(error, match="no indices"):
        list(loading.LoaderIterator(loader))
    assert waited == pytest.approx(loading.DYING_S if error is ConnectionResetError else loading.OTHER_S, abs=0.1)


@pytest.mark.more
def test_a_custom_loop_that_catches_errors_loses_no_samples(ray_cluster: None, tmp_path: Path) -> None:
    config = {"samples": SAMPLES}
    ground = Ground(tmp_path / "own", operator=OwnLoop, num_workers=2, config=config)
    try:
        (ground.marks / "kill-50").write_text(str(int(signal.SIGKILL)))
        assert ground.trainer.train()["num_samples"] == SAMPLES
        ground.assert_epoch_exact()
        assert [r.reason for r in ground.trainer.recoveries] == ["data loader"]
    finally:
        ground.trainer.shutdown()


# -- one worker, in this process ----------------------------------------------------------------------


class Halfway(torch.optim.SGD):
    """Between the updates of two parameters, a process of the data loader is killed."""

    victim = True

    def step(self, closure: Any = None) -> Any:
        first, second = self.param_groups[0]["params"]
        with torch.no_grad():
            first.add_(first.grad, alpha=-0.1)
            children = multiprocessing.active_children()
            if Halfway.victim and children:
                Halfway.victim = False
                os.kill(children[0].pid or 0, signal.SIGKILL)
                children[0].join()
                time.sleep(0.05)
            second.add_(second.grad, alpha=-0.1)


class HalfwayLine(Line):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = Halfway(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(*rows(48)), batch_size=4, num_workers=2)
        self.register_data(train_loader=loader)


def test_a_step_is_never_half_applied() -> None:
    """torch raises the error of the killed process wherever the main thread is: here, in the optimizer's step."""
    trained = []
    for victim in (False, True):
        Halfway.victim = victim
        with inline(HalfwayLine) as trainer:
            trainer.train()
            trained.append(nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach())
            assert [r.reason for r in trainer.recoveries] == (["data loader"] if victim else [])
    assert not Halfway.victim
    assert torch.equal(*trained)


class FatalStream(IterableDataset[int]):
    """Shuffled with the seed that torch gives to each process."""

    def __init__(self, marks: str) -> None:
        self.marks = marks

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        mine = torch.arange(info.id, 60, info.num_workers)
        for index in mine[torch.randperm(len(mine))].tolist():
            fatal(self.marks, index)
            yield index


class Seen(Line):
    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[int] = []

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"train_loader": DataLoader(FatalStream(config["marks"]), batch_size=3, num_workers=2)}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.step()
        self.seen += batch.tolist()
        return {"num_samples": len(batch)}


def test_a_stream_continues_where_it_was(tmp_path: Path) -> None:
    with inline(Seen, config={"marks": str(tmp_path)}) as trainer:
        for index in (31, 44):
            (tmp_path / f"kill-{index}").write_text(str(int(signal.SIGKILL)))
        trainer.train()
        assert Counter(trainer.get_local_operator().seen) == Counter(range(60))
        assert [r.reason for r in trainer.recoveries] == ["data loader"] * 2


# -- functions ----------------------------------------------------------------------------------------


def left_over(_: dict[str, Any]) -> list[int]:
    """Return the child processes of this worker that have not ended after 10 s."""
    until = time.monotonic() + 10
    while (children := multiprocessing.active_children()) and time.monotonic() < until:
        time.sleep(0.05)
    return [process.pid for process in children if process.pid]


def one_epoch(config: dict[str, Any]) -> dict[str, Any]:
    """Train one epoch with one kind of loader. Return the samples that this rank's weights have seen."""
    model = nn.Linear(8, 1)
    loader: Any = DataLoader(Fatal(SAMPLES, config["marks"]), batch_size=4, shuffle=True, num_workers=2)
    if config["kind"] == "elastic":
        loader = train.torch.elastic_data_loader(loader)
    elif config["kind"] == "prepared":
        loader = train.torch.prepare_data_loader(loader)
    state = train.elastic({"model": model, "seen": []} | ({"loader": loader} if config["kind"] == "elastic" else {}))
    if config["kind"] != "elastic":
        state["seen"] = []
    for index, _, _ in loader:
        everybody: list[Any] = [None] * train.world_size()
        dist.all_gather_object(everybody, index.tolist())
        state["seen"] = [*state["seen"], *sorted({each for part in everybody for each in part})]
        if config["kind"] == "elastic":
            state.commit()
    return {"seen": state["seen"]}


@pytest.fixture(scope="module")
def functions(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer("torch", num_workers=2, logdir=tmp_path_factory.mktemp("functions"))
    trainer.start()
    yield trainer
    trainer.shutdown()


@pytest.mark.parametrize("kind", ["elastic", "prepared"])
def test_a_function_with_a_prepared_loader_runs_again(functions: Trainer, kind: str, tmp_path: Path) -> None:
    (tmp_path / "kill-50").write_text(str(int(signal.SIGKILL)))
    before = len(functions.recoveries)
    results = functions.run(one_epoch, {"marks": str(tmp_path), "kind": kind})
    assert all(Counter(result["seen"]) == Counter(range(SAMPLES)) for result in results)
    assert [r.reason for r in functions.recoveries[before:]] == ["data loader"]


def test_an_error_in_a_functions_own_loader_is_a_user_error(functions: Trainer, tmp_path: Path) -> None:
    (tmp_path / "kill-50").write_text(str(int(signal.SIGKILL)))
    before = len(functions.recoveries)
    with pytest.raises(
        (RuntimeError, ConnectionError, EOFError)
    ) as raised:  # torch's error, or that of the broken pipe
        functions.run(one_epoch, {"marks": str(tmp_path), "kind": "plain"})
    assert isinstance(raised.value, (ConnectionError, EOFError)) or "DataLoader worker" in str(raised.value)
    assert raised.value.raysgd_rank in (0, 1)  # type: ignore[union-attr]
    assert functions.recoveries[before:] == []
    assert functions.run(left_over, {}) == [[], []]


def half_an_epoch(config: dict[str, Any]) -> list[int]:
    """Return what `left_over` does. Then leave a loop over a loader in the way that `config` names."""
    children = left_over(config)
    gc.enable() if config["collect"] else gc.disable()
    loader = train.torch.elastic_data_loader(DataLoader(TensorDataset(torch.arange(64)), batch_size=4, num_workers=1))
    for batches, _ in enumerate(loader):
        if batches == 2 and config["leave"] == "raise":
            raise ValueError("in the middle of an epoch")
        if batches == 2:
            break
    return children


@pytest.mark.parametrize("leave", ["raise", "return"])
def test_the_processes_of_an_open_loader_end_with_the_function(functions: Trainer, leave: str) -> None:
    """Otherwise later ones would be forked with copies of it, whose clean-up prints errors, and a garbage collection in
    the middle of a later run would wait 5 s for each of its processes."""
    with pytest.raises(ValueError, match="middle") if leave == "raise" else contextlib.nullcontext():
        functions.run(half_an_epoch, {"leave": leave, "collect": False})
    assert functions.run(half_an_epoch, {"leave": "return", "collect": True}) == [[], []]


class Slow(TensorDataset):
    """Each sample takes half a second; the first leaves a file."""

    def __init__(self, mark: Path) -> None:
        super().__init__(torch.arange(64))
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        self.mark.touch()
        time.sleep(0.5)
        return super().__getitem__(index)


def stopped_while_it_waits(config: dict[str, Any]) -> None:
    """Rank 1 fails while rank 0 waits for its loader's first batch."""
    mark = config["marks"] / "loading"
    if train.world_rank() == 1:
        while not mark.exists():
            time.sleep(0.01)
        raise ValueError("in the middle of an epoch")
    loader = DataLoader(Slow(mark), batch_size=4, num_workers=2)
    for _ in train.torch.prepare_data_loader(loader) if config["prepared"] else train.torch.elastic_data_loader(loader):
        pass


@pytest.mark.parametrize(
    "prepared", [pytest.param(False, id="elastic"), pytest.param(True, id="prepared", marks=pytest.mark.more)]
)
def test_the_processes_of_a_loader_end_if_the_function_is_stopped(
    functions: Trainer, prepared: bool, tmp_path: Path
) -> None:
    functions.run(lambda _: gc.disable(), {})
    with pytest.raises(ValueError, match="middle"):
        functions.run(stopped_while_it_waits, {"marks": tmp_path, "prepared": prepared})
    assert functions.run(left_over, {}) == [[], []]
    functions.run(lambda _: gc.enable(), {})


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 40:
            raise ValueError("sample 40")
        return index


KEPT: list[BaseException] = []


def keeps_its_error(_: dict[str, Any]) -> None:
    """The traceback of an error has the loader's iterator, as long as anything has the error."""
    try:
        deque(DataLoader(Failing(), batch_size=4, num_workers=2), maxlen=0)
    except ValueError as error:
        KEPT.append(error)
        raise


def test_the_processes_of_a_loader_end_if_its_error_is_kept(functions: Trainer) -> None:
    with pytest.raises(ValueError, match="sample 40"):
        functions.run(keeps_its_error, {})
    assert functions.run(left_over, {}) == [[], []]


class WithFinalizer:
    def __init__(self) -> None:
        self.asked: list[bool] = []

    def __del__(self) -> None:
        self.asked.append(_must_finish(sys._getframe()))


def test_a_function_is_not_stopped_in_a_finalizer_or_while_loader_processes_start(monkeypatch: Any) -> None:
    asked, start = WithFinalizer().asked, multiprocessing.process.BaseProcess.start

    def starting(process: Any) -> None:
        asked.append(_must_finish(sys._getframe()))
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starting)
    for _ in DataLoader(TensorDataset(torch.arange(8)), num_workers=1):
        asked.append(_must_finish(sys._getframe()))
    assert asked == [True, True, *[False] * 8]
