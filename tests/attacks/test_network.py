"""Clients without the key attack every port that the library opens while it trains, without any effect.

The ports are those on which the driver and the workers listen, except for Ray's, which were open before. One trainer
goes through all attacks at once, with saves, a replacement and changes of the number of workers."""

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysgd import ElasticConfig
from tests.attacks.attackers import ATTACKS, Storm, listening, note_ports
from tests.faults import Fault, Ground

pytestmark = [
    pytest.mark.more,
    pytest.mark.elastic,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc and netlink"),
]

SHUTDOWN_S = 60.0
PLANNED = {"growth", "shrink", "resize"}
# torch's store looks up the name of every client before it serves the next one. With hundreds of clients during a
# rendezvous, the time depends on the name server, so these attacks are not made then.
FLOODS = [name for name in ATTACKS if name.endswith("-300")]
GENTLE = [name for name in ATTACKS if name not in FLOODS]
PATIENT = ElasticConfig(grow=False, hang_timeout_s=120)


@dataclass
class Field:
    """Owns the folder with the processes under attack, and the reports of the attacks so far."""

    folder: Path
    storms: list[Storm] = field(default_factory=list)

    @property
    def hook(self) -> Callable[[], None]:
        """Note a worker's ports before the library opens its own."""
        return functools.partial(note_ports, str(self.folder))

    def storm(self, *names: str) -> Storm:
        import ray

        storm = Storm(self.folder, names, host=ray.util.get_node_ip_address())
        self.storms.append(storm)
        return storm

    def check(self) -> None:
        """Check that the last storm attacked ports, and that no process has unpickled what it sent."""
        report = self.storms[-1].report
        assert report.ports and report.tried > report.unreachable, "no port was attacked"
        assert not (self.folder / "executed").exists(), "code of an attacker was executed"


