"""Backend configs: how they are named, what they need, how their ranks meet."""

import importlib.util
import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from raysgd.rendezvous import Alone, assign_ranks
from raysgd.train import Backend, BackendConfig, HorovodConfig, TensorflowConfig, TorchConfig
from raysgd.train.backends import backend_of, parse_backend
from raysgd.train.tensorflow_meeting import TensorflowMeeting
from raysgd.train.torch_meeting import environment, share_devices

LIMITS: dict[str, Any] = {"host": "127.0.0.1", "join_s": 5, "collective_s": 5}


def test_names() -> None:
    assert isinstance(parse_backend("torch"), TorchConfig)
    assert type(parse_backend("none")) is type(parse_backend(None)) is BackendConfig
    mine = TorchConfig(backend="gloo")
    assert parse_backend(mine) is mine
    with pytest.raises(ValueError, match="'torch', 'tensorflow', 'horovod', 'none'"):
        parse_backend("pytorch")
    for wrong in (5, TorchConfig):
        with pytest.raises(TypeError, match="BackendConfig"):
            parse_backend(wrong)


@pytest.mark.parametrize("name", ["tensorflow", "horovod"])
def test_a_missing_framework_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find(package))
    with pytest.raises(ImportError, match=rf"pip install 'raysgd\[{name}\]'"):
        parse_backend(name)


def test_torch_settings() -> None:
    assert TorchConfig() == TorchConfig(backend=None, init_method="env", timeout_s=1800)
    for wrong in ({"init_method": "file"}, {"backend": "mpi"}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            TorchConfig(**wrong)
    assert TorchConfig().meeting(use_gpu=False, **LIMITS).name == "gloo"
    assert TorchConfig().meeting(use_gpu=True, **LIMITS).name == "nccl"
    assert TorchConfig(backend="gloo").meeting(use_gpu=True, **LIMITS).name == "gloo"
    assert isinstance(BackendConfig().meeting(use_gpu=False, **LIMITS), Alone)


def test_horovod_and_tensorflow_settings_can_be_made_without_them() -> None:
    assert HorovodConfig(timeout_s=5).timeout_s == 5
    for wrong, words in (({"timeout_s": 0}, "timeout_s"), ({"nics": "eth0"}, "nics")):
        with pytest.raises(ValueError, match=words):
            HorovodConfig(**wrong)
    assert isinstance(TensorflowConfig().meeting(use_gpu=False, **LIMITS), TensorflowMeeting)


class Mine(Backend):
    pass


class ByMethod(BackendConfig):
    def backend_cls(self) -> type[Backend]:  # type: ignore[override]
        return Mine


class ByProperty(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return Mine


class Wrong(BackendConfig):
    @property
    def backend_cls(self) -> Any:
        return dict


def test_the_backends_class_may_be_a_property_or_a_method() -> None:
    assert type(backend_of(ByMethod())) is type(backend_of(ByProperty())) is Mine
    with pytest.raises(ValueError, match=r"Wrong.backend_cls"):
        backend_of(Wrong())


def test_the_environment_is_that_of_torchs_launcher() -> None:
    (_, _, third) = assign_ranks(["a", "b", "b"])
    assert environment(third, {"host": "h", "port": 5}) == {
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
    }


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_of_a_node_see_all_their_gpus(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with two GPUs each, one GPU for a worker."""
    places = [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")][:workers]
    rank_infos = assign_ranks([node for node, _ in places])
    store = dist.HashStore()
    for rank_info, (_, gpu) in zip(rank_infos, places, strict=True):
        store.set(f"{rank_info.node_rank}/{rank_info.local_rank}", gpu)
    for rank_info, (node, gpu) in zip(rank_infos, places, strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        index = share_devices(store, rank_info)
        everybody = [other for place, other in places if place == node]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(everybody)
        assert everybody[index] == gpu


def test_workers_with_shared_gpus_list_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    rank_infos = assign_ranks(["a", "a"])
    store.set("0/0", "3,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert share_devices(store, rank_infos[1]) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1,2"


def test_every_tensorflow_rank_is_told_everybodys_address(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = TensorflowMeeting(host="127.0.0.1", join_s=10)
    rank_infos = assign_ranks(["a", "a", "b"])
    places = driver.plan(rank_infos)
    addresses: dict[int, list[str]] = {}

    def come(rank: int) -> None:
        addresses[rank] = TensorflowMeeting(host="127.0.0.1", join_s=10).addresses(rank_infos[rank], places[rank])

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(addresses[0])) == 3
    assert addresses[0] == addresses[1] == addresses[2]
    driver.plan([])


def test_a_tensorflow_loss_is_known_by_the_runtimes_words() -> None:
    meeting = TensorflowMeeting(host="127.0.0.1", join_s=1)
    unavailable = type("UnavailableError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    wrapped = ValueError("training failed")
    wrapped.__cause__ = unavailable("Collective ops is aborted by: peer left")
    assert meeting.is_interruption(wrapped)
    assert not meeting.is_interruption(unavailable("file on a network drive"))
    assert not meeting.is_interruption(ValueError("Collective"))
