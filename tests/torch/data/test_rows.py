"""What is known of a loader's rows: indices by which its data set was divided, and first batches. Checkpoints compare them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from raysgd import AutoCheckpoint, CheckpointError
from raysgd.torch import TorchTrainer
from raysgd.torch.data.rows import LoaderRows
from tests.replicas import torch_rank
from tests.torch.data.test_iterable_data import Stream
from tests.torch.small import Line, Numbers, inline, rows


class Wrapped(Dataset[int]):
    """A user's data set around another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample may be read")


def part_of(seed: int, count: int = 10) -> Any:
    return random_split(Wrapped(Numbers(count)), [count - 2, 2], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    "make",
    [
        part_of,
        lambda seed: Wrapped(part_of(seed)),
        lambda seed: ConcatDataset([Numbers(3), part_of(seed)]),
        lambda seed: Subset(Numbers(9), torch.arange(seed, seed + 3)),  # type: ignore[arg-type]
    ],
)
def test_another_division_is_another_digest(make: Callable[[int], Any]) -> None:
    one, same, other = (LoaderRows.of(DataLoader(make(seed), batch_size=2)) for seed in (1, 1, 2))
    assert one == same != other and one.indices and one.units == other.units
    assert one.for_ranks == f"{one.units} rows with the indices {one.indices}"


def test_samplers_of_indices_count_and_plain_data_has_no_digest() -> None:
    one, other = (LoaderRows.of(DataLoader(Numbers(9), sampler=SubsetRandomSampler(each))) for each in ([1, 2], [2, 3]))
    assert one.indices != other.indices and one.units == 2
    assert LoaderRows.of(DataLoader(Wrapped(Numbers(9)), shuffle=True)) == LoaderRows(9, "")
    batches: Any = [[0, 1], [2]]
    assert LoaderRows.of(DataLoader(Numbers(3), batch_sampler=batches)).for_ranks == ""


class Whole(Stream):
    """Does not divide itself."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Split(Line):
    """Divides its rows into those of training and of validation, by `seed`."""

    def loaders(self, config: dict[str, Any]) -> dict[str, Any]:
        data = TensorDataset(*rows(config.get("rows", 20)))
        made = {"train_loader": DataLoader(data, batch_size=4)}
        if "split" in config:
            generator = torch.Generator().manual_seed(config["split"])
            train, validation = random_split(data, [len(data) - 4, 4], generator)
            held_out: Any = DataLoader(validation)
            made = {"train_loader": DataLoader(train, batch_size=4), "validation_loader": held_out}
            if "named" in config:
                made["validation_loader"] = {"rest": held_out}
        return made


SAYS = "the checkpoint was saved with different rows in the train_loader and the validation_loader"


@pytest.mark.parametrize(
    ("before", "after", "warns"),
    [
        ({"split": 1}, {"split": 1}, False),
        ({"split": 1}, {"split": 2}, True),
        ({"split": 1, "named": 1}, {"split": 2, "named": 1}, True),
        ({"split": 1}, {"split": 1, "rows": 24}, False),
        ({"rows": 20}, {"split": 1}, False),
    ],
)
def test_a_load_warns_of_another_division(
    before: dict[str, Any], after: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with inline(Split, config=before) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "saved.pt")
    with inline(Split, config=after, seed=1) as trainer:
        trainer.load(path)
        assert [SAYS in each for each in caplog.messages] == [True] * warns
        trainer.load_state_dict({name: part for name, part in trainer.state_dict().items() if name != "rows"})
    assert len(caplog.messages) == warns, "files of earlier versions have no digests"


def test_a_resume_with_another_division_is_an_error(tmp_path: Path) -> None:
    def begun(**config: Any) -> TorchTrainer:
        return inline(Split, config=config, checkpoints=AutoCheckpoint(path=tmp_path), resume="auto")

    with begun(split=1) as trainer:
        trainer.fit(1)
    with pytest.raises(CheckpointError, match=SAYS + r".*random_split\(\.\.\., generator=torch.*pass another path"):
        begun(split=2)
    with begun(split=1) as trainer:
        assert trainer.resumed_from is not None


def test_ranks_report_what_the_driver_compares() -> None:
    rank = torch_rank(Split, {"split": 1}, ranks=2, alone=False, wrap_ddp=False)
    rank.validate()
    assert rank.reports[-1][1].rows["validation_loader"].startswith("4 rows with the indices ")
    alone = torch_rank(Split, {"split": 1})
    alone.validate()
    assert not alone.reports[-1][1].rows and not alone.measured.rows
