"""Several trainers in one script, in turn or in threads: each recovers by itself, and loses nothing."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig
from tests.elastic.test_loader_processes import Seen
from tests.faults import Fault, Ground
from tests.torch.small import inline

pytestmark = pytest.mark.elastic

ELASTIC = ElasticConfig(hang_timeout_s=60, grow=False)


@pytest.fixture(scope="module")
def grounds(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ground]]:
    made = [Ground(tmp_path_factory.mktemp("side"), num_workers=2, elastic=ELASTIC) for _ in range(2)]
    yield made
    for ground in made:
        ground.trainer.shutdown()


def test_two_trainers_at_once_in_threads(grounds: list[Ground]) -> None:
    def epochs(ground: Ground, rank: int) -> list[tuple[int, ...]]:
        ground.whole_again(2)
        ground.trained()
        before = len(ground.trainer.recoveries)
        for _ in range(2):
            ground.trainer.resize(2)
            ground.arm(Fault(rank, 4, where="backward"))
            assert ground.trainer.train()["num_samples"] == ground.samples
            ground.assert_epoch_exact()
            assert ground.trainer.validate()["num_samples"] == 50
        return [each.removed_ranks for each in ground.trainer.recoveries[before:] if each.reason != "growth"]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(epochs, grounds, (0, 1))) == [[(0,), (0,)], [(1,), (1,)]]


def in_thread(work: Callable[[], Any]) -> Any:
    """Make each call in a new thread, which ends before the next one begins."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_trainer_that_is_used_in_several_threads(ray_cluster: None, tmp_path: Path) -> None:
    ground = in_thread(lambda: Ground(tmp_path / "marks", num_workers=2, elastic=ELASTIC))
    try:
        in_thread(lambda: ground.arm(Fault(1, 5)))
        assert in_thread(ground.trainer.train)["num_samples"] == ground.samples
        in_thread(ground.assert_epoch_exact)
        path = in_thread(lambda: ground.trainer.save(tmp_path / "saved.pt"))
        in_thread(lambda: ground.trainer.load(path, trusted=True))
        ground.trainer.train()  # and on the main thread again
        assert [failure.reason for failure in ground.trainer.recoveries] == ["worker death"]
    finally:
        in_thread(ground.trainer.shutdown)


@pytest.mark.more
def test_loader_processes_of_a_trainer_in_a_thread(tmp_path: Path) -> None:
    """Outside the main thread there is no handler of SIGCHLD, and torch checks its processes every five seconds."""
    (tmp_path / "kill-31").write_text(str(int(signal.SIGKILL)))

    def work() -> tuple[list[int], list[str]]:
        with inline(Seen, config={"marks": str(tmp_path)}) as trainer:
            trainer.train()
            return trainer.get_local_operator().seen, [recovery.reason for recovery in trainer.recoveries]

    seen, reasons = in_thread(work)
    assert Counter(seen) == Counter(range(60)) and reasons == ["data loader"]
