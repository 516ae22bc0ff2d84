"""Collectives of one node on memory of any kind, which the ranks read and write in each other's processes.

Linux calls it cross memory attach: `process_vm_readv` and `process_vm_writev` copy between two processes, without a
copy into shared memory before. Ranks publish the address of their payload beside the token of a barrier.

    allreduce        2 ranks, segments 0 and 1 of each payload; rank 0, for each piece of segment 0:

                         rank 1's piece ── read ──▶ scratch, added to the own piece ── write ──▶ rank 1's piece

    reduce_scatter   read the others' pieces of the own chunk, reduce them into the target
    all_gather       read the others' chunks
    all_to_all       read the chunks for this rank
    broadcast        read the root's payload

Each has a barrier before (addresses) and one after (the memory may be used again). Bytes that a rank copies, n bytes on
p ranks: 2n(p-1)/p for an allreduce, half of what staging copies. The results equal those of the schedule `direct`, bit
for bit. The kernel must allow it: `open_cross_memory` tries. It may refuse a single payload, as a driver's memory: its
rank publishes no address, and all ranks take another way.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from unisono.errors import OperationError
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Step, perform
from unisono.transports.barriers import TOKEN_WORDS, Signals
from unisono.transports.plan import Plan, Play, Prepared, bytes_at

VARIABLE = "UNISONO_CMA"
"""Environment variable: "off" forbids access to the memory of other processes."""

SCRATCH_BYTES = 512 << 10
"""Bytes read from other ranks at a time, of all of them together: they stay in the cache until they are summed."""

SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)
"""Request of Linux's `prctl`: let the other ranks, which are no ancestors, access this process (Yama)."""

PROOF_BYTES = 16

_IoVec = ctypes.c_size_t * 2
"""Address and length, as `struct iovec`."""


def open_cross_memory(comm: MPI.Intracomm, signals: Signals) -> CrossMemory | None:
    """Return access to the memory of the ranks of `comm`, on one node; None on all if one may not read another's.

    All of them call it together. The kernel may forbid it: by seccomp in a container, or by Yama's ptrace_scope. A
    process number may also belong to another process, in another container: each rank reads a random number to be sure.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    allowed = os.environ.get(VARIABLE, "") != "off" and hasattr(libc, "process_vm_readv")
    if not allreduce_min(comm, allowed):
        return None
    libc.prctl(SET_PTRACER, ANY_PROCESS, 0, 0, 0)
    proof = np.frombuffer(secrets.token_bytes(PROOF_BYTES), np.uint8).copy()
    proofs = comm.allgather((os.getpid(), proof.ctypes.data, proof.tobytes()))
    cross = CrossMemory(signals, [process for process, _, _ in proofs])
    readable = True
    for rank, (_, address, expected) in enumerate(proofs):
        content = np.zeros(PROOF_BYTES, np.uint8)
        readable &= cross.try_read(rank, address, content.ctypes.data, PROOF_BYTES) and content.tobytes() == expected
        readable = readable and cross.try_write(rank, address, content.ctypes.data, PROOF_BYTES)  # the same bytes
    return cross if allreduce_min(comm, readable) else None  # and `proof` lives until all have read it


class Piece(NamedTuple):
    """Piece of a rank's own chunk."""

    offset: int
    """Bytes before it in the payload."""
    nbytes: int
    steps: list[Step]
    """Steps that reduce it, once the others' were read into the scratch memory."""


