"""The installed versions of other libraries still have the private names that raysgd uses."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, get_worker_info

from raysgd.torch import foreign as torch_foreign
from raysgd.workers.cluster import foreign as ray_foreign

# -- torch --------------------------------------------------------------------------------------------


def loader_iterators() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(loader)
    assert torch_foreign.live_iterator(loader) is iterator
    assert torch_foreign.live_iterator(torch_foreign.loader_with(loader, sampler=None)) is None
    (process,) = torch_foreign.processes_of(iterator)
    assert process.is_alive() and torch_foreign.lost_processes(iterator) == []
    torch_foreign.end_processes(iterator)
    process.join(60)
    assert process.exitcode is not None and torch_foreign.lost_processes(iterator) == []
    torch_foreign.forget_iterator(loader)
    assert torch_foreign.live_iterator(loader) is None
    torch_foreign.end_processes(None)


def another_pass() -> None:
    """Of the same processes, also if the loader does not keep them itself."""
    loader = DataLoader([1, 2], num_workers=1)  # type: ignore[arg-type]
    iterator = torch_foreign.begin_pass(loader)
    processes, first = list(torch_foreign.processes_of(iterator)), next(iterator)
    torch_foreign.keep_iterator(loader, iterator)
    again = torch_foreign.begin_pass(loader)
    assert int(first) == 1 and [int(each) for each in again] == [1, 2]
    assert again is iterator and list(torch_foreign.processes_of(again)) == processes
    torch_foreign.keep_iterator(loader, iterator)  # whose processes have ended
    assert torch_foreign.live_iterator(loader) is None


def asked_ranks() -> None:
    with torch_foreign.ranks_asked() as asked:
        assert not asked
        for read in (dist.get_rank, dist.get_world_size):
            before = len(asked)
            with suppress(ValueError):  # there is no process group here
                read()
            assert len(asked) > before


def worker_info() -> None:
    info = torch_foreign.worker_info(id=3, num_workers=4, seed=0, dataset=None)
    with torch_foreign.worker_info_seen_as(info):
        assert get_worker_info() is info
    assert get_worker_info() is None


def process_group() -> None:
    assert torch_foreign.collective_counter() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch_foreign.groups() == [dist.group.WORLD]
        count = torch_foreign.collective_counter()
        assert count is not None
        before = count()
        dist.all_reduce(torch.ones(1))
        assert count() == torch_foreign.calls_made() == before + 1
        torch_foreign.set_collective_limit(5.0)
        torch_foreign.abort_groups(torch_foreign.groups())
        assert dist.is_initialized()
        torch_foreign.forget_groups()
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def sharded_model() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Without sockets, because torch keeps meshes, and so their groups, until the process ends.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 2))
        chosen = torch_foreign.resharding([model[0], model])
        model.set_reshard_after_forward(False)  # type: ignore[operator]
        kept = [getattr(owner, name) for owner, name, _ in chosen]
        assert not any(kept) and any(value for *_, value in chosen)
    finally:
        dist.destroy_process_group()


def signal_handler() -> None:
    from torch.utils.data._utils import signal_handling

    def other() -> None: ...

    other.__module__ = signal_handling.__name__
    assert torch_foreign.is_loaders_signal_handler(other)
    assert not torch_foreign.is_loaders_signal_handler(signal_handler)


def compiled_model() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    assert torch_foreign.uncompiled(torch.compile(model, backend="eager")) is torch_foreign.uncompiled(model) is model
    torch_foreign.compile_in_place(model, backend="eager")
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert model(torch.ones(1, 2)).shape == (1, 1)


def schedulers() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[1])  # type: ignore[arg-type]
    assert list(torch_foreign.nested_schedulers(outer)) == inner
    assert not torch_foreign.nested_schedulers(inner[0])


def versions_of_modules() -> None:
    state = nn.Linear(2, 1).state_dict()
    copied = dict(state)
    assert torch_foreign.with_module_versions(copied, {}) is copied
    versioned = torch_foreign.with_module_versions(copied, state)
    assert versioned == copied and versioned._metadata == state._metadata  # type: ignore[attr-defined]
    assert versioned._metadata[""] == {"version": 1}  # type: ignore[attr-defined]


def loading_by_copying() -> None:
    methods = ("load_state_dict", "set_extra_state", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
    own = [type("Own", (nn.Linear,), {name: lambda self, *given: None})(1, 1) for name in methods]
    hooked, after, before, instance = (nn.Linear(1, 1) for _ in range(4))
    hooked.register_load_state_dict_pre_hook(lambda *args: None)
    after.register_load_state_dict_post_hook(lambda *args: None)
    before.register_state_dict_post_hook(lambda *args: None)
    instance.load_state_dict = lambda *args: None  # type: ignore[method-assign,assignment]
    assert torch_foreign.loads_by_copying(
        nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.TransformerEncoderLayer(4, 2))
    )
    for inner in (*own, nn.LazyLinear(1), hooked, after, before, instance):
        assert not torch_foreign.loads_by_copying(nn.Sequential(inner)), inner


def multiplication() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    torch_foreign.multiply_all(tensors, 0.5)
    assert [float(each.sum()) for each in tensors] == [1.0, 1.5]
    torch_foreign.multiply_all([], 0.5)
    before = torch_foreign.content_version(tensors[0])
    torch_foreign.multiply_all(tensors, 0.5)
    assert torch_foreign.content_version(tensors[0]) > before


def copies() -> None:
    numbers: list[torch.Tensor] = [torch.ones(2), torch.tensor(3)]
    buffers = [torch.zeros(2), torch.tensor(0)]
    torch_foreign.copy_all(numbers, buffers)
    assert [each.tolist() for each in buffers] == [[1.0, 1.0], 3]
    torch_foreign.copy_all([], [])


def changes_unnoticed() -> None:
    weight, buffer = torch.ones(1, requires_grad=True), torch.tensor([2.0])
    product = weight * buffer
    with torch_foreign.unnoticed([buffer]):
        torch_foreign.copy_all([torch.tensor([3.0])], [buffer])
    product.backward()
    assert weight.grad is not None and weight.grad.item() == 3.0


def backward_callback() -> None:
    called = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: torch_foreign.run_after_backward(lambda: called.append(1)))
    (weight * 2).sum().backward()
    assert called == [1]


def uses_of_a_storage() -> None:
    tensor = torch.ones(4)
    alone, weight = torch_foreign.storage_uses(tensor), torch.ones(4, requires_grad=True)
    holders: list[Callable[[], Any]] = [
        tensor.detach,
        lambda: tensor[1:].view(3, 1),
        lambda: tensor.detach().untyped_storage(),
        lambda: (weight * tensor.detach()).sum(),  # has saved it for the backward pass
    ]
    for hold in holders:
        held = hold()
        assert torch_foreign.storage_uses(tensor) > alone
        del held
        assert torch_foreign.storage_uses(tensor) == alone
    tensor.detach().untyped_storage().resize_(0)
    assert torch_foreign.storage_uses(tensor) != alone


TORCH: list[Callable[[], None]] = [
    loader_iterators,
    another_pass,
    worker_info,
    asked_ranks,
    process_group,
    sharded_model,
    signal_handler,
    compiled_model,
    schedulers,
    versions_of_modules,
    loading_by_copying,
    multiplication,
    uses_of_a_storage,
    copies,
    changes_unnoticed,
    backward_callback,
]


@pytest.mark.parametrize("check", TORCH, ids=lambda check: check.__name__)
def test_torch_has_the_names(check: Callable[[], None]) -> None:
    check()


# -- accelerate and transformers ----------------------------------------------------------------------


def test_accelerate_has_the_names() -> None:
    state = pytest.importorskip("accelerate.state")
    state.GradientState()
    assert state.PartialState(cpu=True).initialized
    torch_foreign.reset_accelerate()
    assert not state.PartialState._shared_state and not state.GradientState._shared_state


@pytest.mark.parametrize("name", ["_load_from_checkpoint", "_load_best_model"])
def test_transformers_has_the_names(name: str) -> None:
    trainer = pytest.importorskip("transformers").Trainer
    from raysgd.train.huggingface.foreign import WeightsInMemory

    own, theirs = (getattr(kind, name).__code__ for kind in (WeightsInMemory, trainer))
    assert theirs.co_varnames[: theirs.co_argcount] == own.co_varnames[: own.co_argcount]


# -- TensorFlow and Keras ----------------------------------------------------------------------------


def collectives(tf: Any) -> None:
    from tensorflow.python.eager import context

    from raysgd.tf import foreign

    own = context.Context()  # the process's own could not be used for collectives afterwards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "context", lambda: own)
        foreign.abort_collectives()
        assert not own._initialized
        foreign.set_coordination_limits(2, join_s=7.0, heartbeat_s=3.0)
        limits = own.coordination_service
        assert limits.cluster_register_timeout_in_ms == 7000
        assert limits.heartbeat_timeout_in_ms == 3000
        assert [job.num_tasks for job in limits.coordinated_job_list] == [2]
    assert callable(own.abort_collective_ops)
    assert foreign.UNAVAILABLE == tf.errors.UNAVAILABLE


def data_sets(tf: Any) -> None:
    from raysgd.tf import foreign

    data = tf.data.Dataset.range(8).batch(4)
    assert foreign.batch_size(data) == 4
    assert foreign.batch_size(tf.data.Dataset.range(8).batch(3)) == 3
    parts = [foreign.shard_by_file(data, 2, index) for index in range(2)]  # without files, every second batch
    assert sorted(number for part in parts for batch in part for number in batch.numpy()) == list(range(8))


def test_an_optimizer_makes_two_steps_with_one_scale() -> None:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torch_foreign.keep_found(scaler, optimizer)  # there is nothing yet
    for gradient in (math.inf, 4.0):
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), gradient)
        scaler.step(optimizer)
        torch_foreign.keep_found(scaler, optimizer)
    scaler.update()
    assert float(weight) == -1.0 and scaler.get_scale() == 2.0


def keras_models(tf: Any) -> None:
    import keras

    from raysgd.tf import foreign

    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.layers.Dense(3), inner])
    kinds = sorted(type(layer).__name__ for layer in foreign.layers_without_inner_ones(model))
    assert kinds == ["BatchNormalization", "Dense", "Dense"]
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    for each in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        before = foreign.times_applied(each)
        each.apply([tf.constant(1.0)], [variable])
        assert foreign.times_applied(each) == before + 1
    masking = keras.layers.Embedding(3, 2, mask_zero=True)
    assert foreign.has_mask([tf.zeros([1]), masking(tf.constant([[0, 1]]))]) and not foreign.has_mask(tf.zeros([1]))


@pytest.mark.parametrize("check", [collectives, data_sets, keras_models], ids=lambda check: check.__name__)
def test_tensorflow_has_the_names(check: Callable[[Any], None]) -> None:
    check(pytest.importorskip("tensorflow"))


# -- Ray ----------------------------------------------------------------------------------------------


def test_ray_has_the_names(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    with monkeypatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(tmp_path))
        assert ray_foreign.address_of_this_machine() == ""
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("192.0.2.7:6379")  # `ray start` writes it
        assert ray_foreign.address_of_this_machine() == "192.0.2.7:6379"
    (node,) = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    assert "CPU" in ray_foreign.free_resources_by_node()[node] or ray_foreign.free_resources_by_node()[node]
    assert ray_foreign.draining_nodes() == {}
    assert ray_foreign.other_scripts() >= 0
    with pytest.raises(SystemExit) as exited:
        ray.actor.raise_sys_exit_with_custom_error_message("as exit_actor() raises it")
    assert ray_foreign.is_exit_of_actor(exited.value) and not ray_foreign.is_exit_of_actor(SystemExit(0))
    assert ray_foreign.gpus_here() >= 0
    logs = ray_foreign.logs_folder()
    assert logs is not None and logs.is_dir()
    ray_foreign.hide_deaths_of(node, 1)
    assert (node, 1) in sys.modules["ray._private.worker"].print_to_stdstream.workers


def test_ray_tune_has_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    from ray.train._internal import session

    class Trial:
        world_rank = None

        def report(self, metrics: Any, checkpoint: Any = None) -> None:
            reports.append((metrics, checkpoint))

    reports: list[Any] = []
    monkeypatch.setattr(session, "_session", Trial())
    own = ray_foreign.replace_report_to_tune(lambda metrics, **more: own({**metrics, "added": 1}, **more))
    tune.report({"loss": 2})
    assert reports == [({"loss": 2, "added": 1}, None)]


def test_ray_data_has_the_names(ray_cluster: None) -> None:
    data = pytest.importorskip("ray.data")
    (iterator,) = data.range(4).streaming_split(1)
    actor = ray_foreign.split_coordinator(iterator)
    assert hasattr(actor, "_actor_id")
    import ray

    ray.kill(actor)


# -- Horovod ------------------------------------------------------------------------------------------


@pytest.mark.horovod
def test_horovod_has_the_names() -> None:
    hvd: Any = pytest.importorskip("horovod.torch")
    from raysgd.horovod import foreign

    assert hasattr(foreign.basics(), "init")
    hvd.init()
    try:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), named_parameters=[("weight", weight)])
        assert not foreign.has_unsent_gradients(optimizer)
        foreign.stop_sending(optimizer)
        assert not foreign.has_unsent_gradients(optimizer)
    finally:
        hvd.shutdown()
