"""A training loader that does not shuffle: the warning for users of RaySGD, which shuffled it on several workers."""

import warnings
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from raysgd.torch.data.opening import Opener
from raysgd.torch.settings import TorchSettings
from raysgd.training.position import Position
from tests.torch.small import Numbers

DATA = Numbers(12)


class Ordered(RandomSampler):
    """A sampler of the user's own."""


def operator_of(rank: int) -> Any:
    return SimpleNamespace(world_rank=rank, config={}, _keep_batch=None, _has_own_steps=False)


def said(loader: Any, *, training: bool = True, rank: int = 0, **settings: Any) -> list[str]:
    opener = Opener(operator_of(rank), TorchSettings(**{"distributed": True, "num_workers": 2, **settings}), None)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opener.registered(loader, Position(), "train" if training else "validation")
    return [str(each.message) for each in caught]


def test_it_names_shuffle() -> None:
    (text,) = said(DataLoader(DATA, batch_size=4))
    assert "pass shuffle=True to the DataLoader" in text


def test_loaders_with_an_order_of_their_own_are_not_warned_about() -> None:
    subset, own = SubsetRandomSampler(range(4)), Ordered(DATA)
    given: list[Any] = [DataLoader(DATA, shuffle=True), DataLoader(DATA, sampler=subset), DataLoader(DATA, sampler=own)]
    for loader in (*given, DataLoader(DATA, batch_sampler=[[0, 1], [2]]), [1, 2, 3]):
        assert said(loader) == []


def test_only_rank_0_warns_and_only_where_raysgd_shuffled() -> None:
    here: list[dict[str, Any]] = [{"training": False}, {"rank": 1}, {"distributed": False, "num_workers": 1}]
    for given in (*here, {"add_dist_sampler": False}):
        assert said(DataLoader(DATA, batch_size=4), **given) == []


def test_it_is_shown_once_in_a_process() -> None:
    opener = Opener(operator_of(0), TorchSettings(distributed=True, num_workers=2), None)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            opener.registered(DataLoader(DATA), Position(), "train")
    assert len(caught) == 1
