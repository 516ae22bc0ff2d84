"""State shared by the process groups of a process: MPI's ranks, and the threads that serve all groups.

MPI frees communicators and shared memory collectively, but a program may end a group on one rank only, or on one rank
much later than on another. So no rank waits long: a thread for this group alone waits for all ranks, then frees.

    rank 0   destroy ── waits 1 s ── continues        thread: ... all have ended it ── none has left ── free
    rank 1   trains ............. destroy ── continues     thread: all have ended it ── none has left ── free
"""

from __future__ import annotations

import atexit
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from unisono.collectives.group import Group
from unisono.errors import BackendError, LaunchError
from unisono.initialize import init
from unisono.mpi import MPI
from unisono.placement import place
from unisono.torch_backend.messages import PEER_CHECK_SECONDS, Messages
from unisono.torch_backend.work import Completions, SubmissionQueue

JOIN_TIMEOUT_SECONDS = 1.0
"""Seconds that a rank which ends a group waits for the others; usually all ranks end it together."""

MAX_POLL_INTERVAL_SECONDS = 0.05
"""Largest number of seconds between two polls of the others."""


class MpiJob:
    """Ranks that MPI started, and the mapping of PyTorch's ranks to them."""

    def __init__(self) -> None:
        self.world = init()
        self.completions = Completions()
        self.queues: WeakSet[SubmissionQueue] = WeakSet()
        """Queues of the groups."""
        atexit.register(self._end_threads)
        self._mpi_ranks: list[int] = []  # of each rank of the default group
        self._retirement = Retirement()

    def members(self, creation: Any) -> list[int]:
        """Return the MPI ranks of the group that `creation` describes, once all of them create it. Raises LaunchError
        where MPI has started fewer ranks, and BackendError with the missing ranks after the group's time-out."""
        store, rank, size = creation.store, creation.group_rank, creation.group_size
        if size > self.world.size:
            raise LaunchError(
                f"a process group of {size} ranks, but MPI started {self.world.size}: start the program with "
                f"mpiexec -n {size} python PROGRAM.py (or srun), or unisono run --ranks {size} PROGRAM.py, not with "
                "torchrun or by itself"
            )
        ranks: Sequence[int] = creation.global_ranks_in_group
        is_ours = hasattr(dist.group.WORLD, "stands_in")  # else nobody has told the MPI ranks of the default group
        members = [self._mpi_ranks[global_rank] for global_rank in ranks] if is_ours else []
        self._meet(creation, members)
        if not members:  # the two orders may differ
            if not ranks and size == self.world.size:
                members = [mpi_rank for _, mpi_rank in sorted(self.world.comm.allgather((rank, self.world.rank)))]
            else:
                store.set(f"unisono/{rank}", str(self.world.rank))
                members = [int(store.get(f"unisono/{group_rank}")) for group_rank in range(size)]
            if not ranks:
                self._mpi_ranks = members
        return members

    def _meet(self, creation: Any, members: Sequence[int]) -> None:
        """Wait in the store until all ranks create the group: MPI would wait without a limit. `members` are their MPI
        ranks, if they are known: one that has ended its program is not waited for."""
        store, rank, watch, time_out = creation.store, creation.group_rank, self.world.watch, creation.timeout
        made = store.add(f"made/{rank}", 1)  # a later group may have the same name
        keys, failed = [f"made/{made}/{peer}" for peer in range(creation.group_size)], f"failed/{made}"
        where = f"rank {rank} of {creation.group_size}: the creation of group {creation.group_id}"
        store.set(keys[rank], "")
        begun = checked = time.monotonic()
        interval = 1e-4
        while not store.check(keys):
            now = time.monotonic()
            over = now - begun > time_out.total_seconds()
            if over or now - checked > PEER_CHECK_SECONDS:
                checked, calls = now, self.world._group.calls
                missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
                ended = [peer for peer in missing if members and watch and watch.has_ended(calls, members[peer])]
                if missing and (over or ended):
                    why = f"ranks {ended} have ended" if ended else f"Timed out after {time_out.total_seconds():g} s"
                    store.set(failed, "")
                    raise BackendError(f"{where}: {why}; ranks {missing} of the group have not created it")
            time.sleep(interval)
            interval = min(max(1e-3, 0.1 * (now - begun)), MAX_POLL_INTERVAL_SECONDS)
        if store.check([failed]):
            raise BackendError(f"{where}: it has failed on another rank, which did not wait any longer")

    def group(self, name: str, members: Sequence[int]) -> Group:
        """Return the group of these MPI ranks, which create it together.

        `name` distinguishes it from other groups that are created at the same time.
        """
        world, everyone = self.world, self.world.comm.Get_group()
        chosen = everyone.Incl(list(members))
        tag_limit: Any = world.comm.Get_attr(MPI.TAG_UB)
        comm = world.comm.Create_group(chosen, zlib.crc32(name.encode()) % tag_limit)
        chosen.Free()
        everyone.Free()
        nodes = [world.placement.node_of(rank) for rank in members]
        placement = place(nodes, [world.placement.supernode_of(rank) for rank in members])
        ranks = range(len(members))
        return Group(comm, placement, world.table, ranks, watch=world.watch, name=f"process group {name}")

    def _end_threads(self) -> None:
        """End the threads at the end of a program that has not ended its groups.

        One that drops a work of PyTorch after Python has ended would abort the process: C++ lets go of Python's lock
        for that, and may not be unwound where it takes it again.
        """
        for queue in self.queues:
            queue.close(JOIN_TIMEOUT_SECONDS)
        self.completions.close(JOIN_TIMEOUT_SECONDS)

    def release(self, group: Group, messages: Messages, broken: bool) -> None:
        """Free what a group and its messages hold, once all its ranks have released it; abandon a broken group."""

        def free() -> None:
            messages.free()
            group.free()
            group.comm.Free()

        if broken:
            group.abandon()
        else:
            self._retirement.retire(messages.comm, free)


class Retirement:
    """Groups that have been ended on this rank."""

    def __init__(self) -> None:
        self._leaving, self._over = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)

    def retire(self, comm: MPI.Intracomm, free: Callable[[], None]) -> None:
        """Call `free`, a collective, once all ranks of `comm` have called this; wait for that for a while."""
        thread = threading.Thread(target=self._run, args=(comm, free), name="unisono retirement", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()
        thread.join(JOIN_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Stop at the end of the program: resources that are not freed yet stay."""
        for over in (self._leaving, self._over):
            over.set()
            end = time.monotonic() + JOIN_TIMEOUT_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self, comm: MPI.Intracomm, free: Callable[[], None]) -> None:
        """Free once all ranks have ended the group, and then have said that none of them has left meanwhile.

        A rank that frees alone would still wait for the others in MPI when its program ends, and crash.
        """
        if _all_reach(comm, self._leaving) and _all_reach(comm, self._over):
            free()


def _all_reach(comm: MPI.Intracomm, over: threading.Event) -> bool:
    """Return True once all ranks have called this, False if `over` is set before."""
    everyone, interval = comm.Ibarrier(), 1e-4
    while not everyone.Test():
        if over.wait(interval):
            return False
        interval = min(2 * interval, MAX_POLL_INTERVAL_SECONDS)
    return True


@cache
def mpi_job() -> MpiJob:
    """Return the job of this process; the first call starts MPI."""
    return MpiJob()
