"""What the tests of several hosts run on the host of the script: `driver.py NAME`. Prints one line of JSON at its end.

A line that begins with "now" says what follows, so that a test can cause a fault in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from counting import CountingOperator, Indexed, lost_and_doubled, small_model
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator, train
from raysgd.cli import main
from raysgd.config import ElasticConfig
from raysgd.core.measures import speed
from raysgd.errors import RaysgdError
from tests.harming import Injected, harm
from tests.histories import Steps, snapshots, write

SAMPLES = 400
SETTINGS = {"samples": SAMPLES, "batch_size": 8, "step_s": 0.0}
LONG = 3200  # samples of an epoch that takes seconds
LONGER = {**SETTINGS, "samples": LONG, "step_s": 0.02}
STORMY = {**LONGER, "samples": 2000, "batch_size": 12}
ELASTIC = {"hang_timeout_s": float(os.environ.get("HANG_TIMEOUT_S", "20")), "snapshot_every": None}
HISTORY = "/tmp/history.jsonl"


class LargeOperator(CountingOperator):
    """Has 20 MB of state in addition, which takes no part in training."""

    def setup(self, config):
        super().setup(config)
        self.large = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1))

    def state_dict(self):
        return {**super().state_dict(), "large": self.large}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.large = state_dict["large"]


class BorrowingOperator(CountingOperator):
    """Needs a module that only the host of the script has."""

    def setup(self, config):
        from lonely import WORD

        super().setup(config)
        self.word = WORD


class ObeyingOperator(CountingOperator):
    """Does to its process what a file on its host says (`tests/harming.py`). Writes the history of its steps on its host."""

    def setup(self, config):
        super().setup(config)
        self.steps = Steps()
        self.optimizer.register_step_post_hook(self.tell)

    def exchange(self, index):
        self.samples = self.steps.gathered(index.tolist())
        return torch.tensor(self.samples)

    def tell(self, *_):
        write(HISTORY, **self.steps.made(self.epoch, self.samples))

    def state_dict(self):
        return {**super().state_dict(), "newest": self.steps.newest}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.steps.newest = state_dict.get("newest", self.steps.newest)

    def train_batch(self, batch, batch_info):
        with contextlib.suppress(FileNotFoundError):
            taken = Path("/tmp/order").rename(f"/tmp/order.{os.getpid()}")
            kind, seconds = taken.read_text(encoding="utf-8").split()
            harm(kind, float(seconds))
        return super().train_batch(batch, batch_info)


class NotingOperator(TrainingOperator):
    """Trains on batches of `config["megabytes"]`. Notes its samples, without a word to the other ranks."""

    def setup(self, config):
        model = small_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        data = Wide(SAMPLES, config["megabytes"] / 8)
        self.register_data(train_loader=DataLoader(data, batch_size=8, shuffle=True, num_workers=config["loaders"]))
        self.noted = []

    def train_batch(self, batch, batch_info):
        index, features, target, _ = batch
        self.noted += index.tolist()
        return super().train_batch((features, target), batch_info)


class Stalling(Indexed):
    """Reading takes long on a host with a file."""

    def __getitem__(self, index):
        time.sleep(0.01 if os.path.exists("/tmp/stalls") else 0.0)
        _, features, target = super().__getitem__(index)
        return features.double(), target


class Working(TrainingOperator):
    """Needs `config["work_s"]` for each part of a batch. It sleeps, because other tests may use the processors."""

    def setup(self, config):
        Path("/tmp/worker").write_text(str(os.getpid()), encoding="utf-8")
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(32), small_model()).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        data, batch = Stalling(config["samples"]), config["batch_size"]
        self.register_data(train_loader=DataLoader(data, batch_size=batch, shuffle=True, num_workers=config["loaders"]))

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["work_s"])
        return super().train_batch(batch, batch_info)


class Wide(Indexed):
    def __init__(self, samples, megabytes):
        super().__init__(samples)
        self.numbers = int(megabytes * 250_000)

    def __getitem__(self, index):
        return *super().__getitem__(index), torch.zeros(self.numbers)


def trainer(operator: type = CountingOperator, *, elastic: dict[str, Any] | None = None, **arguments: Any) -> Any:
    settings = ElasticConfig(**{**ELASTIC, **(elastic or {})})
    return TorchTrainer(
        **{"training_operator_cls": operator, "num_workers": 2, "config": SETTINGS, "elastic": settings, **arguments}
    )


def hosts(of: Any) -> list[str]:
    return of.apply_all_workers(ray.util.get_node_ip_address)


def facts_of_run(of: Any) -> dict[str, Any]:
    return {"hosts": hosts(of), "recoveries": [asdict(recovery) for recovery in of.recoveries]}


def facts(of: Any, samples: int = SAMPLES) -> dict[str, Any]:
    return {"lost_and_doubled": lost_and_doubled(of, samples), **facts_of_run(of)}


def noted(of: Any) -> tuple[int, int]:
    """Return what `lost_and_doubled` does, from what each rank has noted by itself in one epoch."""
    used = Counter(chain.from_iterable(of.apply_all_operators(lambda operator: operator.noted)))
    return SAMPLES - len(used), sum(used.values()) - len(used)


def digest_of(model: Any) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def weights(of: Any) -> list[str]:
    """Return a digest of the weights of each rank."""
    return of.apply_all_operators(lambda operator: digest_of(operator.model))


def timed(action: Callable[[], Any]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def now(what: str, of: Any) -> None:
    print(f"now {what}: {' '.join(hosts(of))}", flush=True)


# -- parts --------------------------------------------------------------------------------------------


def once() -> dict[str, Any]:
    with trainer() as of:
        of.train()
        return facts(of)


def beside() -> dict[str, Any]:
    """Train with workers that need none of the CPUs."""
    with trainer(num_cpus_per_worker=0, resources_per_worker={"side": 1}) as of:
        of.train()
        return facts(of)


def files() -> dict[str, Any]:
    """Train with a module that only this host has. Save to its disk, and load from it."""
    modules = Path("/tmp/modules")
    modules.mkdir()
    (modules / "lonely.py").write_text("WORD = 'borrowed'\n", encoding="utf-8")
    sys.path.insert(0, str(modules))
    with trainer(BorrowingOperator, seed=1) as of:
        of.train()
        saved = weights(of)
        of.save("/tmp/whole.pt")
        handle = of.save("/tmp/later.pt", blocking=False)
        of.train()
        handle.result()
        left = weights(of)
        try:
            of.save("/tmp/parts", sharded=True)
            refused = ""
        except RaysgdError as error:
            refused = str(error)
        of.load("/tmp/later.pt")
        later = weights(of)
        of.load("/tmp/whole.pt")
        loaded = weights(of)
        of.train()
        words = of.apply_all_operators(lambda operator: operator.word)
        found = {"words": words, "saved": saved, "left": left, "later": later, "loaded": loaded, "again": weights(of)}
        return {**found, "refused": refused, "files": sorted(os.listdir("/tmp")), **facts(of)}


def slow() -> dict[str, Any]:
    """Let a worker join another one. Its set-up may take 20 s at most. Then save."""
    with trainer(LargeOperator, timeout_s=20) as of:
        of.resize(1)
        of.train()
        of.resize(2)
        of.train()
        large = of.apply_all_operators(large_sum)
        seconds = timed(lambda: of.save("/tmp/large.pt"))
        return {"large": large, "save_s": seconds, "bytes": os.path.getsize("/tmp/large.pt"), **facts(of)}


def calls() -> dict[str, Any]:
    """Pass 20 MB to the workers and back, in each way."""
    content = bytes(range(256)) * 80_000
    with trainer(LargeOperator) as of:
        of.train()
        of.save("/tmp/large.pt")
        ways: dict[str, Callable[[], Any]] = {
            "load": lambda: of.load("/tmp/large.pt"),
            "load_state_dict": lambda: of.load_state_dict(of.state_dict()),
            "a large function": lambda: of.apply_all_workers(lambda: len(content)),
            "a large result": lambda: of.apply_all_workers(lambda: bytes(range(256)) * 80_000),
        }
        seconds, results = {}, {}
        for name, way in ways.items():
            seconds[name] = timed(lambda way=way, name=name: results.update({name: way()}))
        found = {"sent": results["a large function"], "same": [each == content for each in results["a large result"]]}
        return {**found, "seconds": seconds, "large": of.apply_all_operators(large_sum), **facts(of)}


def large_sum(operator: Any) -> float:
    return float(operator.large.sum())


def epochs() -> dict[str, Any]:
    """Train one epoch after another, until the test says that it is the last one."""
    seconds, counts, at = [], [], []
    with trainer(config=LONGER) as of:
        for epoch in range(40):
            now(f"epoch {epoch}", of)
            seconds.append(timed(of.train))
            counts.append(lost_and_doubled(of, LONG))
            at.append(hosts(of))
            if os.path.exists("/tmp/last"):
                break
        found = {"seconds": seconds, "at": at, "weights": weights(of), **facts(of, LONG)}
        return {**found, "lost_and_doubled": counts}


def storm() -> dict[str, Any]:
    """Train three workers while anything may fail, also between the epochs, until the test says that it is the last epoch."""
    epochs, settings = [], {"snapshot_every": 20, "backoff_s": 0.5, "backoff_max_s": 4.0, "max_attempts": 30}
    with trainer(ObeyingOperator, config=STORMY, num_workers=3, elastic=settings) as of:
        raised = 0
        while not os.path.exists("/tmp/last"):
            print(f"now epoch {len(epochs)}", flush=True)
            try:
                of.train(max_retries=-1)
                epochs.append([*lost_and_doubled(of, STORMY["samples"]), len(set(weights(of))) - 1])
            except Exception as error:
                if not injected(error):
                    raise
                raised += 1  # the next call trains the rest of the epoch
        newest = of.apply_all_operators(lambda operator: operator.steps.newest["after"])[0]
        began = snapshots(of.recoveries)
        return {
            **facts(of, STORMY["samples"]),
            "epochs": epochs,
            "raised": raised,
            "newest": newest,
            "snapshots": began,
        }


def injected(error: BaseException) -> bool:
    """Return whether this is what a fault has raised, also where that led to another error."""
    return isinstance(error, Injected) or "harming.Injected" in str(error.__cause__)  # the worker's traceback


def wait() -> dict[str, Any]:
    """Train until this host is cut off from the others."""
    with trainer() as of:
        print("now training", flush=True)
        while True:
            of.train()


def moments() -> dict[str, Any]:
    """Train, save and load with four workers. A host fails in each."""
    seconds, counts, recovered = {}, [], []

    def during(what: str, action: Callable[[], Any]) -> None:
        now(what, of)
        seconds[what] = timed(action)
        recovered.append(len(of.recoveries))

    def epoch() -> None:
        of.train()
        counts.append(lost_and_doubled(of, LONG))

    with trainer(LargeOperator, config=LONGER, num_workers=4) as of:
        during("in an epoch", epoch)
        saved = weights(of)
        during("in a save", lambda: of.save("/tmp/large.pt"))
        bytes_saved = os.path.getsize("/tmp/large.pt")
        epoch()
        during("in a load", lambda: of.load("/tmp/large.pt"))
        loaded = weights(of)
        large = of.apply_all_operators(large_sum)
        epoch()
        found = {"seconds": seconds, "recovered": recovered, "saved": saved, "loaded": loaded, "large": large}
        return {**found, "bytes": bytes_saved, **facts(of, LONG), "lost_and_doubled": counts}


def drain() -> dict[str, Any]:
    """Let Ray drain the node of rank 1 in the second epoch."""
    counts = []
    with trainer(config=LONGER) as of:
        of.train()
        before = hosts(of)
        node = of.apply_all_workers(lambda: ray.get_runtime_context().get_node_id())[1]
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        gcs.drain_node(node, reason, "spot", int((time.time() + 60) * 1000))
        for _ in range(4):
            of.train()
            counts.append(lost_and_doubled(of, LONG))
        return {"before": before, **facts(of, LONG), "lost_and_doubled": counts}


def tensorflow() -> dict[str, Any]:
    from noting_keras import NotingKeras

    from raysgd.tf import TFTrainer

    settings = ElasticConfig(**ELASTIC)
    with TFTrainer(training_operator_cls=NotingKeras, num_workers=2, elastic=settings) as of:
        of.train()
        counts = noted(of)

        def own(operator: Any) -> list[float]:
            return [float(each.numpy().sum()) for each in operator.model.weights]

        saved = of.apply_all_operators(own)
        of.save("/tmp/keras.ckpt")
        of.train()
        of.load("/tmp/keras.ckpt")
        found = {"saved": saved, "loaded": of.apply_all_operators(own), "hosts": hosts(of)}
        return {**found, "lost_and_doubled": counts, "recoveries": len(of.recoveries)}


def horovod() -> dict[str, Any]:
    return noting(backend="horovod")


def loaders() -> dict[str, Any]:
    """Train with loader processes, of which each has two batches at a time, on three workers."""
    return noting(loaders=2, megabytes=0.6, num_workers=3)


def large_loaders() -> dict[str, Any]:
    return noting(loaders=2, megabytes=2.6, num_workers=3)


def noting(*, loaders: int = 0, megabytes: float = 0.0, **arguments: Any) -> dict[str, Any]:
    with trainer(NotingOperator, config={"loaders": loaders, "megabytes": megabytes}, **arguments) as of:
        of.train()
        found = {"lost_and_doubled": noted(of), "weights": weights(of), "hosts": hosts(of)}
        pythons = of.apply_all_workers(lambda: (sys.executable, __import__("raysgd").__file__))
        return {**found, "pythons": pythons, "recoveries": [asdict(recovery) for recovery in of.recoveries]}


def unequal() -> dict[str, Any]:
    """Deal the parts of batches by speed, until a whole epoch had other shares than equal ones, and again with other hosts. Verdicts
    need less time. Return both times the hosts and the rows of the ranks, and how far the weights are from those of one worker."""
    speed.WINDOWS, speed.WINDOW_BATCHES, speed.LEAST_S = 3, 4, 0.1
    common = {"parts": 8, "seed": 1, "use_gpu": False}
    config, found, epochs = {"samples": 32 * 60, "batch_size": 16, "loaders": 1, "work_s": 0.004}, [], 0
    with trainer(Working, config=config, elastic={"shares": "speed"}, **common) as of:
        now("equal", of)
        while len(found) < 2:
            before = len(of.recoveries)
            rows, epochs = [each["num_samples"] for each in of.train(reduce_results=False)], epochs + 1
            dealt = 0 < 2 * min(rows) <= max(rows) and len(of.recoveries) == before
            if dealt and hosts(of) not in [each["hosts"] for each in found]:
                found.append({"rows": rows, **facts_of_run(of)})
                now("unequal", of)
        state = of.get_model().state_dict()
    with trainer(Working, config={**config, "batch_size": 32, "work_s": 0.0}, num_workers=1, **common) as alone:
        for _ in range(epochs):
            alone.train()
        same = alone.get_model().state_dict()
    return {"found": found, "differs": max(float((each - same[name]).abs().max()) for name, each in state.items())}


def counting_function(config: dict[str, Any]) -> list[int]:
    """Note the samples of all epochs, as parts of the state that is committed. Save a checkpoint after each epoch."""
    torch.manual_seed(0)
    model = train.torch.prepare_model(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = train.torch.elastic_data_loader(DataLoader(Indexed(config["samples"]), batch_size=8, shuffle=True))
    found = train.load_checkpoint() or {"epoch": -1}
    values = {"epoch": found["epoch"] + 1, "used": []}
    state = train.elastic({"model": model, "optimizer": optimizer, "loader": loader, **values})
    while state["epoch"] < config["epochs"]:
        for index, features, target in loader:
            time.sleep(config["step_s"])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), target).backward()
            parts: list[Any] = [None] * train.world_size()
            dist.all_gather_object(parts, index.tolist())
            optimizer.step()
            state["used"] = [*state["used"], *chain.from_iterable(parts)]
            state.commit()
        train.save_checkpoint(epoch=state["epoch"], words=list(range(1000)))
        train.report(epoch=state["epoch"], used=len(state["used"]))
        state["epoch"] += 1
    return state["used"]


def functions() -> dict[str, Any]:
    """Run a function for three epochs, in the second of which a host may fail, and continue it from its checkpoint."""
    settings = {"samples": 1600, "step_s": 0.02, "epochs": 3}
    elastic = ElasticConfig(hang_timeout_s=ELASTIC["hang_timeout_s"])
    with train.Trainer("torch", num_workers=2, logdir="/tmp/runs", elastic=elastic) as of:
        rounds = of.run_iterator(counting_function, config=settings)
        for rows in rounds:
            print(f"now epoch {rows[0]['epoch'] + 1}", flush=True)
        used = Counter(rounds.get_final_results()[0])
        paths = sorted(str(path) for path in Path("/tmp/runs").rglob("checkpoint_*"))
        newest, path = of.latest_checkpoint, of.latest_checkpoint_path
        again = of.run(counting_function, config={**settings, "epochs": 4}, checkpoint=path)
        recoveries = [asdict(recovery) for recovery in of.recoveries]
    counts = {"lost": 1600 - len(used), "uses": sorted(set(used.values())), "again": len(set(again[0]))}
    return {
        **counts,
        "checkpoints": paths,
        "epoch": newest["epoch"],
        "words": len(newest["words"]),
        "recoveries": recoveries,
    }


PARTS = (once, beside, files, slow, calls, epochs, storm, wait, moments, drain)
PARTS += (tensorflow, horovod, loaders, large_loaders, unequal, functions)

if __name__ == "__main__":
    if sys.argv[1] == "doctor":
        main(["doctor", "--folder", "/tmp"])
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if sys.argv[1] != "files":  # there, raysgd connects, and Ray brings the module
        ray.init(log_to_driver=False)
    try:
        result = {part.__name__: part for part in PARTS}[sys.argv[1]]()
    except RaysgdError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
