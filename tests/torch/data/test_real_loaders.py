"""The loaders of torchdata, LitData and MosaicML Streaming, and WebDataset through torchdata, resume where they were.

The packages are optional: a test is skipped if its package is missing.
"""

import importlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from raysgd import ElasticConfig, TorchTrainer
from tests.torch.small import Recording

pytestmark = pytest.mark.nightly

SAMPLES, BATCH, STEPS = 240, 4, 13


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Divides itself by worker info. The subclass has a state, too."""

    def __init__(self) -> None:
        self.passes, self.place = 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info is not None else (0, 1)
        while self.place * every + first < SAMPLES:
            self.place += 1
            yield self.passes * 1000 + (self.place - 1) * every + first
        self.passes, self.place = self.passes + 1, 0


class Stateful(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.place = state["passes"], state["place"]


def make_torchdata(folder: str, processes: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stateful(), batch_size=BATCH, num_workers=processes)


def make_torchdata_without_state(folder: str, processes: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=processes)


def make_torchdata_map_style(folder: str, processes: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(range(SAMPLES), batch_size=BATCH, num_workers=processes, shuffle=True)  # type: ignore[arg-type]


def make_litdata(folder: str, processes: int) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset

    return StreamingDataLoader(StreamingDataset(folder, shuffle=True, seed=3), batch_size=BATCH, num_workers=processes)


def make_streaming(folder: str, processes: int) -> Any:
    from streaming import StreamingDataLoader, StreamingDataset

    class Numbers(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> int:
            return int(super().__getitem__(index)["n"])

    data = Numbers(local=folder, shuffle=True, shuffle_seed=3, batch_size=BATCH, num_canonical_nodes=1)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=processes)


def make_webdataset(folder: str, processes: int) -> Any:
    import webdataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = sorted(map(str, Path(folder).glob("*.tar")))
    data = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    return StatefulDataLoader(data.map(lambda each: int(each["txt"])), batch_size=BATCH, num_workers=processes)


def write(kind: str, folder: Path) -> None:
    if kind == "litdata":
        from litdata.streaming import Cache

        cache = Cache(str(folder), chunk_size=20)
        for number in range(SAMPLES):
            cache[number] = number
        cache.done()
        cache.merge()
    elif kind == "streaming":
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"n": "int"}, size_limit=400) as writer:
            for number in range(SAMPLES):
                writer.write({"n": number})
    elif kind == "webdataset":
        for shard in range(8):
            with tarfile.open(folder / f"{shard}.tar", "w") as file:
                for number in range(shard * 30, shard * 30 + 30):
                    content = str(number).encode()
                    entry = tarfile.TarInfo(f"{number:05}.txt")
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))


class Reading(Recording):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        if config["kind"] == "streaming":  # it finds its rank in these variables only
            world = {"RANK": self.world_rank, "LOCAL_RANK": self.world_rank}
            world |= {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size}
            os.environ.update({name: str(value) for name, value in world.items()})
        make = getattr(importlib.import_module("tests.torch.data.test_real_loaders"), f"make_{config['kind']}")
        return {"train_loader": make(config["folder"], config["processes"])}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(torch.as_tensor(batch), batch_info)


def seen(operator: Any) -> list[list[float]]:
    found = list(operator.seen)
    operator.seen.clear()
    return found


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "packages"),
    [
        ("torchdata", "torchdata"),
        ("torchdata_without_state", "torchdata"),
        ("torchdata_map_style", "torchdata"),
        ("litdata", "litdata"),
        ("streaming", "streaming"),
        ("webdataset", "webdataset torchdata"),
    ],
)
def test_a_real_loader_resumes(
    ray_cluster: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    packages: str,
    workers: int,
    processes: int,
) -> None:
    for package in packages.split():
        pytest.importorskip(package)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, os.environ.get(name, "0" if "RANK" in name else "1"))
    write(kind, tmp_path)
    steps = STEPS // workers
    arguments: dict[str, Any] = {
        "training_operator_cls": Reading,
        "num_workers": workers,
        "use_gpu": False,
        "seed": 5,
        "config": {"kind": kind, "folder": str(tmp_path), "processes": processes},
        "elastic": ElasticConfig(min_workers=workers),
    }
    with TorchTrainer(**arguments) as trainer:
        trainer.train(num_steps=steps)
        begun = trainer.apply_all_operators(seen)
        within = trainer.state_dict()
        trainer.train()
        rest = trainer.apply_all_operators(seen)
        between = trainer.state_dict()
        trainer.train()
        following = trainer.apply_all_operators(seen)
    used = [int(number) % 1000 for part in (*begun, *rest) for batch in part for number in batch]
    assert sorted(used) == list(range(SAMPLES)), "an epoch uses every sample once"
    with TorchTrainer(**arguments) as trainer:
        trainer.load_state_dict(within)
        trainer.train()
        assert trainer.apply_all_operators(seen) == rest
        trainer.train()
        assert trainer.apply_all_operators(seen) == following
    with TorchTrainer(**arguments) as trainer:
        trainer.load_state_dict(between)
        trainer.train()
        assert trainer.apply_all_operators(seen) == following
