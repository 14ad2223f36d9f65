"""`TrainingOptions`: what its fields may be, what cannot be combined, and errors before anything starts."""

import re
from dataclasses import fields
from typing import Any

import pytest

from raysgd import ConfigError, ElasticConfig, TrainingOptions
from raysgd.torch import TorchTrainer
from tests.peek import options_of
from tests.torch.small import Line, inline, operator_of

VALUES: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp8"}, "precision must be 'fp32', 'fp16', 'bf16', 'apex' or None, got 'fp8'"),
    ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
    ({"clip_norm": 0}, "clip_norm must be a number above 0, or None"),
    ({"clip_value": "1"}, "clip_value must be a number above 0"),
    ({"compile": "yes"}, "compile must be True, False or a dict"),
    ({"compile": {"bakend": "eager"}}, r"compile has no \['bakend'\]; it takes .*'backend'"),
    ({"channels_last": 1}, "channels_last must be True or False"),
    ({"ddp_args": ["static_graph"]}, "ddp_args must be a dict"),
    ({"ddp_args": {"static_grap": True}}, r"ddp_args has no \['static_grap'\]; it takes .*'static_graph'"),
    ({"comm_hook": "zip"}, "comm_hook must be 'fp16', 'bf16', 'powersgd', 'batched_powersgd' or None, got 'zip'"),
    ({"comm_hook": {"name": "fp16", "rank": 1}}, "takes no arguments"),
    ({"parallel": "tensor"}, "parallel must be 'auto', 'ddp', 'fsdp' or None"),
    ({"parallel": "fsdp", "comm_hook": "fp16"}, "comm_hook='fp16' and parallel='fsdp' cannot be combined"),
    ({"parallel": None, "ddp_args": {"static_graph": True}}, "ddp_args are for DistributedDataParallel"),
    ({"accumulate": 2, "read_ahead": False}, "read_ahead=False and accumulate=2 cannot be combined"),
    ({"parallel": "fsdp", "channels_last": True}, "channels_last=True cannot be combined: FSDP cuts parameters"),
    ({"parallel": "fsdp", "precision": "fp16"}, "use 'fp32' or 'bf16'"),
    ({"precision": "apex", "compile": True}, "Apex replaces functions"),
    ({"accumulate": 2, "ddp_args": {"static_graph": True}}, "cannot be combined with accumulate"),
    (
        {"comm_hook": {"name": "powersgd", "rank": 4}},
        r"comm_hook has no \['rank'\]; it takes .*'matrix_approximation_rank'",
    ),
    ({"comm_hook": {"name": "powersgd", "start_powerSGD_iter": 1}}, "comm_hook=.*start_powerSGD_iter"),
]


@pytest.mark.parametrize(("fields", "says"), VALUES, ids=[str(fields) for fields, _ in VALUES])
def test_values_are_checked_when_options_are_created(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainingOptions(**fields)


TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"comm_hook": "fp16"}, {"wrap_ddp": False}, "comm_hook='fp16' and parallel=None cannot be combined"),
    ({"parallel": "fsdp"}, {"use_fp16": True}, "parallel='fsdp' and precision='fp16' cannot be combined"),
    (
        {"parallel": "fsdp"},
        {"num_workers": 2, "elastic": ElasticConfig(snapshot_every=9)},
        "snapshot_every=9 has no effect",
    ),
    ({"sync_batchnorm": True}, {"num_workers": 2}, "torch has no SyncBatchNorm for CPUs"),
    ({"parallel": "fsdp"}, {"num_workers": 2, "name": "a"}, "name='a' and parallel='fsdp' cannot be combined"),
    ({"comm_hook": "bf16"}, {"num_workers": 2}, "comm_hook='bf16' and use_gpu=False cannot be combined"),
    (
        {"parallel": "fsdp"},
        {"num_workers": 2, "use_gpu": True, "backend": "gloo"},
        "gloo sends no tensors from one GPU",
    ),
    (
        {"precision": "apex", "accumulate": 2},
        {"num_workers": 2},
        "gradients of earlier batches where DDP does not see them",
    ),
]


@pytest.mark.parametrize(("options", "more", "says"), TOGETHER, ids=[str(options) for options, _, _ in TOGETHER])
def test_other_arguments_that_do_not_go_with_options(options: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        inline(options=TrainingOptions(**options), **more)


# -- RaySGD's names, and names in the wrong place ------------------------------------------------------------


@pytest.mark.parametrize(("kind", "argument"), [(TrainingOptions, "options"), (ElasticConfig, "elastic")])
def test_a_field_of_a_configuration_is_not_an_argument(kind: Any, argument: str) -> None:
    for name in (field.name for field in fields(kind)):
        words = f"{name} is a field of {kind.__name__}: pass {argument}={kind.__name__}({name}=...)"
        with pytest.raises(ConfigError, match=re.escape(words)):
            inline(**{name: 1})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "acumulate",
            "did you mean 'accumulate', a field of TrainingOptions? Pass options=TrainingOptions(accumulate=",
        ),
        ("min_worker", "did you mean 'min_workers', a field of ElasticConfig? Pass elastic=ElasticConfig(min_workers="),
        ("option", "did you mean 'options'?"),
    ],
)
def test_misspelt_names_get_a_suggestion(name: str, says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"TorchTrainer takes no argument {name!r}: {says}")):
        inline(**{name: 4})


