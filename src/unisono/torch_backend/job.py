"""What the process groups of a process have in common: the ranks that MPI started, and the threads that serve all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from unisono.collectives.group import Group
from unisono.errors import LaunchError
from unisono.mpi import MPI
from unisono.placement import place
from unisono.torch_backend.completions import Completions
from unisono.torch_backend.messages import Messages
from unisono.torch_backend.pytorch import PrefixStore
from unisono.torch_backend.retirement import Retirement
from unisono.torch_backend.watchdog import Watchdog
from unisono.world import init


class Job:
    """The ranks that MPI started, and which of them PyTorch's ranks are."""

    def __init__(self) -> None:
        self.world = init()
        self.completions = Completions()
        self.watchdog = Watchdog()
        self._mpi_ranks: list[int] = []  # of each rank of the default group
        self._store: Any = None
        self._defaults = 0  # default groups made so far
        self._retirement = Retirement()

    def members(self, store: Any, rank: int, size: int, ranks: Sequence[int]) -> list[int]:
        """The MPI ranks of a group of `size`, of which this is `rank`; `ranks` are its global ones, none for all.

        Raises LaunchError where MPI has not started so many.
        """
        if size > self.world.size:
            raise LaunchError(
                f"a process group of {size} ranks, but MPI started {self.world.size}: start the program with "
                f"mpiexec -n {size} python PROGRAM.py (or srun), not with torchrun or by itself"
            )
        if not ranks:
            self._defaults += 1
            self._store = own_connection(store)
            self._mpi_ranks = self._ask_everyone(store, rank, size)
            return self._mpi_ranks
        return [self._mpi_ranks[number] for number in ranks]

    def store(self, group: str) -> Any:
        """Where the ranks of a group write for each other; nobody waits in it for what is not there."""
        assert self._store is not None, "the default group comes first"
        return PrefixStore(f"unisono/{self._defaults}/{group}", self._store)

    def _ask_everyone(self, store: Any, rank: int, size: int) -> list[int]:
        """The MPI rank of each rank of the default group, which need not be in the order of MPI's."""
        if size == self.world.size:
            pairs = self.world.comm.allgather((rank, self.world.rank))
            return [mpi_rank for _, mpi_rank in sorted(pairs)]
        store.set(f"unisono/{rank}", str(self.world.rank))
        return [int(store.get(f"unisono/{number}")) for number in range(size)]

    def group(self, name: str, members: Sequence[int], interrupted: Callable[[], None]) -> Group:
        """The group of these MPI ranks, made by them together; `name` tells it from others made at the same time."""
        world = self.world
        everyone = world.comm.Get_group()
        chosen = everyone.Incl(list(members))
        most: Any = world.comm.Get_attr(MPI.TAG_UB)
        comm = world.comm.Create_group(chosen, zlib.crc32(name.encode()) % most)
        chosen.Free()
        everyone.Free()
        nodes = [world.placement.node_of(rank) for rank in members]
        supernodes = [world.placement.supernode_of(rank) for rank in members]
        return Group(
            comm,
            place(nodes, supernodes),
            world.table,
            ranks=range(len(members)),
            interrupted=interrupted,
            watch=world.watch,
            name=f"process group {name}",
        )

    def drop(self, group: Group, messages: Messages, broken: bool) -> None:
        """Give back what a group and its messages held, when all its ranks do so; nothing of a broken one."""

        def free() -> None:
            messages.free()
            group.free()
            group.comm.Free()

        if broken:
            group.abandon()
        else:
            self._retirement.retire(messages.comm, free)


def own_connection(store: Any) -> Any:
    """Another connection to the same store: a thread that uses it waits for nobody else."""
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    return base.clone()


@cache
def job() -> Job:
    """The job of this process; the first call starts MPI."""
    return Job()
