"""How the micro-batches of a step are divided among the ranks: each sample once, in the same step, and as accelerate divides them
among the ranks of the first attempt."""

from itertools import chain

from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from raysgd.train.huggingface.windows import Windows

SIZES = {
    "samples": st.integers(1, 60),
    "batch": st.integers(1, 5),
    "steps": st.integers(1, 4),
    "first_ranks": st.integers(1, 4),
    "ranks": st.integers(1, 6),
    "drop_last": st.booleans(),
}


def windows(samples: int, batch: int, steps: int, first_ranks: int, ranks: int, drop_last: bool) -> list[Windows]:
    per_step = steps * first_ranks
    return [Windows(samples, batch, per_step, ranks, rank, first_ranks, drop_last) for rank in range(ranks)]


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def test_each_step_has_the_same_samples_for_any_number_of_ranks(ranks: int, **sizes: int) -> None:
    many, alone = windows(ranks=ranks, **sizes), windows(ranks=1, **sizes)[0]
    assert {each.steps for each in many} == {alone.steps}
    seen: list[int] = []
    for step in range(alone.steps):
        shares = [each.of_rank(step) for each in many]
        assert len({len(share) for share in shares}) == 1, "each takes part in every exchange"
        fresh = [part for share in shares for part in share if part.fresh]
        assert len(fresh) == alone.count(step)
        assert all(part.weight == part.fresh for share in shares for part in share)
        assert {part[:2] for share in shares for part in share} == {part[:2] for part in fresh}, (
            "others repeat a part of the step"
        )
        used = sorted(chain.from_iterable(range(part.start, part.stop) for part in fresh))
        assert used == sorted(chain.from_iterable(range(part.start, part.stop) for part in alone.of_rank(step)))
        seen += used
    full = sizes["samples"] // (sizes["batch"] * sizes["first_ranks"]) * sizes["batch"] * sizes["first_ranks"]
    assert seen == list(range(full if sizes["drop_last"] else sizes["samples"]))


@settings(max_examples=150, deadline=None)
@given(**SIZES)
def test_the_length_gives_the_number_of_steps(**sizes: int) -> None:
    """transformers divides the loader's length by the batches of a step."""
    for each in windows(**sizes):
        assert len(each) == sum(len(each.of_rank(step)) for step in range(each.steps))
        assert -(-len(each) // each.most) == each.steps


@settings(max_examples=100, deadline=None)
@given(**{name: size for name, size in SIZES.items() if name != "ranks"})
def test_the_ranks_of_the_first_attempt_have_what_accelerate_gives_them(**sizes: int) -> None:
    ranks, batch = sizes["first_ranks"], sizes["batch"]
    sizes["samples"] = sizes["samples"] // (ranks * batch) * (ranks * batch)  # otherwise accelerate repeats samples
    for each in windows(ranks=ranks, **sizes):
        mine = [[*range(part.start, part.stop)] for step in range(each.steps) for part in each.of_rank(step)]
        batches = BatchSampler(range(sizes["samples"]), batch, bool(sizes["drop_last"]))
        assert mine == list(BatchSamplerShard(batches, num_processes=ranks, process_index=each.rank))