class CrossMemory:
    """Memory of the processes of a node's ranks; `processes` are their numbers."""

    def __init__(self, signals: Signals, processes: Sequence[int]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._read, self._write = libc.process_vm_readv, libc.process_vm_writev
        vectors = ctypes.c_void_p, ctypes.c_ulong
        for function in (self._read, self._write):
            function.restype, function.argtypes = ctypes.c_ssize_t, (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
        self.signals, self._processes = signals, processes
        self.others = [rank for rank in range(signals.size) if rank != signals.rank]
        self.piece = SCRATCH_BYTES // max(1, len(self.others)) & -64
        """Bytes read from each other rank at a time."""
        self.scratch = {rank: np.empty(self.piece, np.uint8) for rank in self.others}
        self._byte = np.empty(1, np.uint8)
        self._into = {rank: memory.ctypes.data for rank, memory in self.scratch.items()}

    def try_read(self, rank: int, remote: int, local: int, nbytes: int) -> bool:
        """Read `nbytes` bytes of a rank; return False if the kernel does not allow it."""
        return bool(self._copy(self._read, rank, remote, local, nbytes) == nbytes)

    def try_write(self, rank: int, remote: int, local: int, nbytes: int) -> bool:
        """Write `nbytes` bytes to a rank; return False if the kernel does not allow it."""
        return bool(self._copy(self._write, rank, remote, local, nbytes) == nbytes)

    def read(self, rank: int, remote: int, local: int, nbytes: int) -> None:
        """Read `nbytes` bytes at the address `remote` of a rank into the own memory at `local`."""
        self._copy_all(self._read, rank, remote, local, nbytes)

    def write(self, rank: int, remote: int, local: int, nbytes: int) -> None:
        """Write `nbytes` bytes at `local` into a rank's memory at `remote`."""
        self._copy_all(self._write, rank, remote, local, nbytes)

    def read_and_reduce(self, addresses: Sequence[int], piece: Piece) -> None:
        """Reduce a piece of the payloads at the `addresses` of all ranks."""
        for rank, into in self._into.items():
            self.read(rank, addresses[rank] + piece.offset, into, piece.nbytes)
        perform(piece.steps)

    def exchange_addresses(self, barrier: Callable[[], None], address: int, nbytes: int) -> list[int] | None:
        """Enter a barrier, and return the addresses of the payloads of all ranks.

        None on all ranks if the kernel does not copy one of them: memory of a device driver, or secret memory.
        """
        rank, rows = self.signals.rank, self.signals.rows
        beside_token = 1 + ((self.signals.sequence + 1) & 1) * TOKEN_WORDS
        ends = (address, address + nbytes - 1) if nbytes else ()  # of the own bytes
        copied = all(self.try_read(rank, end, self._byte.ctypes.data, 1) for end in ends)
        rows[rank][beside_token] = address if copied else 0
        barrier()
        addresses = [row[beside_token] for row in rows]
        return addresses if all(addresses) else None

    def _copy(self, function: Callable[..., int], rank: int, remote: int, local: int, nbytes: int) -> int:
        local_iov, remote_iov = _IoVec(local, nbytes), _IoVec(remote, nbytes)
        return function(self._processes[rank], local_iov, 1, remote_iov, 1, 0)

    def _copy_all(self, function: Callable[..., int], rank: int, remote: int, local: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            count = self._copy(function, rank, remote + done, local + done, nbytes - done)
            if count <= 0:
                ranks, reason = self.signals.ranks, os.strerror(ctypes.get_errno())
                raise OperationError(
                    f"rank {ranks[self.signals.rank]} cannot access the memory of rank {ranks[rank]}, process "
                    f"{self._processes[rank]}: {reason}; has it ended? Otherwise set {VARIABLE}=off"
                )
            done += count


Move = Callable[[Sequence[int]], None]
"""Function of the addresses of all ranks' payloads that moves the data of a collective."""


def prepare_cross(cross: CrossMemory, plan: Plan, otherwise: Prepared) -> Prepared:
    """Prepare a collective that moves its data between two barriers; `otherwise` where memory cannot be copied."""
    make_move, shows_target = MOVES[plan.collective]
    barrier = cross.signals.prepare_barrier(plan.call)

    def at(source: int, target: int) -> Play:
        move, shown = make_move(cross, plan, source, target), target if shows_target else source

        def play() -> None:
            addresses = cross.exchange_addresses(barrier, shown, plan.nbytes)
            if addresses is None:
                otherwise(source, target)()
                return
            move(addresses)
            barrier()

        return play

    return at


def _allreduce(cross: CrossMemory, plan: Plan, address: int, _: int) -> Move:
    """Return the allreduce of `direct`, in place in the memory of all ranks."""
    pieces = _plan_pieces(cross, plan, address)

    def move(addresses: Sequence[int]) -> None:
        for piece in pieces:
            cross.read_and_reduce(addresses, piece)
            for rank in cross.others:
                cross.write(rank, addresses[rank] + piece.offset, address + piece.offset, piece.nbytes)

    return move


def _plan_pieces(cross: CrossMemory, plan: Plan, address: int, target: int | None = None) -> list[Piece]:
    """Return the pieces of the own chunk. The result replaces that chunk at `address`, or goes to `target`."""
    arithmetic, itemsize, rank = plan.arithmetic, plan.dtype.itemsize, cross.signals.rank
    start, stop = (itemsize * end for end in bounds(plan.length, cross.signals.size, rank))
    pieces = []
    for offset in range(start, stop, cross.piece):
        nbytes = min(cross.piece, stop - offset)
        chunk = arithmetic.view(bytes_at(address + offset, nbytes))
        into = chunk if target is None else arithmetic.view(bytes_at(target + offset - start, nbytes))
        read = {peer: arithmetic.view(memory[:nbytes]) for peer, memory in cross.scratch.items()}
        sources = [chunk if peer == rank else read[peer] for peer in range(cross.signals.size)]
        pieces.append(Piece(offset, nbytes, arithmetic.reduce(sources, into, sources[0])))
    return pieces


def _reduce_scatter(cross: CrossMemory, plan: Plan, source: int, target: int) -> Move:
    """Return a reduce_scatter. The target may be the own chunk of the source."""
    start, _ = bounds(plan.length, cross.signals.size, cross.signals.rank)
    in_place = target == source + start * plan.dtype.itemsize

    def move(addresses: Sequence[int]) -> None:
        for piece in _plan_pieces(cross, plan, source, None if in_place else target):
            cross.read_and_reduce(addresses, piece)

    return move


def _reads(cross: CrossMemory, parts: Sequence[tuple[int, int, int, int]]) -> Move:
    """Return the move that reads parts of payloads: rank, bytes before it there, own address, bytes."""

    def move(addresses: Sequence[int]) -> None:
        for rank, offset, into, nbytes in parts:
            cross.read(rank, addresses[rank] + offset, into, nbytes)

    return move


def _all_gather(cross: CrossMemory, plan: Plan, _: int, target: int) -> Move:
    """Return an all_gather, in place: the source is the own chunk of the target."""
    size, itemsize = cross.signals.size, plan.dtype.itemsize
    ends = [(rank, *(itemsize * end for end in bounds(plan.length, size, rank))) for rank in cross.others]
    return _reads(cross, [(rank, start, target + start, stop - start) for rank, start, stop in ends])


def _all_to_all(cross: CrossMemory, plan: Plan, source: int, target: int) -> Move:
    """Return an all_to_all, from the source to the target."""
    each = plan.nbytes // cross.signals.size
    own = cross.signals.rank * each
    read = _reads(cross, [(rank, own, target + rank * each, each) for rank in cross.others])

    def move(addresses: Sequence[int]) -> None:
        read(addresses)
        bytes_at(target + own, each)[:] = bytes_at(source + own, each)

    return move


def _broadcast(cross: CrossMemory, plan: Plan, _: int, target: int) -> Move:
    """Return a broadcast of the root's payload."""
    return _reads(cross, [(plan.root, 0, target, plan.nbytes)] if cross.signals.rank != plan.root else [])


MOVES: dict[str, tuple[Callable[[CrossMemory, Plan, int, int], Move], bool]] = {
    "allreduce": (_allreduce, False),
    "reduce_scatter": (_reduce_scatter, False),
    "all_gather": (_all_gather, True),
    "all_to_all": (_all_to_all, False),
    "broadcast": (_broadcast, True),
}
"""For each collective, the function (memory, plan, source, target) that returns its move, and whether the others access
the target instead of the source."""