def test_trials_take_the_same_arguments() -> None:
    with pytest.raises(ConfigError, match="clip_norm is a field of TrainingOptions"):
        TorchTrainer.as_trainable(training_operator_cls=Line, clip_norm=1.0)
    with pytest.raises(TypeError, match="did you mean 'num_workers'"):
        TorchTrainer.as_trainable(training_operator_cls=Line, num_worker=2)


def test_options_of_another_type() -> None:
    with pytest.raises(ConfigError, match=r"options must be a raysgd\.TrainingOptions, got"):
        inline(options={"clip_norm": 1.0})


DIFFER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"parallel": "fsdp"}, {"wrap_ddp": False}, "wrap_ddp=False means parallel=None, but options.parallel is 'fsdp'"),
    ({"parallel": None}, {"wrap_ddp": True}, "wrap_ddp=True means parallel='ddp', but options.parallel is None"),
    (
        {"precision": "bf16"},
        {"use_fp16": True},
        "use_fp16=True means precision='fp16', but options.precision is 'bf16'",
    ),
    ({"precision": "fp16"}, {"use_fp16": "apex"}, "use_fp16='apex' means precision='apex'"),
    ({"precision": "fp16"}, {"use_fp16": False}, "use_fp16=False means precision='fp32'"),
    ({}, {"wrap_ddp": "no"}, "wrap_ddp must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("options", "older", "says"), DIFFER, ids=[str(each[:2]) for each in DIFFER])
def test_both_names_with_different_values(options: dict[str, Any], older: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        inline(options=TrainingOptions(**options), **older)


def test_older_names_mean_the_same() -> None:
    def resolved(name: str, older: dict[str, Any], **options: Any) -> Any:
        return getattr(TrainingOptions(**options).resolved(**older), name)

    assert [resolved("parallel", {"wrap_ddp": each}) for each in (None, True, False)] == ["ddp", "ddp", None]
    assert resolved("parallel", {"wrap_ddp": True}, parallel="ddp") == "ddp"
    assert resolved("parallel", {"wrap_ddp": None}, parallel="fsdp") == "fsdp"
    assert [resolved("parallel", {"wrap_ddp": each}, parallel=None) for each in (None, False)] == [None, None]
    found = [resolved("precision", {"use_fp16": each}) for each in (None, False, True, "apex")]
    assert found == ["fp32", "fp32", "fp16", "apex"]
    assert [resolved("precision", {"use_fp16": each}, precision="bf16") for each in (None, False)] == ["bf16", "bf16"]
    assert resolved("precision", {"use_fp16": True}, precision="fp16") == "fp16"


# -- what options do --------------------------------------------------------------------------------------


def test_every_field_reaches_the_operator() -> None:
    common = TrainingOptions(
        precision="bf16",
        parallel="ddp",
        gradients="ranks",
        accumulate=2,
        clip_norm=1.0,
        clip_value=0.5,
        compile={"backend": "eager"},
        channels_last=True,
        sync_batchnorm=True,
        ddp_args={"bucket_cap_mb": 5},
        comm_hook="fp16",
    )
    set_here: set[str] = set()
    others = TrainingOptions(precision="fp32", parallel="ddp", on_nonfinite="skip", read_ahead=False)
    for given in (common, others):
        set_here |= {
            each.name for each in fields(given) if getattr(given, each.name) != getattr(TrainingOptions(), each.name)
        }
        with inline(options=given) as trainer:
            assert options_of(operator_of(trainer)) == given
    assert set_here == {each.name for each in fields(TrainingOptions)}


class WrapperArguments(Line):
    def register(self, **parts: Any) -> Any:
        return super().register(**parts, ddp_args={"static_graph": True})


def test_ddp_arguments_without_ddp_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"register\(ddp_args=...\) is for Distrib.* parallel is 'fsdp'"):
        inline(WrapperArguments, options=TrainingOptions(parallel="fsdp"))
    with inline(WrapperArguments, wrap_ddp=False) as trainer:  # as in v1
        assert trainer.train()["num_samples"] == 12


def test_one_worker_takes_what_is_for_several() -> None:
    with inline(options=TrainingOptions(parallel="fsdp", sync_batchnorm=True)) as trainer:
        assert trainer.train()["batch_count"] == 3
