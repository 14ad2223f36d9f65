"""Train with raysgd on the late device, and print what `test_late_device.py` compares, as JSON: a script for
`python -m`."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.replica.steps.step import Step
from raysgd.torch import replica
from raysgd.torch.data import prefetch
from raysgd.torch.data.prefetch import CudaCarrier, make_carrier
from raysgd.torch.group import nccl
from raysgd.torch.registered import Registered
from raysgd.torch.state import host_memory, packing
from raysgd.torch.state.buffers import RestoreBuffers
from raysgd.torch.state.host_memory import HostMemory
from tests.emulated import late_group
from tests.emulated.late_device import DEVICE, module, stream
from tests.emulated.late_stream import MOST_AHEAD, Stream
from tests.emulated.on_late import Net, OnLate, rows
from tests.faults import until
from tests.replicas import torch_rank

BATCHES = 16  # that are measured

# The trainer's arguments, the optimizer's name and arguments, and those of the loop by hand that trains alike.
ADAM: dict[str, Any] = {"optimizer": "Adam"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SGD": ({}, {}, {}),
    "Adam": ({}, ADAM, {}),
    "Adam, fused": ({}, {**ADAM, "arguments": {"fused": True}}, {}),
    "bf16": ({"options": TrainingOptions(precision="bf16")}, ADAM, {"precision": "bf16"}),
    "fp16": ({"options": TrainingOptions(precision="fp16")}, {}, {"precision": "fp16"}),
    "clip_norm": ({"options": TrainingOptions(clip_norm=1.0)}, {}, {"clip_norm": 1.0}),
    "on_nonfinite": ({"options": TrainingOptions(on_nonfinite="skip")}, {}, {}),
    "accumulate": ({"options": TrainingOptions(accumulate=4)}, {}, {"accumulate": 4}),
    "accumulate, bf16": (
        {"options": TrainingOptions(precision="bf16", accumulate=4)},
        {},
        {"precision": "bf16", "accumulate": 4},
    ),
    "prefetch": ({}, {}, {}),  # with the carrier of CUDA
}


class Watched(OnLate, Net):
    """Notes the device's counts before each forward pass."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.model.register_forward_pre_hook(lambda *_: marks.append(counts()))


marks: list[tuple[int, Counter[str]]] = []


def prefetching(device: torch.device, *, channels_last: bool, ahead: bool, reuse: bool) -> CudaCarrier:
    """Use memory again whatever the operator does, also one that keeps its batches."""
    assert ahead
    return CudaCarrier(device, channels_last=channels_last, streams=torch.get_device_module(device))


def counts() -> tuple[int, Counter[str]]:
    return stream.launched, stream.waits.copy()


def between(
    first: tuple[int, Counter[str]], last: tuple[int, Counter[str]], number: int = 1
) -> tuple[float, dict[str, float]]:
    """Return launches and waits from one count to another, per batch."""
    waits = {name: round(count / number, 2) for name, count in (last[1] - first[1]).items()}
    return round((last[0] - first[0]) / number, 2), waits


def measured(name: str) -> dict[str, Any]:
    arguments, config, hand = CASES[name]
    found: dict[str, Any] = {
        "by_hand": by_hand(config.get("optimizer", "SGD"), tuple(config.get("arguments", {}).items()), **hand)
    }
    states = []
    for kind in (Net, Watched):
        carrier = prefetching if name == "prefetch" and kind is Watched else make_carrier
        with (
            patch.object(replica, "make_carrier", carrier),
            TorchTrainer(training_operator_cls=kind, use_gpu=False, config=config, seed=1, **arguments) as trainer,
        ):
            trainer.train(num_steps=4)
            marks.clear()
            trainer.train(num_steps=BATCHES + 4)
            if kind is Watched:
                found["launches"], found["waits"] = between(marks[2], marks[2 + BATCHES], BATCHES)
                found["end"] = between(marks[-1], counts())[1]
            marks.clear()
            trainer.validate()
            if kind is Watched:
                found["validation"] = between(marks[2], marks[2 + BATCHES], BATCHES)
            states.append(state_of(trainer))
    return {**found, "difference": float((states[0] - states[1]).abs().max())}


