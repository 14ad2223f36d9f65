"""A Hugging Face Trainer on workers that fail and join: the samples of each step, the rates, and the weights of an undisturbed run."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import ElasticConfig
from raysgd.train import Trainer
from tests.faults import Fault, kill_after

pytest.importorskip("transformers")
pytestmark = pytest.mark.elastic


def import_trainers() -> None:
    import tests.train.huggingface.small as small

    assert small


class Group:
    """Owns workers that have imported transformers, which takes most of the time of these tests."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder = count, folder
        elastic = ElasticConfig(grow=True, hang_timeout_s=280)
        self.trainer = Trainer("torch", num_workers=count, logdir=folder / "logs", max_retries=-1, elastic=elastic)
        self.trainer.start(import_trainers)

    def complete(self) -> None:
        """Wait for the replacements of workers that have failed."""
        if len(self.trainer.worker_group) < self.count:
            self.trainer.run(until_complete, {"count": self.count})

    def train(self, kills: Sequence[tuple[int, float, int]] = (), **config: Any) -> dict[str, Any]:
        """Train a Hugging Face Trainer. Return rank 0's result, whose weights the other ranks have, too."""
        from tests.train.huggingface.small import train_func

        marks = self.folder / f"marks{len(list(self.folder.iterdir()))}"
        marks.mkdir(parents=True)
        given = {"folder": str(marks / "out"), "marks": str(marks), **config}
        killers = [threading.Thread(target=kill_after, args=(*each, marks)) for each in kills]
        for killer in killers:
            killer.start()
        first, *others = self.trainer.run(train_func, given)
        for killer in killers:
            killer.join()
        for other in others:
            assert_equal_weights(other, first)
        assert all(Path(marks, fault.name).exists() for fault in config.get("faults", ())), "each fault has happened"
        return first


def until_complete(config: dict[str, Any]) -> None:
    from raysgd import train

    state = train.elastic({"looks": 0})
    while train.world_size() < config["count"]:
        state["looks"] += 1
        time.sleep(0.05)
        state.commit()


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(2, tmp_path_factory.mktemp("pair"))
    yield group
    group.trainer.shutdown()


