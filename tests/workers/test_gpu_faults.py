"""Errors of a GPU: which are recognized, whose they are, and what follows. There is no GPU: `probe` says what one would."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

from raysgd.core.control import Control
from raysgd.core.decisions.gpu_failures import GpuFailures
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, GpuFault, Ok, Outcome, WorkerFailed
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.core.ranks import RankInfo
from raysgd.engine.failure import MEMORY_HINT, raise_user_error
from raysgd.engine.worker_info import WorkerInfo
from raysgd.workers import gpu_faults
from raysgd.workers.replica_host import SET_UPS, ReplicaHost

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
ECC = "CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def accelerator(text: str) -> Exception:
    return torch.AcceleratorError(text)


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


# -- recognition --------------------------------------------------------------------------------------

STAYS: list[tuple[Exception, Exception, bool]] = [
    (accelerator(ECC), accelerator(ECC), False),
    (accelerator("CUDA error: unknown error"), accelerator("CUDA error: unknown error"), False),
    (RuntimeError("NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus."), accelerator(ECC), False),
    (accelerator(ASSERT), accelerator(ASSERT), True),
    (accelerator(ILLEGAL), accelerator(ILLEGAL), True),
    (
        accelerator("CUDA error: unspecified launch failure"),
        accelerator("CUDA error: unspecified launch failure"),
        True,
    ),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), accelerator(ECC), False),
    (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), accelerator(ILLEGAL), True),
    (caused(ValueError("the user's own"), by=accelerator(ECC)), accelerator(ECC), False),
]


@pytest.mark.parametrize(("error", "again", "by_kernel"), STAYS, ids=lambda each: str(each)[:40])
def test_an_error_that_stays_is_a_fault_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, error: Exception, again: Exception, by_kernel: bool
) -> None:
    monkeypatch.setattr(gpu_faults, "probe", lambda: again)
    monkeypatch.setattr(gpu_faults, "gpu_uuid", lambda: "GPU-5f1c")
    assert gpu_faults.find_fault(error) == GpuFault("GPU-5f1c", by_kernel)
    monkeypatch.setattr(gpu_faults, "probe", lambda: None)
    assert gpu_faults.find_fault(error) is None, "it was a wrong call, which has left the GPU as it was"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        ValueError(ECC),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
        accelerator("CUDA error: out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_do_not_ask_the_gpu(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(gpu_faults, "probe", lambda: pytest.fail("the GPU was asked"))
    assert gpu_faults.find_fault(error) is None


def test_without_a_gpu_no_error_is_a_fault() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gpu_faults.find_fault(accelerator(ECC)) is None
    assert gpu_faults.gpu_uuid() == ""


# -- which GPUs get no worker -------------------------------------------------------------------------


def test_a_gpu_that_fails_twice_is_excluded() -> None:
    failures, bad, good = GpuFailures(), [("node", "3")], [("node", "4")]
    assert failures.note(bad) == 1 and not failures.exclude(bad)
    assert failures.note([]) == 0, "Ray has given none to this worker"
    assert failures.note(bad, known=1) == 2 and failures.exclude(bad) and not failures.exclude(good)
    assert failures.exclude([*good, *bad]) and not failures.exclude([("another node", "3")])


def test_workers_that_share_a_gpu_and_fail_with_it_are_one_failure() -> None:
    failures, gpu = GpuFailures(), [("node", "3")]
    assert [failures.note(gpu, known=0) for _ in range(3)] == [1, 1, 1]
    assert failures.note(gpu, known=1) == 2, "it started after that one"


# -- in a worker --------------------------------------------------------------------------------------


class Leaves(SingleWorkerBackend):
    """Counts how often its worker leaves the group."""

    left = 0

    def leave(self) -> None:
        self.left += 1


class Raises:
    """A replica whose every call raises this error."""

    progress = Progress(step=3)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def run(self, call: Call) -> Any:
        raise self.error

    def partial(self) -> Any:
        raise self.error


def host_of(factory: Callable[..., Any]) -> tuple[ReplicaHost, Leaves, dict[str, Any]]:
    host = ReplicaHost(backend := Leaves(), Control())
    host.find_fault = gpu_faults.find_fault
    return host, backend, {"factory": factory, "rank_info": RankInfo(solo=True)}


@pytest.mark.parametrize(("text", "by_kernel"), [(ECC, False), (ASSERT, True)])
def test_a_worker_with_a_broken_gpu_says_so_and_does_not_leave_the_group(
    monkeypatch: pytest.MonkeyPatch, text: str, by_kernel: bool
) -> None:
    host, backend, given = host_of(lambda *_: Raises(accelerator(text)))
    host.perform("build", given)
    monkeypatch.setattr(gpu_faults, "probe", lambda: accelerator(text))
    outcome = host.perform("run", {"call": Call(Raises.run)})
    assert isinstance(outcome, WorkerFailed) and backend.left == 0, "leaving could wait for the GPU"
    assert (outcome.reason, outcome.cause) == ("gpu failure", f"AcceleratorError: {text.splitlines()[0]}")
    assert outcome.fault is not None and outcome.fault.by_kernel is by_kernel and outcome.progress.step == 3


def test_in_the_drivers_own_process_it_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_faults, "probe", lambda: accelerator(ECC))
    host = ReplicaHost(SingleWorkerBackend(), Control())
    host.perform("build", {"factory": lambda *_: Raises(accelerator(ECC)), "rank_info": RankInfo()})
    assert isinstance(host.perform("run", {"call": Call(Raises.run)}), Failed)


def test_a_metric_on_a_broken_gpu_is_no_error_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has failed. What this rank has measured cannot be read, because its GPU is broken too."""
    host, _, given = host_of(lambda *_: Raises(accelerator(ECC)))
    host.perform("build", given)
    monkeypatch.setattr(gpu_faults, "probe", lambda: accelerator(ECC))
    monkeypatch.setattr(Raises, "run", lambda self, call: (_ for _ in ()).throw(ConnectionError("a peer")))
    host._control.interrupt()
    assert isinstance(host.perform("run", {"call": Call(Raises.run)}), WorkerFailed)