@cache
def by_hand(
    optimizer: str,
    arguments: tuple[tuple[str, Any], ...],
    *,
    precision: str = "fp32",
    clip_norm: float | None = None,
    accumulate: int = 1,
) -> float:
    """Return the launches per batch of a loop that trains as the case does, without raysgd."""
    operator = Net({"optimizer": optimizer, "arguments": dict(arguments)})  # which stays on the CPU
    model, criterion = operator.model.to(DEVICE), operator.criterion.to(DEVICE)
    scaler = torch.amp.GradScaler("late", enabled=precision == "fp16")
    lower = torch.bfloat16 if precision == "bf16" else torch.float16
    seen = []
    for number, (x, y) in enumerate(operator._registered.train_loader):
        seen.append(stream.launched)
        if number % accumulate == 0:
            operator.optimizer.zero_grad()
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        with torch.autocast("late", lower, enabled=precision != "fp32"):
            loss = criterion(model(x), y)
        scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
        if (number + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(operator.optimizer)
            scaler.update()
    return round((seen[4 + BATCHES] - seen[4]) / BATCHES, 2)


def state_of(trainer: Any) -> torch.Tensor:
    operator = trainer.get_local_operator()
    moments = [each for own in operator.optimizer.state.values() for each in own.values()]
    every = [*operator.model.state_dict().values(), *(each for each in moments if isinstance(each, torch.Tensor))]
    return torch.cat([each.detach().cpu().flatten().double() for each in every])


class LateNet(OnLate, Net):
    pass


class Noted(LateNet):
    """Notes what a step consists of."""

    def setup(self, config: dict[str, Any]) -> None:
        self.events: list[str] = []
        super().setup(config)
        self.register_data(train_loader=DataLoader(NotedRows(self.events), batch_size=8))
        self.model.register_forward_pre_hook(lambda *_: self.events.append("forward"))
        self.model[0].weight.register_hook(lambda _: self.events.append("backward"))
        self.optimizer.register_step_post_hook(lambda *_: self.events.append("step"))


class NotedRows(Dataset[Any]):
    def __init__(self, events: list[str]) -> None:
        self.rows, self.events = TensorDataset(*rows(28)), events  # the last batch is smaller

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index % 8 == 0:
            self.events.append("read")
        return self.rows[index]


class NotedBatch(Noted):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(batch, batch_info)


READING: dict[str, tuple[type[Noted], TrainingOptions]] = {
    "usual": (Noted, TrainingOptions()),
    "own train_batch": (NotedBatch, TrainingOptions()),
    "read_ahead=False": (Noted, TrainingOptions(read_ahead=False)),
}


def reading() -> dict[str, Any]:
    """Return what steps consist of with the carrier of CUDA, and the largest difference of the weights."""
    found, states = {}, []
    for name, (operator, options) in READING.items():
        with (
            patch.object(replica, "make_carrier", prefetching if options.read_ahead else make_carrier),
            TorchTrainer(training_operator_cls=operator, use_gpu=False, seed=1, options=options) as trainer,
        ):
            trainer.train()
            trainer.train(num_steps=3)
            found[name] = " ".join(trainer.get_local_operator().events)
            states.append(state_of(trainer))
    return {**found, "difference": max(float((states[0] - each).abs().max()) for each in states)}


class Behind(Net):
    """Lets the device, or the copies to it, be several steps late. The last batch is smaller."""

    streams: Sequence[Stream] = ()  # that of the device, and that of the copies

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_loader=DataLoader(TensorDataset(*rows(197)), batch_size=8))
        self.numbers = itertools.count()
        self.model.register_forward_pre_hook(lambda *_: self.hold())

    def hold(self) -> None:
        place = next(self.numbers) % 25 % 6  # both continue before the last step of an epoch
        for number, each in enumerate(self.streams):
            if place == 1 + 2 * number:
                each.hold()
            elif place == 3 + 2 * number:
                each.release()


class TwoBack(Behind):
    """Trains with views of an earlier batch, of which it keeps no other tensor, and keeps all targets."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.earlier: list[Any] = []
        self.targets: list[torch.Tensor] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.earlier.append((batch[0][:], batch[1]))
        self.targets.append(batch[1])
        del batch
        return super().train_batch(self.earlier.pop(0) if len(self.earlier) > 2 else self.earlier[-1], batch_info)


LATE_BATCHES: dict[str, tuple[type[Behind], TrainingOptions]] = {
    "usual": (Behind, TrainingOptions()),
    "accumulate": (Behind, TrainingOptions(accumulate=4)),
    "two back": (TwoBack, TrainingOptions()),
}


def batches() -> dict[str, Any]:
    """Train three epochs with the carrier of CUDA. Return the largest difference to the CPU's weights and kept targets, and
    for how many tensors memory was allocated in each epoch: a stream is registered for each."""
    return {name: late_batches(*case) for name, case in LATE_BATCHES.items()}


def late_batches(operator: type[Behind], options: TrainingOptions) -> dict[str, Any]:
    registered, states = [0], []

    def register(*_: Any) -> None:
        registered[-1] += 1

    class Late(OnLate, operator):  # type: ignore[valid-type,misc]
        pass

    def carry(*given: Any, **named: Any) -> Any:
        carrier = prefetching(*given, **named)
        Late.streams = stream, carrier._stream
        return carrier

    for kind, carriers in ((operator, make_carrier), (Late, carry)):
        with (
            patch.object(replica, "make_carrier", carriers),
            patch.object(torch.Tensor, "record_stream", register),
            TorchTrainer(training_operator_cls=kind, use_gpu=False, seed=1, options=options) as trainer,
        ):
            for _ in range(3):
                trainer.train()
                registered.append(0)
            kept = [each.cpu().flatten().double() for each in getattr(trainer.get_local_operator(), "targets", ())]
            states.append(torch.cat([state_of(trainer), *kept]))
    return {"difference": float((states[0] - states[1]).abs().max()), "allocated": registered[-4:-1]}


class LeftBehind(LateNet):
    """Adds a tensor that only its own code could move."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch([batch[0] + torch.ones(8), batch[1]], batch_info)


