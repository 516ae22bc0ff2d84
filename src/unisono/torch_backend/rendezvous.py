"""Where the ranks of torch.distributed find each other: MPI knows, so nobody has to say.

    mpiexec -n 4 python program.py        rank and size from MPI; rank 0 serves a store, and says where over MPI
    python program.py                     a world of one

This serves env:// where no MASTER_ADDR is set. A program that was started with an address goes PyTorch's own way.
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set on the way: programs and libraries look for them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from unisono.addresses import address_towards
from unisono.launch import ranks_started
from unisono.torch_backend.pytorch import TCPStore

if TYPE_CHECKING:
    from unisono.world import World  # importing it starts MPI, which registering must not

TIMEOUT = timedelta(minutes=30)
"""PyTorch's own."""

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def install() -> None:
    """Put our handler of env:// before PyTorch's own, which serves whatever has an address."""
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers  # noqa: PLC0415

    handlers["env"] = _handler(handlers["env"])


def _handler(original: Handler) -> Handler:
    def rendezvous(url: str, timeout: timedelta = TIMEOUT, **named: Any) -> Iterator[Any]:
        asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        size = asked.get("world_size", os.environ.get("WORLD_SIZE"))
        started = ranks_started(os.environ) or 1
        if "MASTER_ADDR" in os.environ or (size is not None and int(size) != started):
            return original(url, timeout=timeout, **named)
        return _by_mpi(asked.get("rank"), timeout)

    return rendezvous


def _by_mpi(rank: str | None, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
    """The store that rank 0 serves at a port of the system's choice. `rank` is what this rank wants to be."""
    from unisono.torch_backend.job import job  # noqa: PLC0415 - this starts MPI

    world = job().world
    store, _ = store_of(world, timeout)
    node = world.placement.nodes[world.node]
    known = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": node.index(world.rank),
        "LOCAL_WORLD_SIZE": len(node),
    }
    for name, value in known.items():
        os.environ.setdefault(name, str(value))
    yield store, int(rank or os.environ["RANK"]), world.size


def store_of(world: World, timeout: timedelta = TIMEOUT) -> tuple[Any, str]:
    """A store that rank 0 serves to all ranks of `world`, and rank 0's address as the other nodes reach it."""
    hosts = world.gather(socket.gethostname())
    others = [host for host in hosts if host != hosts[0]]
    address: str = world.comm.bcast(address_towards(others[0]) if others else "127.0.0.1", 0)
    served = TCPStore(address, 0, world.size, True, timeout, False) if world.rank == 0 else None
    port = world.comm.bcast(served.port if served is not None else 0, 0)
    return served or TCPStore(address, port, world.size, False, timeout), address
