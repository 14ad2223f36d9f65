"""The network interface by which ranks on several machines reach each other."""

import os
import sys

import pytest

from raysgd.core.ranks import RankInfo, assign_ranks
from raysgd.torch.group.interfaces import choose_interface, interface_towards

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
SPREAD, TOGETHER = assign_ranks(["a", "b"])[1], assign_ranks(["a", "a"])[1]


@pytest.mark.parametrize(
    ("rank_info", "given", "chosen"),
    [
        (SPREAD, {}, {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}),
        (SPREAD, {"GLOO_SOCKET_IFNAME": "eth7"}, {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}),
        (TOGETHER, {}, {}),
        (RankInfo(), {}, {}),
    ],
)
def test_it_is_chosen_if_the_group_spans_machines_and_the_user_has_set_none(
    rank_info: RankInfo, given: dict[str, str], chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    choose_interface(rank_info, "127.0.0.1")
    assert os.environ == chosen


def test_without_one_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", dict)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1.*set the environment variable ANY_IFNAME"):
        interface_towards("127.0.0.1", variable="ANY_IFNAME")
