"""Kinds of programs that the six do not show: each equals a loop in plain torch while nothing fails; after three workers have
failed, it equals it still, or the log says what differs.

The arithmetic of a program is written once, over the pieces of a batch: a worker has one, the loop all of them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer, seed_for
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.programs import by_hand

WORKERS, EPOCHS = 2, 3
# One in each epoch, which begins with all workers.
KILLS = (Fault("kill", "forward", step=2), Fault("kill", "reduced", rank=1, step=6), Fault("kill", "applied", step=11))
DIVIDED = "so a batch cannot be divided into parts"


class Program:
    """Owns the networks and their optimizers. `size` is how many samples a worker has in a step, `lines` the log's lines about other
    results after three kills."""

    size, rows, lines = 4, 28, ()

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = self.make().double()
        self.optimizers: list[Any] = self.make_optimizers()
        torch.manual_seed(1)
        self.data = self.make_data()

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)]

    def make_data(self) -> list[Any]:
        return [(torch.randn(6).double(), torch.randn(6).double()) for _ in range(self.rows)]

    collate: Any = None

    def make(self) -> nn.Module:
        raise NotImplementedError


class InParts(Program):
    """Follows the contract: its loss is a mean over what it counts in a piece."""

    def loss(self, piece: Any, state: dict[str, Any]) -> tuple[Tensor, Any]:
        raise NotImplementedError


class Words(InParts):
    """A language model whose hidden state continues from batch to batch."""

    lines = (
        "part 0 of the batch continues with an empty self.part_state",
        "part 1 of the batch continues with an empty self.part_state",
        "part 0 of the batch continues with an empty self.part_state",
    )
    rows = 32

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Embedding(9, 5), nn.GRUCell(5, 5), nn.Linear(5, 9)])

    def make_data(self) -> list[Any]:
        words = torch.randint(0, 9, (self.rows + 1,))
        return list(pairwise(words))

    def loss(self, piece: Any, state: dict[str, Any]) -> tuple[Tensor, Any]:
        word, following = piece
        embed, cell, head = self.net
        hidden = cell(embed(word), state.get("hidden", torch.zeros(len(word), 5).double()))
        state["hidden"] = hidden.detach()
        return cross_entropy(head(hidden), following), None


class Clicks(InParts):
    """A DLRM: sparse gradients, an optimizer for them, and one for the rest."""

    rows = 27

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.EmbeddingBag(20, 4, mode="sum", sparse=True), nn.Linear(3, 4), nn.Linear(5, 1)])

    def make_optimizers(self) -> list[Any]:
        bag, *dense = self.net
        others = [each for layer in dense for each in layer.parameters()]
        return [torch.optim.SparseAdam(list(bag.parameters()), lr=0.02), torch.optim.Adagrad(others, lr=0.1)]

    def make_data(self) -> list[Any]:
        one = lambda: (torch.randint(0, 20, (3,)), torch.randn(3).double(), torch.rand(1).round().double())  # noqa: E731
        return [one() for _ in range(self.rows)]

    def loss(self, piece: Any, state: dict[str, Any]) -> tuple[Tensor, Any]:
        ids, numbers, clicked = piece
        bag, bottom, top = self.net
        user, item = bag(ids), bottom(numbers)
        score = top(torch.cat([(user * item).sum(1, keepdim=True), item], 1))
        return nn.functional.binary_cross_entropy_with_logits(score, clicked), None


class Boxes(InParts):
    """A detector: batches are lists, pictures have none to three boxes, and the loss is a mean over boxes."""

    rows = 27

    def make(self) -> nn.Module:
        return nn.Linear(6, 4)

    def make_data(self) -> list[Any]:
        return [{"picture": torch.randn(6).double(), "boxes": torch.rand(n % 4, 4).double()} for n in range(self.rows)]

    @staticmethod
    def collate(rows: list[Any]) -> list[Any]:
        return rows

    def loss(self, piece: Any, state: dict[str, Any]) -> tuple[Tensor, Any]:
        found = [self.net(each["picture"]).expand_as(each["boxes"]) - each["boxes"] for each in piece]
        offsets = torch.cat(found)
        return offsets.abs().sum() / max(len(offsets), 1), len(offsets)


class Vae(InParts):
    """Draws noise for each sample in `train_batch`."""

    rows = 27

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(6, 4), nn.Linear(2, 6)])

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.Adam(self.net.parameters(), lr=0.01)]

    def loss(self, piece: Any, state: dict[str, Any]) -> tuple[Tensor, Any]:
        encoder, decoder = self.net
        mean, spread = encoder(piece[0]).chunk(2, 1)
        drawn = decoder(mean + spread.exp() * torch.randn(mean.shape).double())
        return mse_loss(drawn, piece[0]) + (mean**2 + spread.exp() ** 2 - 2 * spread).mean(), None


class PerWorker(Program):
    """Makes its steps itself."""

    lines = (DIVIDED,)

    def step(self, pieces: list[Any]) -> None:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        self.mean(self.losses(pieces)).backward()
        optimizer.step()

    def losses(self, pieces: list[Any]) -> list[Tensor]:
        raise NotImplementedError

    @staticmethod
    def mean(losses: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(losses)).mean()


class Moco(PerWorker):
    """Its keys come from a slow encoder, and all workers' keys go into the queue."""

    def make(self) -> nn.Module:
        slow = nn.Linear(6, 3).requires_grad_(False)
        queue = nn.Module()
        queue.register_buffer("keys", normalize(torch.randn(16, 3)))
        return nn.ModuleList([nn.Linear(6, 3), slow, queue])

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.9)]

    def losses(self, pieces: list[Any]) -> list[Tensor]:
        fast, slow, queue = self.net
        with torch.no_grad():
            for mine, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            keys = [normalize(slow(other)) for _, other in pieces]
            every = torch.cat(gathered(keys[0]) if len(pieces) == 1 else keys)
        losses = []
        for (one, _), key in zip(pieces, keys, strict=True):
            query = normalize(fast(one))
            scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.keys.clone().T], 1)
            losses.append(cross_entropy(scores / 0.2, torch.zeros(len(one), dtype=torch.long)))
        queue.keys.copy_(torch.cat([every, queue.keys])[:16])
        return losses


