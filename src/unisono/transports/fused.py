"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule: `FUSED[collective, schedule]`. The results have the same bits; a test
compares them.

    allreduce        flat      copy in, barrier, every rank reduces all       up to some ten kilobytes
    allreduce        direct    in place if the payload is in shared memory, else staged in pieces
    reduce_scatter   direct    copy the others' chunks in, barrier, reduce the own
    all_gather       direct    copy the own chunk in, barrier, copy the others' out
    all_to_all       direct    copy the sent chunks in, barrier, copy the received ones out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.call import Call, call_in
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.node_memory import NodeMemory
from unisono.transports.reduce_in_place import plan_reduce_in_place, reduce_in_place
from unisono.transports.shared_memory import SharedMemory

Start = Callable[[int, int], None]
"""Function (source address, target address) that carries a collective out."""

FindShared = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the location in words, which ranks compare, and the shared memory; None elsewhere."""


class FusedCall(NamedTuple):
    """Collective for which a fused form is prepared."""

    length: int
    """Number of elements of the whole payload."""
    dtype: torch.dtype
    arithmetic: Arithmetic
    call: Call

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.length * self.dtype.itemsize


class PreparedAllreduce(ABC):
    """Prepared allreduce in place, of which more can be prepared for an address that is used again."""

    @abstractmethod
    def at(self, address: int) -> Callable[[], None]:
        """Return a function that reduces the memory at `address`, in place."""

    def __call__(self, source: int, _: int) -> None:
        """Reduce the memory at `source`, in place."""
        self.at(source)()


class FlatAllreduce(PreparedAllreduce):
    """Prepared allreduce `flat`, in parts that fit a slot."""

    def __init__(self, memory: NodeMemory, fused: FusedCall, _: FindShared) -> None:
        starts = range(0, max(1, fused.nbytes), memory.slot)
        sizes = [min(memory.slot, fused.nbytes - start) for start in starts]
        flat = partial(memory.staging.flat, arithmetic=fused.arithmetic, call=fused.call)
        self._parts = [(start, flat(size)) for start, size in zip(starts, sizes, strict=True)]

    def at(self, address: int) -> Callable[[], None]:
        """Return a function that reduces the memory at `address`, in place."""
        plays = [prepare(address + first) for first, prepare in self._parts]
        if len(plays) == 1:
            return plays[0]

        def play() -> None:
            for one in plays:
                one()

        return play


class DirectAllreduce(PreparedAllreduce):
    """Prepared allreduce `direct`: in place for payloads in shared memory; others are staged."""

    def __init__(self, memory: NodeMemory, fused: FusedCall, find: FindShared) -> None:
        self._memory, self._fused, self._find = memory, fused, find

    def at(self, address: int) -> Callable[[], None]:
        """Return a function that reduces the memory at `address`, in place."""
        memory, fused = self._memory, self._fused
        itemsize, arithmetic = fused.dtype.itemsize, fused.arithmetic
        found = self._find(address, fused.nbytes) if fused.nbytes else None
        if found is None:
            view = arithmetic.view(MPI.memory.fromaddress(address, fused.nbytes))
            return memory.staging.reduce(view, itemsize, arithmetic, fused.call)
        where, shared = found
        steps = plan_reduce_in_place(views_in(shared, address, fused), memory.signals.rank, itemsize, arithmetic)
        return reduce_in_place(steps, memory.signals, call_in(fused.call, where))


def views_in(shared: SharedMemory, address: int, fused: FusedCall) -> list[object]:
    """Return every rank's payload, at the same offset in its shared memory as this rank's."""
    first = address - shared.start
    return [fused.arithmetic.view(buffer[first : first + fused.nbytes]) for buffer in shared.buffers]


def direct_reduce_scatter(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the reduce_scatter of `direct`. The target may be the own chunk of the source."""
    itemsize, rank, size = fused.dtype.itemsize, memory.signals.rank, memory.signals.size
    begin, end = bounds(fused.length, size, rank)

    def start(source: int, target: int) -> None:
        view = fused.arithmetic.view
        payload = view(MPI.memory.fromaddress(source, fused.nbytes))
        in_place = target == source + begin * itemsize
        shard = None if in_place else view(MPI.memory.fromaddress(target, (end - begin) * itemsize))
        memory.staging.reduce_scatter(payload, shard, itemsize, fused.arithmetic, fused.call)

    return start


def direct_all_gather(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the all_gather of `direct`, in place: the source is the own chunk of the target."""
    itemsize, size = fused.dtype.itemsize, memory.signals.size
    ends = [bounds(fused.length, size, rank) for rank in range(size)]

    def start(_: int, target: int) -> None:
        whole = bytes_at(target, fused.nbytes)
        memory.slot_transfers.all_gather(
            [whole[start * itemsize : stop * itemsize] for start, stop in ends], fused.call
        )

    return start


def direct_all_to_all(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the all_to_all of `direct`, from the source to the target."""
    shape = memory.signals.size, fused.nbytes // memory.signals.size

    def start(source: int, target: int) -> None:
        sends, receives = (bytes_at(address, fused.nbytes).reshape(shape) for address in (source, target))
        memory.slot_transfers.all_to_all(sends, receives, fused.call)

    return start


def bytes_at(address: int, nbytes: int) -> Array:
    """Return the bytes at an address as an array; the caller keeps the memory alive."""
    memory: Any = MPI.memory.fromaddress(address, nbytes)
    return np.frombuffer(memory, np.uint8)


FUSED: Mapping[tuple[str, str], Callable[[NodeMemory, FusedCall, FindShared], Start]] = {
    ("allreduce", "flat"): FlatAllreduce,
    ("allreduce", "direct"): DirectAllreduce,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("all_gather", "direct"): direct_all_gather,
    ("all_to_all", "direct"): direct_all_to_all,
}
"""Functions that prepare a fused form, by collective and by the schedule that it equals."""
