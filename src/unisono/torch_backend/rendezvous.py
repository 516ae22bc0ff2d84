"""Rendezvous of the ranks of torch.distributed through MPI: no address has to be given.

    mpiexec -n 4 python program.py        rank and size from MPI; on one node a store in memory, without a port;
                                          across nodes rank 0 serves a store; its address is sent over MPI
    python program.py                     a world of one

It serves env:// where no MASTER_ADDR is set, and where one is set but an MPI launcher has started all ranks on this
node, or `unisono run` has: some libraries set one unasked. Other programs with an address use PyTorch's own rendezvous.
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set as well, because programs and libraries read them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from torch.distributed.constants import default_pg_timeout

from unisono.launch import on_one_node, ranks_started
from unisono.torch_backend.pytorch import PrefixStore, TCPStore

if TYPE_CHECKING:
    from unisono.world import World  # importing it starts MPI, which registering must not

RUN_VARIABLE = "UNISONO_RUN"
"""Variable of programs that `unisono run` started: env:// is served by our store, whatever address is set."""


def install() -> None:
    """Install our handler of env:// in front of PyTorch's own, which serves every program that has an address."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers  # noqa: PLC0415

    original: Callable[..., Iterator[tuple[Any, int, int]]] = handlers["env"]

    def rendezvous(url: str, timeout: timedelta = default_pg_timeout, **named: Any) -> Iterator[Any]:
        asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        size = asked.get("world_size", os.environ.get("WORLD_SIZE"))
        started = ranks_started(os.environ) or 1
        elsewhere = "TORCHELASTIC_RUN_ID" in os.environ or not on_one_node(os.environ)
        addressed = "MASTER_ADDR" in os.environ and RUN_VARIABLE not in os.environ and elsewhere
        if addressed or (size is not None and int(size) != started):
            return original(url, timeout=timeout, **named)
        return _by_mpi(asked.get("rank"), timeout)

    handlers["env"] = rendezvous


def _by_mpi(rank: str | None, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """Yield the store of all ranks that MPI started, the rank and the size. `rank` is the requested rank, if any."""
    from unisono.torch_backend.mpi_job import mpi_job  # noqa: PLC0415 - this starts MPI

    world = mpi_job().world
    store, _ = store_of(world, timeout)
    for name, value in variables_of(world).items():
        os.environ.setdefault(name, value)
    yield store, int(rank or os.environ["RANK"]), world.size


def variables_of(world: World) -> dict[str, str]:
    """Return the variables by which programs and libraries look for this rank."""
    node = world.placement.nodes[world.node]
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(node.index(world.rank)),
        "LOCAL_WORLD_SIZE": str(len(node)),
    }


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host, or that of its name without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        address: str = probe.getsockname()[0]
    return address


def address_of_root(world: World) -> str:
    """Return rank 0's address as the other nodes reach it. Called by all ranks together."""
    hosts = world.all_gather_object(socket.gethostname())
    others = [host for host in hosts if host != hosts[0]]
    address: str = world.comm.bcast(address_towards(others[0]) if others else "127.0.0.1", 0)
    return address


def store_of(world: World, timeout: timedelta = default_pg_timeout) -> tuple[Any, str]:
    """Return a store of all ranks of `world`, and rank 0's address as the other nodes reach it."""
    if world.nodes == 1:
        shared, meetings = _in_memory(world)
        if shared is not None:
            shared.set_timeout(timeout)
            return PrefixStore(f"meeting {next(meetings)}", shared), "127.0.0.1"
    address = address_of_root(world)
    served = TCPStore(address, 0, world.size, True, timeout, False) if world.rank == 0 else None
    port = world.comm.bcast(served.port if served is not None else 0, 0)
    return served or TCPStore(address, port, world.size, False, timeout), address


@cache
def _in_memory(world: World) -> tuple[Any, Iterator[int]]:
    """Return the store in memory of all meetings, whose file must stay open as long as it lasts; and their numbers."""
    from unisono.collectives.device_transports import store_in_memory  # noqa: PLC0415 - this imports MPI

    return store_in_memory(world.comm, default_pg_timeout), count()