@pytest.fixture(scope="module")
def ready(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        made = Field(tmp_path_factory.mktemp(name))
        note_ports(str(made.folder))
        return made

    return make


def ended_quickly(shutdown: Callable[[], None]) -> None:
    began = time.monotonic()
    shutdown()
    assert time.monotonic() - began < SHUTDOWN_S


# -- classes --------------------------------------------------------------------------------------------------------


@dataclass
class Arena:
    """A trainer with two workers under attack."""

    field: Field
    ground: Ground
    # Horovod's own connections have no key: an attack can make its rendezvous fail, which is then tried again later.
    forms_under_attack: bool
    planned: Counter[str] = field(default_factory=Counter)

    def epoch(self) -> None:
        self.ground.trainer.train()
        self.ground.assert_epoch_exact()

    def save(self) -> None:
        """Save and load under attack, also in the background, and compare the weights."""
        trainer, path = self.ground.trainer, self.field.folder / "saved.pt"
        trainer.save(path)
        before = trainer.state_dict()
        trainer.save(path, blocking=False).result(60)  # one that waits for an attacker takes 600 s
        trainer.load(path)
        assert same(trainer.state_dict()["models"], before["models"])
        assert same(torch.load(path, weights_only=True)["models"], before["models"])

    def replace(self) -> None:
        """Kill and replace one worker, and remove and add one."""
        trainer = self.ground.trainer
        self.ground.arm(Fault(1, 3))
        self.epoch()
        assert self.ground.fired() == 1
        self.planned["worker death"] += 1
        self.ground.whole_again(2)
        trainer.resize(1)
        self.epoch()
        self.ground.whole_again(2)
        self.epoch()

    def check(self) -> None:
        """Check that only the workers that were killed here have failed."""
        self.field.check()
        reasons = Counter(recovery.reason for recovery in self.ground.trainer.recoveries)
        assert Counter({reason: count for reason, count in reasons.items() if reason not in PLANNED}) == self.planned


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.fixture(scope="module", params=["gloo", pytest.param("horovod", marks=pytest.mark.horovod)])
def arena(ready: Callable[[str], Field], request: pytest.FixtureRequest) -> Iterator[Arena]:
    chosen = ready(request.param)
    ground = Ground(
        chosen.folder / "marks",
        num_workers=2,
        backend=request.param,
        use_gpu=False,
        elastic=PATIENT,
        initialization_hook=chosen.hook,
        config={"samples": 80, "pace": 0.005},
    )
    yield Arena(chosen, ground, forms_under_attack=request.param != "horovod")
    ended_quickly(ground.trainer.shutdown)


def test_the_ports_are_those_of_the_library(arena: Arena) -> None:
    """Check that all ports are attacked that a worker has in addition to those of other Ray actors."""
    import ray

    count = ray.remote(lambda: len(listening([os.getpid()])))
    noted = [len(Path(arena.field.folder, str(pid)).read_text().split(",")) for pid in arena_pids(arena)]
    assert noted == [ray.get(count.remote())] * 2
    with arena.field.storm("silent-1") as storm:
        arena.epoch()
    attacked = {pid for pid, _, _ in storm.report.ports}
    assert os.getpid() in attacked and len(attacked) == 3, "ports of the driver and of both workers"


def arena_pids(arena: Arena) -> list[int]:
    return list(arena.ground.trainer.apply_all_workers(os.getpid))


def test_all_attacks_at_once(arena: Arena) -> None:
    with arena.field.storm(*ATTACKS):
        arena.epoch()
        arena.save()
    arena.check()
    with arena.field.storm(*GENTLE) if arena.forms_under_attack else nullcontext():
        arena.replace()
        arena.save()
    arena.check()


def test_all_ranks_have_the_same_weights(arena: Arena) -> None:
    """Each epoch's samples were compared with those of an undisturbed one. Steps had fewer samples while a worker was missing."""
    first, *others = arena.ground.trainer.apply_all_operators(
        lambda operator: [each.detach() for each in operator.unwrapped().parameters()]
    )
    assert others and all(same(first, each) for each in others)


# -- TensorFlow -----------------------------------------------------------------------------------------------------


def tensorflow_trainer(config: dict[str, Any], **arguments: Any) -> Any:
    pytest.importorskip("tensorflow")
    from raysgd.tf import TFTrainer
    from tests.tf.small import Small

    return TFTrainer(
        training_operator_cls=Small, config=config, elastic=ElasticConfig(grow=False, hang_timeout_s=120), **arguments
    )


@pytest.mark.nightly
def test_tensorflow(ready: Callable[[str], Field], tmp_path: Path) -> None:
    """Keras models on two workers under all attacks: training, saving, loading, a worker failure and a replacement."""
    undisturbed = tensorflow_trainer({}, num_workers=2)
    undisturbed.train()
    expected = arrays_of(undisturbed.state_dict())
    undisturbed.shutdown()
    chosen = ready("tensorflow")
    config = {"pause": 0.01, "marks": str(tmp_path)}
    trainer = tensorflow_trainer(config, num_workers=2, initialization_hook=chosen.hook)
    with chosen.storm(*ATTACKS):
        trainer.train()
        trainer.load(trainer.save(tmp_path / "saved"))
    chosen.check()
    assert not trainer.recoveries
    for one, other in zip(arrays_of(trainer.state_dict()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with chosen.storm(*GENTLE):
        trainer.apply_all_operators(kill_rank_1)
        trainer.train()
        trainer.resize(2)
        trainer.train()
    chosen.check()
    assert [each.reason for each in trainer.recoveries if each.reason not in PLANNED] == ["worker death"]
    assert trainer.world_size == 2
    ended_quickly(trainer.shutdown)


def kill_rank_1(operator: Any) -> None:
    operator.config["fault"] = (1, operator.global_step + 2, "kill")


def arrays_of(state: dict[str, Any]) -> list[Any]:
    from tests.tf.small import arrays

    return arrays(state)