@pytest.fixture(scope="module")
def trio(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(3, tmp_path_factory.mktemp("trio"))
    yield group
    group.trainer.shutdown()


def assert_equal_weights(one: dict[str, Any], other: dict[str, Any], *, within: float = 0.0) -> None:
    differences = {name: float((value - other["weights"][name]).abs().max()) for name, value in one["weights"].items()}
    assert max(differences.values()) <= within, differences


def assert_continued(found: dict[str, Any], undisturbed: dict[str, Any], *, within: float = 1e-6) -> None:
    for name in ("ledger", "rates", "step", "epoch"):
        assert found[name] == undisturbed[name], name
    assert [step for step, _ in found["losses"]] == [step for step, _ in undisturbed["losses"]]
    assert [step for step, _ in found["evaluations"]] == [step for step, _ in undisturbed["evaluations"]]
    assert_equal_weights(found, undisturbed, within=within)


def assert_each_sample_once(found: dict[str, Any], samples: int, epochs: int = 2) -> None:
    steps = len(found["ledger"]) // epochs
    for epoch in range(epochs):
        assert sorted(chain.from_iterable(found["ledger"][epoch * steps : (epoch + 1) * steps])) == list(range(samples))


def test_a_trainer_loses_a_worker_and_continues(pair: Group) -> None:
    """Undisturbed, it has the bits of a plain Trainer. The worker fails right after the optimizer's step."""
    short = {"samples": 48, "arguments": {"eval_steps": 2, "warmup_steps": 1}}
    plain = pair.train(elastic=False, **short)
    assert plain["ranks"] == 2 and plain["step"] == 6
    undisturbed = pair.train(**short)
    assert undisturbed["losses"] == plain["losses"] and undisturbed["evaluations"] == plain["evaluations"]
    assert_continued(undisturbed, plain, within=0)
    found = pair.train(faults=(Fault(1, 2, where="after"),), **short)
    assert [each.in_place for each in pair.trainer.recoveries] == [True]
    assert found["ranks"] == 1
    assert_each_sample_once(found, 48)
    assert_continued(found, undisturbed)


@pytest.mark.more
@pytest.mark.parametrize("given", [{"kind": "mean", "own_loss": True}, {"kind": "llama", "means": True}])
def test_a_loss_that_transformers_does_not_divide(pair: Group, given: dict[str, Any]) -> None:
    """Its sum in a step does not depend on the number of workers."""
    unclipped = {"optim": "sgd", "max_grad_norm": 0.0, "eval_strategy": "no"}
    config = {**given, "samples": 48, "arguments": unclipped}
    pair.complete()
    plain, undisturbed = pair.train(elastic=False, **config), pair.train(**config)
    assert_continued(undisturbed, plain, within=0)
    found = pair.train(faults=(Fault(1, 2, where="after"),), **config)
    assert found["ranks"] == 1
    assert_continued(found, undisturbed)


def under_torchrun(processes: int, folder: Path, *given: Any) -> dict[str, Any]:
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script += ["-m", "tests.train.huggingface.small", str(folder), *map(json.dumps, given)]
    subprocess.run(script, check=True, timeout=280)
    return torch.load(folder / "rank0.pt")  # type: ignore[no-any-return]


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.more
@pytest.mark.parametrize(("group", "given"), [("trio", {"kind": "bert", "dropout": 0.1}), nightly("pair", {})])
def test_undisturbed_it_has_the_bits_of_torchrun(
    request: pytest.FixtureRequest, group: str, given: dict[str, Any], tmp_path: Path
) -> None:
    workers: Group = request.getfixturevalue(group)
    workers.complete()
    undisturbed = workers.train(**given)
    plain = under_torchrun(workers.count, tmp_path, given)
    assert plain["ranks"] == workers.count
    assert undisturbed["losses"] == plain["losses"] and undisturbed["evaluations"] == plain["evaluations"]
    assert_continued(undisturbed, plain, within=0)


@pytest.mark.more
def test_a_replacement_joins(pair: Group) -> None:
    pair.complete()
    config = {"arguments": {"num_train_epochs": 16}, "samples": 96}
    undisturbed = pair.train(**config)
    before = len(pair.trainer.recoveries)
    found = pair.train(faults=(Fault(1, 5, where="before"),), pause_s=1.5, ranks=2, **config)
    assert [each.reason for each in pair.trainer.recoveries[before:]] == ["worker death", "growth"]
    assert found["ranks"] == 2
    assert_continued(found, undisturbed)


@pytest.mark.more
def test_dropout_and_several_options(pair: Group) -> None:
    """Of dropout, the masks belong to processes, so that the weights are others; all else is equal."""
    pair.complete()
    given = {"bf16": True, "lr_scheduler_type": "cosine", "dataloader_num_workers": 1, "eval_strategy": "epoch"}
    config = {"kind": "bert", "dropout": 0.1, "samples": 96, "arguments": given}
    undisturbed = pair.train(**config)
    assert_continued(undisturbed, pair.train(elastic=False, **config), within=0)
    found = pair.train(faults=(Fault(0, 5, where="forward"),), **config)
    assert_each_sample_once(found, 96)
    assert_continued(found, undisturbed, within=1)


SAVING = {"arguments": {"save_strategy": "steps", "save_steps": 5}}
UNDISTURBED: dict[str, dict[str, Any]] = {}


@pytest.mark.more
@pytest.mark.parametrize(
    "faults",
    [
        (Fault(2, 3, where="forward"), Fault(0, 8, where="before")),
        (Fault(1, 5, where="evaluation"), Fault(0, 10, where="save")),
        (Fault(0, 6), Fault(2, 6)),
        nightly((Fault(0, 4, where="after"), Fault(1, 10, where="evaluation"))),
        nightly((Fault(0, 5, where="save"), Fault(1, 9, where="after"))),
    ],
)
def test_workers_fail_anywhere_in_a_step(trio: Group, faults: tuple[Fault, ...]) -> None:
    """One after the other, and two at once."""
    trio.complete()
    if "saving" not in UNDISTURBED:
        UNDISTURBED["saving"] = trio.train(**SAVING)
    before = len(trio.trainer.recoveries)
    found = trio.train(faults=faults, **SAVING)
    failures = [each for each in trio.trainer.recoveries[before:] if each.reason != "growth"]
    assert {(each.reason, each.in_place) for each in failures} == {("worker death", True)}
    assert_each_sample_once(found, 192)
    assert_continued(found, UNDISTURBED["saving"])


@pytest.mark.more
def test_a_replacement_has_its_own_samples_in_the_step_that_is_repeated(tmp_path: Path) -> None:
    """There are as many ranks as before. It continues in `optimizer.step()` with the commit of another rank, whose attributes have the
    samples of that one."""
    config = {"samples": 96, "arguments": {"eval_strategy": "no"}}
    assert_continued(under_torchrun(2, tmp_path, config, 12), under_torchrun(2, tmp_path, config), within=0)


@pytest.mark.more
def test_a_preemption_notice(trio: Group) -> None:
    """The replacement joins as the worker leaves."""
    config = {"arguments": {"num_train_epochs": 12, "eval_strategy": "no"}}
    trio.complete()
    undisturbed, before = trio.train(**config), len(trio.trainer.recoveries)
    found = trio.train(faults=(Fault(1, 5, kind="term", where="forward"),), **config)
    assert ("preemption", True) in [(each.reason, each.in_place) for each in trio.trainer.recoveries[before:]]
    assert_continued(found, undisturbed)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("llama", {}),
        ("lora", {}),
        ("bert", {}),
        nightly("llama", {"gradient_accumulation_steps": 1}),
        ("llama", {"bf16": True}),
        nightly("mean", {}),
    ],
)
def test_an_uneven_division(trio: Group, kind: str, given: dict[str, Any]) -> None:
    """Three workers, then two, then one; and the last batch is smaller."""
    config = {"kind": kind, "samples": 187, "arguments": given}
    trio.complete()
    undisturbed = trio.train(**config)
    found = trio.train(faults=(Fault(2, 5, where="after"), Fault(0, 11, where="forward")), **config)
    assert undisturbed["ranks"] == 3
    assert_each_sample_once(undisturbed, 187)
    # Adam amplifies rounding where the true gradient is 0, as that of a bias of BERT's keys is; and bfloat16 amplifies all.
    assert_continued(found, undisturbed, within={"bert": 1e-4}.get(kind, 1e-3 if "bf16" in given else 1e-6))