@pytest.mark.parametrize(("text", "kind"), [(ECC, WorkerFailed), (ASSERT, Failed)])
def test_a_kernel_of_the_set_up_is_the_users(monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Outcome]) -> None:
    monkeypatch.setattr(gpu_faults, "probe", lambda: accelerator(text))

    def set_up(*_: Any) -> Any:
        raise accelerator(text)

    host, _, given = host_of(set_up)
    assert type(host.perform("build", given)) is kind
    assert type(host.perform("warm", {**given, "hook": None, "settings": {}})) is kind


# -- memory -------------------------------------------------------------------------------------------


def memory(monkeypatch: pytest.MonkeyPatch, free: list[int]) -> None:
    """Let the GPU have so many free bytes whenever it is asked, and after that always the last number."""
    monkeypatch.setattr(gpu_faults, "free_memory", lambda: free.pop(0) if len(free) > 1 else free[0])
    monkeypatch.setattr(gpu_faults, "LOOK_S", 0.001)
    monkeypatch.setattr(gpu_faults, "FREED_WITHIN_S", 0.1)


@pytest.mark.parametrize(
    ("free", "gets"),
    [
        ([10, 10, 10, 40, 70, 70], True),
        ([0, 500], True),
        ([10], False),
        ([90, 80, 70], False),
    ],
)
def test_memory_is_awaited_while_another_process_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, free: list[int], gets: bool
) -> None:
    memory(monkeypatch, free)
    assert gpu_faults.wait_for_memory() is gets
    assert len(free) == 1, "until it does not rise any more"


@pytest.mark.parametrize(("failures", "rises", "tries"), [(1, True, 2), (1, False, 1), (99, True, SET_UPS)])
def test_a_replacement_is_set_up_again_when_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, failures: int, rises: bool, tries: int
) -> None:
    made, freed = 0, []

    class Held:
        def __del__(self) -> None:
            freed.append(made)

    def set_up(*_: Any) -> Any:
        nonlocal made
        made, model = made + 1, Held()
        if made <= failures:
            raise torch.OutOfMemoryError(f"CUDA out of memory ({model.__class__.__name__})")
        return Raises(ValueError())

    monkeypatch.setattr("raysgd.workers.replica_host.wait_for_memory", lambda: bool(freed) and rises)
    host, _, given = host_of(set_up)
    outcome = host.perform("warm", {**given, "hook": None, "settings": {}})
    assert made == tries and type(outcome) is (Ok if failures < tries else Failed)
    assert freed[0] == 1, "what the first try had made was gone before the second"
    assert isinstance(outcome, Ok) or "in set_up" in outcome.traceback


def test_other_errors_of_a_set_up_are_not_tried_again() -> None:
    made: list[int] = []

    def set_up(*_: Any) -> Any:
        made.append(1)
        raise RuntimeError("out of memory of another kind")

    host, _, given = host_of(set_up)
    assert isinstance(host.perform("warm", {**given, "hook": None, "settings": {}}), Failed) and made == [1]


def test_out_of_memory_in_a_step_says_what_to_write() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        raise_user_error(Failed(error, "a traceback"), WorkerInfo("w1", rank=1))
    assert caught.value.args == ("CUDA out of memory",)
    assert getattr(caught.value, "__notes__", [MEMORY_HINT]) == [MEMORY_HINT]


def test_too_little_memory_of_a_machine_is_no_full_gpu() -> None:
    with pytest.raises(ray.exceptions.OutOfMemoryError) as caught:
        raise_user_error(Failed(ray.exceptions.OutOfMemoryError("the node"), "a traceback"), WorkerInfo("w1", rank=1))
    assert not hasattr(caught.value, "__notes__")
