"""Whether workers train on GPUs, if the user leaves that to raysgd: the cluster decides, and this machine if there is none."""

from typing import Any

import pytest
import torch

from raysgd import ConfigError
from raysgd.torch import setup
from raysgd.workers.cluster import connecting

ANYWHERE, OUTSIDE, IN_RAY = None, False, True  # where the worker runs
HAS_GPU, HAS_NONE = "this machine has a GPU, but", "this machine has no GPU, but"


@pytest.mark.parametrize(
    ("in_ray", "here", "gpus", "chosen", "says"),
    [
        (IN_RAY, False, 0, False, ""),
        (IN_RAY, False, 8, True, HAS_NONE),
        (IN_RAY, True, 8, True, ""),
        (IN_RAY, True, 0, False, HAS_GPU),
        (IN_RAY, True, None, True, ""),
        (IN_RAY, False, None, False, ""),
        (ANYWHERE, True, 0, True, ""),
        (ANYWHERE, False, 8, True, HAS_NONE),
        (ANYWHERE, False, None, False, ""),
        (OUTSIDE, False, 8, False, ""),
        (OUTSIDE, True, 0, True, ""),
    ],
)
def test_auto_asks_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_ray: bool | None,
    here: bool,
    gpus: float | None,
    chosen: bool,
    says: str,
) -> None:
    joins: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(setup, "gpus_for_workers", lambda *, join: joins.append(join) or gpus)
    assert setup.worker_resources(1, "auto", None, in_ray).gpus == int(chosen)
    assert (says in caplog.text) if says else not caplog.text
    assert in_ray is IN_RAY or True not in joins, "one worker joins no cluster only to ask it"


@pytest.mark.parametrize(("use_gpu", "amount"), [("auto", 0), ("auto", 2), (True, 2)])
def test_resources_for_each_worker_decide(monkeypatch: pytest.MonkeyPatch, use_gpu: Any, amount: int) -> None:
    """They did not: with {"GPU": 0} on a machine with a GPU, workers that saw none used "cuda:0"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(setup, "gpus_for_workers", lambda *, join: pytest.fail("the cluster was asked"))
    assert setup.worker_resources(1, use_gpu, {"GPU": amount}).gpus == amount


def test_a_wrong_value_asks_nothing() -> None:
    with pytest.raises(ConfigError, match="use_gpu must be True, False or 'auto', got 'yes'"):
        setup.worker_resources(1, "yes", {"GPU": 1})


def test_without_a_cluster_there_is_none_to_ask() -> None:
    import ray

    if ray.is_initialized():
        pytest.skip("another test has started a cluster")
    assert connecting.gpus_for_workers(join=True) is None, "RAY_ADDRESS is 'local'"
    assert not ray.is_initialized()


def test_a_cluster_is_asked_for_all_its_nodes(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connecting.gpus_for_workers(join=False) == 0
    nodes = {"head": {"CPU": 8}, "a": {"CPU": 64, "GPU": 8}, "b": {"GPU": 1}}
    monkeypatch.setattr(connecting, "alive_nodes", lambda: nodes)
    assert connecting.gpus_for_workers(join=False) == 9
