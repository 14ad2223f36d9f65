"""Ranks agree on rank 0's order of an epoch. Of torch's own samplers they exchange only what the order depends on."""

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from raysgd.errors import ConfigError
from raysgd.torch.data import sampling
from raysgd.torch.data.sampling import Recipe, agree, epoch_order
from tests.torch.data.sources import PlannedSource, begin

SAMPLES = 2_000
DATA: Any = range(SAMPLES)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.initial_seed() + 5)


def distributed(*, shuffle: bool) -> Any:
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=shuffle, seed=3)
    sampler.set_epoch(4)
    return sampler


class OwnSampler(RandomSampler):
    """A user's subclass, which may draw in any way."""

    def __iter__(self) -> Iterator[int]:
        yield from reversed(list(super().__iter__()))


BY_RECIPE: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: RandomSampler(DATA),
    "a generator": lambda: RandomSampler(DATA, generator=generator()),
    "with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=777),
    "more than once": lambda: RandomSampler(DATA, num_samples=SAMPLES * 2 + 5, generator=generator()),
    "distributed": lambda: distributed(shuffle=True),
    "distributed, in order": lambda: distributed(shuffle=False),
}
IN_FULL: dict[str, Callable[[], Any]] = {
    "a subclass": lambda: OwnSampler(DATA),
    "a subset": lambda: SubsetRandomSampler(range(0, SAMPLES, 2)),
    "weights": lambda: WeightedRandomSampler([1.0, 2.0] * 500, 100),
    "a list": lambda: [3, 1, 2] * 1000,
}


class Wire:
    """Rank 0's broadcast, and what the others receive. `sent` is its size."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._content = b""
        patch.setattr(sampling, "_from_rank_0", self._broadcast)

    @property
    def sent(self) -> int:
        return len(self._content)

    def _broadcast(self, value: Any) -> Any:
        if value is not None:
            self._content = pickle.dumps(value)
        return pickle.loads(self._content)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def drawn(make: Callable[[], Any], seed: int) -> tuple[list[int], Any, Any]:
    """Return what a plain loop draws, and what `epoch_order` returns in the same random state."""
    torch.manual_seed(seed)
    plain = [index for (index,) in DataLoader(DATA, sampler=make(), batch_size=1, collate_fn=list)]
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    order, recipe = epoch_order(DataLoader(DATA, sampler=make(), batch_size=1))
    assert torch.equal(torch.get_rng_state(), after), "the random state of a plain loop"
    return plain, order, recipe


@pytest.mark.parametrize("make", BY_RECIPE.values(), ids=BY_RECIPE)
def test_an_order_that_others_can_draw_is_not_sent(make: Callable[[], Any], wire: Wire) -> None:
    plain, mine, recipe = drawn(make, 1)
    assert mine.tolist() == plain and recipe is not None
    assert agree(mine, recipe, first=True)[0] is mine
    assert wire.sent < 6_000 < 8 * len(plain), "a seed, or the state of a generator"
    for other_seed in (1, 2):
        _, theirs, their_recipe = drawn(make, other_seed)
        received, given = agree(theirs, their_recipe, first=False)
        assert given == recipe
        assert isinstance(received, torch.Tensor) and received.tolist() == plain
        assert (received is theirs) is (recipe == their_recipe), "an equal order is not drawn again"


def test_any_other_order_is_sent(wire: Wire) -> None:
    for make in IN_FULL.values():
        plain, mine, recipe = drawn(make, 1)
        assert recipe is None
        agree(mine, recipe, first=True)
        _, theirs, _ = drawn(make, 2)
        received: Any
        received, given = agree(theirs, None, first=False)
        assert received.tolist() == plain and given is None


@pytest.mark.parametrize("make", [BY_RECIPE["a generator"], BY_RECIPE["distributed"], IN_FULL["a list"]])
def test_a_peer_gets_the_recipe_of_an_order_that_all_have_drawn_from_it(make: Callable[[], Any], wire: Wire) -> None:
    torch.manual_seed(1)
    first, peer = (PlannedSource(DataLoader(DATA, sampler=make(), batch_size=1), pad=True) for _ in range(2))
    begin(first, ranks=2, shared=True)
    state = first.state_for_peers()
    recipe = make in BY_RECIPE.values()
    assert len(pickle.dumps(state)) < 12_000 or not recipe, "without the order"
    peer.load(state)
    assert list(peer.order) == list(first.order) == list(first.state()["order"])
    assert (peer.state_for_peers().get("recipe") is not None) is recipe


def test_an_order_that_no_rank_has_verified_is_sent_to_peers() -> None:
    alone = begin(PlannedSource(DataLoader(DATA, shuffle=True), pad=True), shared=True)
    assert alone.state_for_peers()["order"] is alone.order


def test_a_file_cannot_contain_a_recipe() -> None:
    source = PlannedSource(DataLoader(DATA, shuffle=True), pad=True)
    source.load({"epoch": 0, "order": None, "recipe": {"samples": 10**12}})
    assert source.order == range(SAMPLES)


def test_a_torch_that_draws_in_another_way(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 notices that the recipe gives another order, and sends its own."""
    plain = RandomSampler.__iter__

    def draw(sampler: Any) -> Iterator[int]:
        return plain(sampler) if sampler.generator is not None else reversed(list(plain(sampler)))

    monkeypatch.setattr(RandomSampler, "__iter__", draw)
    torch.manual_seed(1)
    order, recipe = epoch_order(DataLoader(DATA, shuffle=True))
    assert recipe is not None and recipe.order().tolist() != order.tolist()  # type: ignore[union-attr]
    agree(order, recipe, first=True)
    torch.manual_seed(2)
    other, its_recipe = epoch_order(DataLoader(DATA, shuffle=True))
    received: Any = agree(other, its_recipe, first=False)[0]
    assert received.tolist() == order.tolist()  # type: ignore[union-attr]


def test_a_sampler_in_order_needs_no_recipe() -> None:
    assert Recipe.of(SequentialSampler(DATA)) is None
    assert epoch_order(DataLoader(DATA)) == (range(SAMPLES), None)


def test_without_a_process_group_and_horovod_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    with pytest.raises(ConfigError, match=r"call hvd\.init\(\) before the loop"):
        agree(torch.arange(3), None, first=True)