@pytest.mark.more
def test_with_a_seed_dropout_is_equal(trio: Group) -> None:
    config = {"kind": "bert", "dropout": 0.1, "seed": 7}
    trio.complete()
    undisturbed = trio.train(**config)
    found = trio.train(faults=(Fault(2, 4, where="after"), Fault(0, 8, where="forward")), **config)
    assert_continued(found, undisturbed, within=1e-4)


ORDERS = {
    "group_by_length": {"arguments": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 6}},
    "weighted": {"weighted": True, "arguments": {"num_train_epochs": 6}},
}


@pytest.mark.more
@pytest.mark.parametrize(
    "faults", [(Fault(1, 3, where="after"),), (Fault(0, 3, where="forward"), Fault(1, 20, where="after"))]
)
@pytest.mark.parametrize("order", [*ORDERS])
def test_with_a_seed_an_order_is_equal(pair: Group, order: str, faults: tuple[Fault, ...]) -> None:
    """One without a generator of its own, of the epochs after the failure, too. Before the second failure, a replacement joins."""
    config: dict[str, Any] = {"kind": "bert", "dropout": 0.1, "seed": 7, "samples": 48, **ORDERS[order]}
    config["arguments"] = {**config["arguments"], "eval_strategy": "no", "gradient_accumulation_steps": 1}
    pair.complete()
    if order not in UNDISTURBED:
        UNDISTURBED[order] = pair.train(**config)
    before = len(pair.trainer.recoveries)
    found = pair.train(faults=faults, **config, **({"pause_s": 1.5, "ranks": 2} if len(faults) > 1 else {}))
    failures = [each for each in pair.trainer.recoveries[before:] if each.reason == "worker death"]
    assert [each.in_place for each in failures] == [True] * len(faults)
    assert_continued(found, UNDISTURBED[order], within=1e-4)


