"""Hosts that run ahead of NCCL: what raysgd has committed, the device has computed from whole gradients."""

import pytest

from tests.emulated.late_group import Curve, Ground, install, trainer

TOLERANCE = 1e-12
FIRST = 3  # steps in which torch forms its buckets, and raysgd looks at the weights


def test_a_rank_that_is_killed_in_an_all_reduce_changes_nothing(ray_cluster: None) -> None:
    with trainer() as made:
        ground = Ground(made)
        assert [(each.behind, set(each.waits[FIRST:])) for each in ground.seen] == [(0, {1})] * 3
        for place in ("before", "in", "after"):
            seen = ground.train_with_a_kill(place)
            assert ground.difference() <= TOLERANCE, place
            assert [each.behind for each in seen] == [0, 0], place
            recovery = made.recoveries[-1]
            assert (recovery.world_size_after, recovery.in_place, recovery.batches_redone) == (2, True, 0)


@pytest.mark.more
def test_the_numbers_are_those_of_gloo_on_the_cpu(ray_cluster: None) -> None:
    with trainer() as made:
        expected = Ground(made).expected
    with trainer(Curve, backend="gloo", hook=None) as made:
        assert Ground(made).difference(expected) <= TOLERANCE


@pytest.mark.more
def test_without_the_wait_steps_are_committed_whose_gradients_never_come(ray_cluster: None) -> None:
    """What raysgd prevents, and the tests above would see."""

    def unsafe() -> None:
        import raysgd.torch.group.nccl

        install()
        raysgd.torch.group.nccl.wait_for_device = lambda: None

    with trainer(hook=unsafe) as made:
        ground = Ground(made)
        seen = ground.train_with_a_kill("in")
        assert max(each.behind for each in seen) > 0
        assert ground.difference() > TOLERANCE
