"""Backend configs: their names, what they need, and how they connect the ranks."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from raysgd.core.protocols import SingleWorkerBackend
from raysgd.core.ranks import assign_ranks
from raysgd.errors import ConfigError
from raysgd.tf.function_backend import TensorflowFunctionBackend
from raysgd.torch.group.devices import see_gpus
from raysgd.torch.group.function_backend import TorchFunctionBackend, environment
from raysgd.train import Backend, BackendConfig, HorovodConfig, TensorflowConfig, TorchConfig
from raysgd.train.backends import backend_of, parse_backend

LIMITS: dict[str, Any] = {"host": "127.0.0.1", "join_s": 5, "collective_s": 5}


def test_names_of_backends() -> None:
    assert isinstance(parse_backend("torch"), TorchConfig)
    assert type(parse_backend("none")) is type(parse_backend(None)) is BackendConfig
    mine = TorchConfig(backend="gloo")
    assert parse_backend(mine) is mine
    with pytest.raises(ValueError, match="'torch', 'tensorflow', 'horovod', 'none'"):
        parse_backend("pytorch")
    for wrong in (5, TorchConfig):
        with pytest.raises(TypeError, match="BackendConfig"):
            parse_backend(wrong)


def test_another_package_offers_a_backend_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rings.py").write_text(
        "from raysgd.train import BackendConfig\n\n\nclass RingConfig(BackendConfig):\n    pass\n"
    )
    metadata = tmp_path / "rings-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rings\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[raysgd.backends]\nring = rings:RingConfig\n")
    with pytest.raises(ConfigError, match="'none' or a BackendConfig, got 'ring'"):
        parse_backend("ring")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(parse_backend("ring")).__name__ == "RingConfig"
    assert isinstance(parse_backend("torch"), TorchConfig)
    with pytest.raises(ConfigError, match="'none', 'ring' or a BackendConfig, got 'rings'"):
        parse_backend("rings")


@pytest.mark.parametrize("name", ["tensorflow", "horovod"])
def test_the_error_about_a_missing_framework_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find(package))
    with pytest.raises(ImportError, match=rf"pip install 'raysgd\[{name}\]'"):
        parse_backend(name)


def test_torch_settings() -> None:
    assert TorchConfig() == TorchConfig(backend=None, init_method="env", timeout_s=1800)
    for wrong in ({"init_method": "file"}, {"backend": "mpi"}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            TorchConfig(**wrong)
    assert TorchConfig().make_backend(gpus=0, **LIMITS).name == "gloo"
    assert TorchConfig().make_backend(gpus=1, **LIMITS).name == "nccl"
    assert TorchConfig(backend="gloo").make_backend(gpus=1, **LIMITS).name == "gloo"
    assert isinstance(BackendConfig().make_backend(gpus=0, **LIMITS), SingleWorkerBackend)


def test_horovod_and_tensorflow_settings_do_not_need_the_frameworks() -> None:
    assert HorovodConfig(timeout_s=5).timeout_s == 5
    for wrong, message in (({"timeout_s": 0}, "timeout_s"), ({"nics": "eth0"}, "nics")):
        with pytest.raises(ValueError, match=message):
            HorovodConfig(**wrong)
    assert isinstance(TensorflowConfig().make_backend(gpus=0, **LIMITS), TensorflowFunctionBackend)


class CustomBackend(Backend):
    pass


class ByMethod(BackendConfig):
    def backend_cls(self) -> type[Backend]:  # type: ignore[override]
        return CustomBackend


class ByProperty(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return CustomBackend


class Wrong(BackendConfig):
    @property
    def backend_cls(self) -> Any:
        return dict


def test_backend_cls_can_be_a_property_or_a_method() -> None:
    assert type(backend_of(ByMethod())) is type(backend_of(ByProperty())) is CustomBackend
    with pytest.raises(ValueError, match=r"Wrong.backend_cls"):
        backend_of(Wrong())


def test_the_environment_is_that_of_torchrun() -> None:
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


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_workers_of_a_node_see_all_their_gpus(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes have two GPUs each, one for each worker. In the second generation, the workers see all GPUs of their node."""
    workers_and_gpus = [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")][:workers]
    driver = TorchFunctionBackend("nccl", use_gpu=True)
    ranks = [TorchFunctionBackend("nccl", use_gpu=True) for _ in workers_and_gpus]
    for generation in range(2):
        offers = []
        for rank, (_, gpu) in zip(ranks, workers_and_gpus, strict=True):
            if generation == 0:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
            offers.append(rank.offer())
        plans = driver.plan(assign_ranks([node for node, _ in workers_and_gpus]), offers)
        for plan, rank, (node, gpu) in zip(plans, ranks, workers_and_gpus, strict=True):
            visible = [other for place, other in workers_and_gpus if place == node]
            index = see_gpus(plan["gpus"], rank.offer()["gpus"])
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(visible) and visible[index] == gpu
    driver.plan([])


def test_a_custom_backend_can_share_the_gpus_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharing(CustomBackend):
        share_cuda_visible_devices = True

    class SharingConfig(BackendConfig):
        @property
        def backend_cls(self) -> type[Backend]:
            return Sharing

    driver, *ranks = (SharingConfig().make_backend(gpus=1, **LIMITS) for _ in range(3))
    offers = []
    for rank, gpu in zip(ranks, "10", strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
        offers.append(rank.offer())
    for rank, rank_info, plan in zip(
        ranks, assign_ranks(["a", "a"]), driver.plan(assign_ranks(["a", "a"]), offers), strict=True
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        rank.join(rank_info, plan)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert driver.plan([]) == []
    for config, use_gpu in ((SharingConfig(), False), (ByProperty(), True)):
        assert type(config.make_backend(gpus=int(use_gpu), **LIMITS)) is SingleWorkerBackend


def test_without_gpus_the_workers_are_not_asked_for_offers() -> None:
    driver = TorchFunctionBackend("gloo")
    assert not driver.needs_offers and "gpus" not in driver.plan(assign_ranks(["a"]))[0]
    driver.plan([])


def test_tensorflow_errors_of_failed_peers_are_interruptions() -> None:
    backend = TensorflowFunctionBackend(host="127.0.0.1")
    unavailable = type("UnavailableError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"})
    wrapped = ValueError("training failed")
    wrapped.__cause__ = unavailable("Collective ops is aborted by: peer left")
    assert backend.is_interruption(wrapped)
    assert not backend.is_interruption(unavailable("file on a network drive"))
    assert not backend.is_interruption(ValueError("Collective"))