def gathered(mine: Tensor) -> list[Tensor]:
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size() if dist.is_initialized() else 1)]
    dist.all_gather(found, mine)
    return found


class WganGp(PerWorker):
    """Two steps of a critic with a gradient penalty, then one of the generator."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))])

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.Adam(each.parameters(), lr=0.01, betas=(0.5, 0.9)) for each in self.net]

    def step(self, pieces: list[Any]) -> None:
        generator, critic = self.net
        for _ in range(2):
            self.optimizers[1].zero_grad()
            self.mean([self.criticized(real, generator(noise).detach()) for real, noise in pieces]).backward()
            self.optimizers[1].step()
        self.optimizers[0].zero_grad()
        self.mean([-critic(generator(noise)).mean() for _, noise in pieces]).backward()
        self.optimizers[0].step()

    def criticized(self, real: Tensor, drawn: Tensor) -> Tensor:
        critic = self.net[1]
        between = (0.3 * real + 0.7 * drawn).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(drawn).mean() - critic(real).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


class Sam(PerWorker):
    """Two backward passes, the first of which moves the weights."""

    def make(self) -> nn.Module:
        return nn.Linear(6, 6)

    def losses(self, pieces: list[Any]) -> list[Tensor]:
        return [((self.net(x) - y) ** 2).mean() for x, y in pieces]

    def step(self, pieces: list[Any]) -> None:
        (optimizer,), parameters = self.optimizers, list(self.net.parameters())
        optimizer.zero_grad()
        self.mean(self.losses(pieces)).backward()
        kept = [each.data.clone() for each in parameters]
        for each in parameters:
            each.data.add_(each.grad, alpha=0.1)
        optimizer.zero_grad()
        self.mean(self.losses(pieces)).backward()
        for each, before in zip(parameters, kept, strict=True):
            each.data = before
        optimizer.step()


class Lbfgs(Sam):
    """An optimizer that calls a closure."""

    def make_optimizers(self) -> list[Any]:
        given = {"lr": 0.1, "max_iter": 3, "history_size": 4, "tolerance_change": 0.0}
        return [torch.optim.LBFGS(self.net.parameters(), **given)]

    def step(self, pieces: list[Any]) -> None:
        (optimizer,) = self.optimizers

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.mean(self.losses(pieces))
            loss.backward()
            return loss

        optimizer.step(closure)


class Ppo(PerWorker):
    """Acts with the weights of now in a loop of its own, then makes three steps with that."""

    def make(self) -> nn.Module:
        return nn.Linear(6, 3)

    def step(self, pieces: list[Any]) -> None:
        with torch.no_grad():
            before = [self.net(seen).log_softmax(1) for seen, _ in pieces]
        acted = [(old + other[:, :3]).argmax(1, keepdim=True) for old, (_, other) in zip(before, pieces, strict=True)]
        for _ in range(3):
            self.optimizers[0].zero_grad()
            losses = []
            for (seen, other), old, act in zip(pieces, before, acted, strict=True):
                ratio = (self.net(seen).log_softmax(1).gather(1, act) - old.gather(1, act)).exp()
                gain = other.gather(1, act + 3)
                losses.append(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean())
            self.mean(losses).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizers[0].step()


# -- with raysgd, and by hand --------------------------------------------------------------------------


class Operator(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        self.program = program = config["program"]()
        self.register(models=program.net, optimizers=program.optimizers)
        self.register_data(train_loader=DataLoader(program.data, batch_size=program.size, collate_fn=program.collate))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.program, PerWorker):
            self.program.step([batch])
            return {}
        state = self.part_state if isinstance(self.program, Words) else {}
        loss, count = self.program.loss(batch, state)
        self.zero_grad()
        self.backward(loss, **({} if count is None else {"count": count}))
        for each in self.program.optimizers:
            self.step(each)
        return {"train_loss": loss.detach()}


class OwnLoop(Operator):
    def train_epoch(self, iterator: Iterator[Any], info: dict[str, Any]) -> dict[str, Any]:
        samples = 0
        for batch in iterator:
            self.program.step([batch])
            samples += len(batch[0])
        return {"num_samples": samples}


def with_raysgd(program: type[Program], *kills: Fault) -> tuple[Any, Any, list[Any]]:
    operator = OwnLoop if program is Ppo else Operator
    with (
        Cluster() as cluster,
        TorchTrainer(
            training_operator_cls=operator,
            config={"program": program},
            num_workers=WORKERS,
            use_gpu=False,
            seed=0,
            elastic=ElasticConfig(hang_timeout_s=60),
        ) as trainer,
    ):
        counts = []
        for epoch in range(EPOCHS):
            trainer.resize(WORKERS)
            cluster.faults(*kills[epoch : epoch + 1])
            counts.append(trainer.train()["num_samples"])
            assert not cluster.left
        states = trainer.apply_all_operators(lambda operator: vector(operator.program))
        assert all(torch.equal(states[0], each) for each in states)
        return states[0], trainer.batch_mode, counts


def without(name: type[Program]) -> Tensor:
    """Train by hand: all workers' pieces of each batch in this process."""
    program: Any = name()
    collate, states = program.collate or torch.utils.data.default_collate, [{}, {}]
    for epoch in range(1, EPOCHS + 1):
        for number, rows in enumerate(torch.arange(program.rows).split(program.size * WORKERS)):
            pieces = [collate([program.data[row] for row in mine.tolist()]) for mine in rows.tensor_split(WORKERS)]
            if isinstance(program, PerWorker):
                program.step(pieces)
                continue
            losses, counts = [], []
            for rank, (piece, mine) in enumerate(zip(pieces, rows.tensor_split(WORKERS), strict=True)):
                place = by_hand.place(number, program.size * WORKERS, program.rows, rank, WORKERS)
                seed_for(0, epoch=epoch, offset=place)
                loss, count = program.loss(piece, states[rank])
                losses.append(loss)
                counts.append(len(mine) if count is None else count)
            program.net.zero_grad()
            total: Any = sum(loss * count for loss, count in zip(losses, counts, strict=True))
            (total / sum(counts)).backward()
            for each in program.optimizers:
                each.step()
    return vector(program)


def vector(program: Program) -> Tensor:
    """Return all weights and buffers."""
    return torch.cat([value.detach().flatten() for value in program.net.state_dict().values()])


PROGRAMS = [Words, Moco, WganGp, Clicks, Boxes, Ppo, Vae, Sam, Lbfgs]


@pytest.mark.parametrize("program", PROGRAMS)
def test_undisturbed_it_equals_a_loop_by_hand(program: type[Program]) -> None:
    found, mode, counts = with_raysgd(program)
    assert mode == ("parts" if issubclass(program, InParts) else "per_worker") and counts == [program.rows] * EPOCHS
    torch.testing.assert_close(found, without(program), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("program", PROGRAMS)
def test_after_three_kills_it_is_equal_or_a_line_says_what_differs(
    program: type[Program], caplog: pytest.LogCaptureFixture
) -> None:
    found, _, counts = with_raysgd(program, *KILLS)
    assert counts == [program.rows] * EPOCHS
    if not program.lines:
        torch.testing.assert_close(found, without(program), rtol=1e-9, atol=1e-12)
    said = [each for each in caplog.messages if "results differ from those of an undisturbed run" in each.lower()]
    assert [line in each for line, each in zip(program.lines, said, strict=True)] == [True] * len(program.lines), said