@pytest.mark.more
def test_early_stopping_and_the_best_model(trio: Group) -> None:
    """They follow a metric of the predictions, which is equal for any number of workers, as the evaluation's loss is not."""
    from tests.train.huggingface.small import STOPPING

    config = {"kind": "bert", "samples": 96, "patience": 2, "arguments": STOPPING}
    trio.complete()
    undisturbed = trio.train(**config)
    assert undisturbed["best"][0] < undisturbed["step"] < 80, "it stopped early"
    found = trio.train(faults=(Fault(0, 5, where="evaluation"), Fault(1, 10, where="save")), **config)
    assert found["files"] == undisturbed["files"]
    assert found["best"] == (undisturbed["best"][0], pytest.approx(undisturbed["best"][1], rel=1e-5))
    assert_continued(found, undisturbed, within=1e-4)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.nightly) for seed in range(20)]
)
def test_two_kills_at_any_time(trio: Group, seed: int) -> None:
    config = {"samples": 187, "arguments": {"num_train_epochs": 3}}
    trio.complete()
    if "random" not in UNDISTURBED:
        UNDISTURBED["random"] = trio.train(**config)
    draw, before = random.Random(seed), len(trio.trainer.recoveries)
    processes = draw.sample(trio.trainer.worker_group.execute(os.getpid), 2)
    kills = [(draw.randint(1, 30), draw.uniform(0, 0.1), process) for process in processes]
    found = trio.train(kills=kills, **config)
    assert "worker death" in {each.reason for each in trio.trainer.recoveries[before:]}
    assert_each_sample_once(found, 187, epochs=3)
    assert_continued(found, UNDISTURBED["random"])


def accelerated(config: dict[str, Any]) -> dict[str, Any]:
    """The loop of the page, with an Accelerator. Return its samples by step, and what it gathers."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from raysgd import train
    from tests.faults import Numbered

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1000)
    loader = train.torch.elastic_data_loader(DataLoader(Numbered(96), batch_size=4, shuffle=True))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    values = {"epoch": 0, "ledger": [], "window": []}
    state = train.elastic({"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, **values})
    while state["epoch"] < 2:
        for index, x, y in loader:
            with accelerator.accumulate(model):
                everybody: list[Any] = [None] * train.world_size()
                dist.all_gather_object(everybody, index.tolist())
                state["window"] = [*state["window"], *chain.from_iterable(everybody)]
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                for fault in config["faults"]:
                    if fault.rank == train.world_rank() and len(state["ledger"]) >= fault.step:
                        fault.fire(config["marks"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state["ledger"], state["window"] = [*state["ledger"], *state["window"]], []
                state.commit()
        state["epoch"] += 1
    ranks = accelerator.gather(torch.tensor([train.world_rank()])).tolist()
    weights = {name: each.detach() for name, each in accelerator.unwrap_model(model).named_parameters()}
    return {"ledger": [*state["ledger"], *state["window"]], "ranks": ranks, "weights": weights}


@pytest.mark.more
def test_a_loop_with_accelerate(trio: Group, tmp_path: Path) -> None:
    trio.complete()
    found = trio.trainer.run(accelerated, {"faults": (Fault(1, 24),), "marks": str(tmp_path)})
    assert [each["ranks"] for each in found] == [[*range(len(found))]] * len(found), "accelerate knows the new ranks"
    assert len(found) < 3 or trio.trainer.recoveries[-1].reason == "growth"
    assert_equal_weights(found[0], found[1])
    assert Counter(found[0]["ledger"]) == Counter(2 * [*range(96)])
