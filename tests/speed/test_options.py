"""Options: which values and combinations are allowed. Errors are raised before anything starts."""

from typing import Any

import pytest

from raysgd import ConfigError, ElasticConfig
from raysgd.torch import TorchTrainer
from raysgd.torch.options import TrainingOptions
from raysgd.torch.setup import resolve_parallel
from tests.torch.small import Line, inline

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": 0}, "accumulate must be a whole number of batches, 1 or more, got 0"),
    ({"accumulate": True}, "accumulate must be"),
    ({"clip_norm": 0}, "clip_norm must be a number above 0, or None"),
    ({"clip_value": "1"}, "clip_value must be a number above 0"),
    ({"compile": "yes"}, "compile must be True, False or a dict"),
    ({"compile": {"bakend": "eager"}}, r"compile has no \['bakend'\]; it takes .*'backend'"),
    ({"channels_last": 1}, "channels_last must be True or False"),
    ({"ddp_args": ["static_graph"]}, "ddp_args must be a dict"),
    ({"ddp_args": {"static_grap": True}}, r"ddp_args has no \['static_grap'\]; it takes .*'static_graph'"),
    ({"ddp_args": {"module": None}}, "ddp_args has no"),
    ({"comm_hook": "zip"}, "comm_hook must be one of 'fp16', 'bf16', 'powersgd'"),
    ({"comm_hook": {"name": "fp16", "rank": 1}}, "takes no arguments"),
    ({"parallel": "tensor"}, "parallel must be 'ddp', 'fsdp' or None"),
    ({"parallel": "fsdp", "wrap_ddp": False}, "wrap_ddp=False means parallel=None.*pass one"),
    ({"parallel": "fsdp", "comm_hook": "fp16"}, "comm_hook is for DistributedDataParallel, but parallel is 'fsdp'"),
    ({"parallel": None, "ddp_args": {"static_graph": True}}, "ddp_args is for DistributedDataParallel"),
    ({"wrap_ddp": False, "comm_hook": "fp16"}, "comm_hook is for DistributedDataParallel, but parallel is None"),
    ({"parallel": "fsdp", "channels_last": True}, "cannot keep channels_last"),
    ({"parallel": "fsdp", "precision": "fp16"}, "needs precision 'fp32' or 'bf16'"),
    ({"parallel": "fsdp", "elastic": ElasticConfig(snapshot_every=2.5)}, "their clocks differ"),
    ({"accumulate": 2, "ddp_args": {"static_graph": True}}, "cannot be combined with accumulate"),
    ({"sync_batchnorm": True, "num_workers": 2}, "sync_batchnorm=True needs GPUs"),
    ({"comm_hook": "bf16", "num_workers": 2}, "comm_hook='bf16' needs GPUs"),
    (
        {"comm_hook": {"name": "powersgd", "rank": 4}},
        r"comm_hook has no \['rank'\]; it takes .*'matrix_approximation_rank'",
    ),
    ({"comm_hook": {"name": "powersgd", "start_powerSGD_iter": 1}}, "comm_hook=.*start_powerSGD_iter"),
    (
        {"precision": "apex", "accumulate": 2, "num_workers": 2},
        "gradients of earlier batches where DDP does not see them",
    ),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_invalid_options_are_refused_at_construction(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        inline(**given)


class WrapperArguments(Line):
    def register(self, **parts: Any) -> Any:
        return super().register(**parts, ddp_args={"static_graph": True})


def test_ddp_arguments_without_ddp_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"register\(ddp_args=...\) is for Distrib.* parallel is 'fsdp'"):
        inline(WrapperArguments, parallel="fsdp")
    with inline(WrapperArguments, wrap_ddp=False) as trainer:  # as in v1
        assert trainer.train()["num_samples"] == 12


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="TorchTrainer takes no argument 'acumulate': did you mean 'accumulate'"):
        inline(acumulate=4)
    with pytest.raises(DeprecationWarning, match="num_replicas"):
        inline(num_replicas=2)


def test_one_worker_accepts_options_for_several() -> None:
    given: dict[str, Any] = {"parallel": "fsdp", "sync_batchnorm": True}
    with TorchTrainer(training_operator_cls=Line, config={}, use_gpu=False, **given) as trainer:
        assert trainer.train()["batch_count"] == 3


def test_wrap_ddp_is_another_name_for_parallel() -> None:
    assert [resolve_parallel(given, True) for given in ("auto", "ddp", "fsdp", None)] == ["ddp", "ddp", "fsdp", None]
    assert [resolve_parallel(given, False) for given in ("auto", None)] == [None, None]


def test_a_comm_hook_may_have_arguments() -> None:
    named = TrainingOptions(comm_hook={"name": "powersgd", "matrix_approximation_rank": 2})
    assert (named.hook_name, named.hook_args) == ("powersgd", {"matrix_approximation_rank": 2})
