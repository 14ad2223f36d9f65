"""A training loader that does not shuffle: the warning for users of RaySGD, which shuffled it on several workers."""

import warnings
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler

from tests.replicas import torch_rank
from tests.torch.small import Line, Numbers

DATA = Numbers(12)


class Ordered(RandomSampler):
    """A sampler of the user's own."""


class Looks(Line):
    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("train_loader", "validation_loader"), config["loader"])

    def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> dict[str, Any]:
        return {"batches": len(list(iterator))}

    validate = train_epoch  # type: ignore[assignment]


def said(
    *loaders: Any,
    kind: Any = Looks,
    training: bool = True,
    rank: int = 0,
    filtered: str = "always",
    **settings: Any,
) -> list[str]:
    """Return the warnings when ranks begin with these loaders, one after the other."""
    given = {"num_workers": 2, "alone": False, "wrap_ddp": False, **settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(filtered)  # type: ignore[arg-type]
        for loader in loaders:
            one = torch_rank(kind, {"loader": loader}, rank, 1 + rank, **given)
            one.train() if training else one.validate()
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def test_it_names_shuffle() -> None:
    (text,) = said(DataLoader(DATA, batch_size=4))
    assert "Pass shuffle=True to the DataLoader" in text


def test_loaders_with_an_order_of_their_own_are_not_warned_about() -> None:
    subset, own = SubsetRandomSampler(range(4)), Ordered(DATA)
    given: list[Any] = [DataLoader(DATA, shuffle=True), DataLoader(DATA, sampler=subset), DataLoader(DATA, sampler=own)]
    assert said(*given, DataLoader(DATA, batch_sampler=[[0, 1], [2]]), [1, 2, 3]) == []


def test_only_rank_0_warns_and_only_where_raysgd_shuffled() -> None:
    here: list[dict[str, Any]] = [{"training": False}, {"rank": 1}, {"num_workers": 1}]
    for given in (*here, {"add_dist_sampler": False}):
        assert said(DataLoader(DATA, batch_size=4), **given) == []


def test_it_is_shown_once_in_a_process() -> None:
    assert len(said(*[DataLoader(DATA)] * 2, filtered="default")) == 1
