"""Functions that call `hvd.init()` themselves, like scripts for Horovod's own Ray executor."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raysgd import ElasticConfig, train

pytestmark = [pytest.mark.more, pytest.mark.elastic, pytest.mark.horovod]


def script(config: dict[str, Any]) -> dict[str, Any]:
    """A script for Horovod, with raysgd's checkpoints."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    start = train.load_checkpoint() or {"step": 0}
    if "model" in start:
        model.load_state_dict(start["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(start["step"], 12):
        fail_once(config, step, hvd.rank())
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), hvd.rank() + 1.0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        train.report(step=step, size=hvd.size())
        if step % 4 == 3:
            train.save_checkpoint(step=step + 1, model=model.state_dict())
    all_ranks = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.size(), os.getpid()))
    weights = model.weight.detach().tolist()
    if config.get("shuts_down"):
        hvd.shutdown()
    return {"all_ranks": all_ranks, "weights": weights, "from": start["step"]}


def fail_once(config: dict[str, Any], step: int, rank: int) -> None:
    """Fail once, on rank 1 at step 6. The other ranks are averaging the gradients of that step then."""
    mark = Path(config.get("mark", os.devnull))
    if step == 6 and rank == 1 and not mark.exists():
        mark.touch()
        if config["fault"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("planned")


def fail_before_init(config: dict[str, Any]) -> int:
    """One rank fails before `hvd.init()`, where the others wait for it."""
    import horovod.torch as hvd

    if os.environ["HOROVOD_RANK"] == "1" and config["fails"]:
        raise ZeroDivisionError("too early")
    hvd.init()
    size: int = hvd.size()
    return size


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[train.Trainer]:
    trainer = train.Trainer(
        backend="horovod",
        num_workers=3,
        logdir=tmp_path_factory.mktemp("functions"),
        elastic=ElasticConfig(hang_timeout_s=60),
    )
    trainer.start()
    yield trainer
    trainer.shutdown()


def test_ranks_connect_and_end_with_the_same_weights(trainer: train.Trainer) -> None:
    """Run a script twice that shuts Horovod down at its end."""
    for _ in range(2):
        results = trainer.run(script, config={"shuts_down": True})
        first = results[0]
        assert [(rank, local, size) for rank, local, size, _ in first["all_ranks"]] == [(i, i, 3) for i in range(3)]
        assert all(result["weights"] == first["weights"] for result in results)


def test_an_error_on_one_rank_reaches_the_user(trainer: train.Trainer, tmp_path: Path) -> None:
    config = {"mark": str(tmp_path / "mark"), "fault": "raise"}
    pids = [pid for *_, pid in trainer.run(script, config={})[0]["all_ranks"]]
    with pytest.raises(ZeroDivisionError, match="planned"):
        trainer.run(script, config=config)
    assert [pid for *_, pid in trainer.run(script, config=config)[0]["all_ranks"]] == pids


def test_an_error_on_one_rank_before_init(trainer: train.Trainer) -> None:
    with pytest.raises(ZeroDivisionError, match="too early"):
        trainer.run(fail_before_init, config={"fails": True})
    assert trainer.run(fail_before_init, config={"fails": False}) == [3, 3, 3]


def test_one_of_three_workers_is_killed(trainer: train.Trainer, tmp_path: Path) -> None:
    """The survivors continue, and run the function from its newest checkpoint."""
    pids = [pid for *_, pid in trainer.run(script, config={})[0]["all_ranks"]]
    results = trainer.run(script, config={"mark": str(tmp_path / "mark"), "fault": "kill"})
    after = [pid for *_, pid in results[0]["all_ranks"]]
    assert after[:2] == [pids[0], pids[2]], "the survivors, in their old order, and perhaps a replacement worker"
    assert all(result["from"] >= 4 for result in results)
    assert all(result["weights"] == results[0]["weights"] for result in results)
    assert trainer.recoveries[-1].seconds < 30, "Horovod's own limit, which is 54 s here, did not have to expire"


def synchronize(config: dict[str, Any]) -> float:
    """Give rank 0's state to all ranks with Horovod, and commit each step."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    state = train.elastic({"step": 0, "level": float(hvd.rank() + 1)})
    state.sync()
    while state["step"] < 8:
        fail_once(config, state["step"], hvd.rank())
        state["level"] += hvd.allreduce(torch.ones(1), name="one").item()
        state["step"] += 1
        state.commit()
    return float(state["level"])


def test_state_resumes_from_the_last_commit(trainer: train.Trainer, tmp_path: Path) -> None:
    """The result is rank 0's level and one for each step: none was repeated."""
    results = trainer.run(synchronize, config={"mark": str(tmp_path / "mark"), "fault": "kill"})
    assert (tmp_path / "mark").exists()
    assert set(results) == {9.0}


def over_a_loader(config: dict[str, Any]) -> list[int]:
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    hvd.init()
    data = TensorDataset(torch.arange(12))
    generator = torch.Generator().manual_seed(train.world_rank())
    loader = train.torch.elastic_data_loader(DataLoader(data, batch_size=2, shuffle=True, generator=generator))
    return [int(row) for (batch,) in loader for row in batch]


def test_ranks_divide_an_elastic_loader(trainer: train.Trainer) -> None:
    """Rank 0's order is sent to the others, whose generators are seeded differently."""
    parts = trainer.run(over_a_loader, config={})
    assert sorted(row for part in parts for row in part) == list(range(12))