def moved() -> dict[str, Any]:
    """Load on one device what the other has saved, continue, and predict. Return what is refused, too."""
    options = TrainingOptions(precision="bf16", on_nonfinite="skip", clip_norm=1.0)
    given: dict[str, Any] = {"use_gpu": False, "config": ADAM, "seed": 1, "options": options}
    results, refused = [], ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        for saver, loader in ((Net, Net), (Net, LateNet), (LateNet, Net)):
            with TorchTrainer(training_operator_cls=saver, **given) as trainer:
                trainer.train(num_steps=3)
                trainer.save(path)
            with TorchTrainer(training_operator_cls=loader, **given) as trainer:
                trainer.load(path)
                trainer.train(num_steps=3)
                predicted = trainer.predict(TensorDataset(*rows(16)))
                results.append(torch.cat([state_of(trainer), predicted.flatten().double()]))
    with TorchTrainer(training_operator_cls=LeftBehind, **given) as trainer:
        try:
            trainer.train(num_steps=1)
        except RuntimeError as error:
            refused = str(error)
    return {"differences": [float((results[0] - each).abs().max()) for each in results[1:]], "refused": refused}


def kept_buffers() -> dict[str, Any]:
    """Keep and restore the buffers of ten BatchNorm layers."""
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(10))).to(DEVICE)
    buffers, step = RestoreBuffers(Registered(models=[model], wrapped=[model])), Step()
    for _ in range(3):
        first = stream.launched
        buffers.kept(step)
        buffers.begin_part(step)
        launches = stream.launched - first
        model(torch.randn(8, 4).to(DEVICE))
        step.outcome = "undone"
        buffers.put_back(step, None)
        buffers.end_step(step)
    return {"launches": launches, "sums": [float(each.sum()) for each in list(model.buffers())[:3]]}


def stack_of(thread: threading.Thread) -> list[str]:
    """Return where a thread is, as a worker tells the driver."""
    frame = sys._current_frames()[thread.ident or 0]
    return [f"{each.filename}:{each.lineno} {each.name}" for each in reversed(traceback.extract_stack(frame))]


def hung() -> dict[str, Any]:
    """Train while the device does nothing, until the host can launch no more."""
    found: dict[str, Any] = {}
    with TorchTrainer(training_operator_cls=Watched, use_gpu=False, config=ADAM, seed=1) as trainer:
        trainer.train(num_steps=4)
        operator, done = trainer.get_local_operator(), stream.done
        stream.hold()
        thread = threading.Thread(target=trainer.train, kwargs={"num_steps": 80})
        thread.start()
        for _ in until(lambda: stream.launched - stream.done > MOST_AHEAD + 1):
            time.sleep(0.01)
        found["committed"], found["done"] = operator.global_step, stream.done - done
        stream.release()
        thread.join()
        held = state_of(trainer)
    with TorchTrainer(training_operator_cls=Net, use_gpu=False, config=ADAM, seed=1) as trainer:
        trainer.train(num_steps=84)
        return {**found, "difference": float((held - state_of(trainer)).abs().max())}


