"""Choose the network interface by which ranks on several machines reach each other. Worker."""

from __future__ import annotations

import os

from raysgd.core.channel.network import address_towards
from raysgd.core.ranks import RankInfo
from raysgd.environment import GLOO_INTERFACE, NCCL_INTERFACE

# What gloo and NCCL read when they form a group, and what marks an exact name. Without them, gloo takes the address to which
# the machine's own name resolves: a loopback address, one that another machine has too (docker's bridge), or none.
VARIABLES = {GLOO_INTERFACE: "", NCCL_INTERFACE: "="}


def choose_interface(rank_info: RankInfo, host: str) -> None:
    """If the ranks are on several machines, let gloo and NCCL use the interface by which this
    machine reaches the driver at `host`, unless the user has chosen one."""
    missing = [variable for variable in VARIABLES if not os.environ.get(variable)]
    if missing and rank_info.local_world_size < rank_info.world_size:
        interface = interface_towards(host, variable=missing[0])
        os.environ.update({variable: VARIABLES[variable] + interface for variable in missing})


def interface_towards(host: str, *, variable: str) -> str:
    """Find the network interface by which this machine reaches the driver. Peers reach it there
    too. The error names the environment variable that the user can set instead."""
    import psutil  # Ray brings it

    address = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return str(name)
    raise RuntimeError(
        f"no network interface of this machine has the address {address}, which it uses to reach the driver at {host}: set the "
        f"environment variable {variable} to the interface that the workers share"
    )