def copied_beside() -> dict[str, Any]:
    """Save and copy a state while the device does nothing, and change the weights and a buffer afterwards. Then train,
    while only the copies to the host are late."""
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(replica, "HostMemory", partial(HostMemory, cuda=module)),
        TorchTrainer(training_operator_cls=LateNet, use_gpu=False, config=ADAM, seed=1) as trainer,
    ):
        trainer.train(num_steps=4)
        operator, before, waits = trainer.get_local_operator(), state_of(trainer), stream.waits.copy()
        stream.hold()
        handle = trainer.save(Path(folder, "state.pt"), blocking=False)
        with patch.object(module, "free", 0):  # so the copy is between two steps
            memory = HostMemory(DEVICE, module)
            copy = memory.copy(packing.pack(operator.model.state_dict()))
        for each in operator.model.state_dict().values():
            each.add_(1)
        found["between"] = memory.beside is None
        found["waits"], found["done"] = dict(stream.waits - waits), handle.done()
        stream.release()
        copied = content_of(copy)
        found["copied"] = float((copied - before[: len(copied)]).abs().max())
        trainer.load(handle.result(60))
        found["saved"] = float((state_of(trainer) - before).abs().max())
        memory = HostMemory(DEVICE, module)
        for _ in range(2):  # the first one makes the stream
            copy = memory.copy(packing.pack(operator.model.state_dict()))
            memory.beside.hold()
        trainer.train(num_steps=2)
        after = state_of(trainer)[: len(copied)]
        found["late"] = not copy._copied.query()
        memory.beside.release()
        trained, stayed = (float((content_of(copy) - each).abs().max()) for each in (after, before[: len(copied)]))
        return {**found, "trained": trained > 0.001, "stayed": stayed}


def content_of(copy: Any) -> torch.Tensor:
    with copy as (content,):
        return torch.cat([each.flatten().double() for each in packing.unpack(content).values()])


def snapshots() -> dict[str, Any]:
    """Train four steps with a snapshot in each, while the device does nothing. Return how many were sent meanwhile, and the
    largest difference of one to a state and a mean of the loss that were read after its step."""
    settings: dict[str, Any] = {"seed": 1, "elastic": ElasticConfig(snapshot_every=1)}
    with patch.object(replica, "HostMemory", partial(HostMemory, cuda=module)):
        rank = torch_rank(LateNet, ADAM, **settings)
    sent: list[Any] = []
    rank.replica.control.upload = lambda message, *data: sent.append((message, b"".join(map(bytes, data))))
    stream.hold()
    thread = threading.Thread(target=rank.train, kwargs={"num_steps": 4})
    thread.start()
    for _ in until(lambda: rank.replica.position.step == 4):
        time.sleep(0.01)
    early = len(sent)
    stream.release()
    thread.join()
    rank.close()
    differences = []
    for message, data in sent:
        alone = torch_rank(Net, ADAM, seed=1)
        result = alone.train(num_steps=message.progress.step)
        expected, state = alone.operator.model.state_dict(), packing.unpack(data)["models"][0]
        differences += [float((state[name] - each).abs().max()) for name, each in expected.items()]
        differences.append(abs(message.partial.metrics["train_loss"] - result["train_loss"]))
    return {"early": early, "steps": [each.progress.step for each, _ in sent], "difference": max(differences)}


def streams() -> dict[str, list[float]]:
    """Return what a stream reads that another one, which is held, will have written, by what orders them."""
    other, found = module.Stream(), dict[str, list[float]]()
    orders: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "event": lambda: stream.wait_event(other.record_event()),
        "stream": lambda: stream.wait_stream(other),
    }
    for name, order in orders.items():
        x = torch.zeros(2, device=DEVICE)
        module.synchronize()
        other.hold()
        with module.stream(other):
            x.fill_(1)
            written = other.record_event()
        order()
        y, read = x.clone(), stream.record_event()
        if name == "nothing":
            read.synchronize()
        assert not written.query() and read.query() == (name == "nothing")
        other.release()
        module.synchronize()
        assert written.query()
        found[name] = [float(each) for each in torch.cat([x, y])]
    return found


def waiting() -> list[str]:
    """Return the stack of a rank that waits for the device's stream, which hangs, in raysgd's own function."""
    late_group.install()
    stream.hold()
    thread = threading.Thread(target=nccl.wait_for_device)
    thread.start()
    for _ in until(lambda: stack_of(thread)[0].endswith(" wait")):
        time.sleep(0.01)
    stack = stack_of(thread)
    stream.release()
    thread.join()
    return stack


def broken() -> dict[str, Any]:
    """Break the device in a step. The last part, because it stays broken."""
    found: dict[str, Any] = {}

    class Breaks(Watched):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if batch_info["global_step"] == 3:
                stream.break_down()
            return super().train_batch(batch, batch_info)

    with TorchTrainer(training_operator_cls=Breaks, use_gpu=False, config=ADAM, seed=1) as trainer:
        for part in ("step", "later"):
            try:
                trainer.train(num_steps=40)
            except RuntimeError as error:
                found[part] = [type(error).__name__, str(error)]
    return found


if __name__ == "__main__":
    prefetch._pinned = lambda tensor: tensor  # the device has no pinned memory
    host_memory._pinned = partial(torch.empty, dtype=torch.uint8)
    parts: dict[str, Any] = {"cases": {name: measured(name) for name in CASES}}
    parts |= {
        part.__name__: part()
        for part in (streams, batches, moved, kept_buffers, copied_beside, snapshots, reading, hung, waiting, broken)
    }
    print(json.dumps(parts))
