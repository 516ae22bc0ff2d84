"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule: `FUSED[collective, schedule]`. The results have the same bits; a test
compares them. "Meet" stands for a barrier.

    allreduce        flat      copy in, meet, everyone reduces all            up to some ten kilobytes
    allreduce        direct    one sweep where the payload lies in shared memory, else staged in pieces
    reduce_scatter      direct    copy the others' chunks in, meet, reduce the own
    all_gather   direct    copy the own chunk in, meet, copy the others' out
    all_to_all       direct    copy what goes in, meet, copy what comes out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.call import Call, call
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.node_memory import NodeMemory
from unisono.transports.shared_memory import SharedMemory
from unisono.transports.sweep import plan_sweep, sweep

Start = Callable[[int, int], None]
"""Function (source address, target address) that carries a collective out."""

Find = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the place in words, which ranks compare, and the shared memory; None elsewhere."""

MAX_SWEEPS = 256
"""Largest number of sweeps that a group keeps."""


class Job(NamedTuple):
    """Collective for which a fused form is prepared."""

    length: int
    """Number of elements of the whole payload."""
    dtype: torch.dtype
    arithmetic: Arithmetic
    what: Call

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.length * self.dtype.itemsize


def flat_allreduce(memory: NodeMemory, job: Job, _: Find) -> Start:
    """Prepare the allreduce `flat`, in parts that fit a slot."""
    if job.nbytes == 0:
        return lambda *_: memory.signals.meet(job.what)
    starts = range(0, job.nbytes, memory.slot)
    plays = [
        memory.staging.flat(min(memory.slot, job.nbytes - start), job.arithmetic, job.what)
        for start in (starts if len(starts) < 3 else (starts[0], starts[-1]))
    ]
    if len(starts) == 1:
        (only,) = plays
        return lambda source, _: only(source)

    def start(source: int, _: int) -> None:
        for first in starts[:-1]:
            plays[0](source + first)
        plays[-1](source + starts[-1])

    return start


def direct_allreduce(memory: NodeMemory, job: Job, find: Find) -> Start:
    """Prepare the allreduce `direct`: a sweep for payloads in shared memory, with kept steps; others are staged."""
    sweeps, number = memory.sweeps, job.what.number

    def start(source: int, _: int) -> None:
        if (swept := sweeps.get((source, number))) is not None:
            steps, what = swept
            sweep(steps, memory.signals, what)
            return
        found = find(source, job.nbytes) if job.nbytes else None
        if found is None:
            view = job.arithmetic.view(MPI.memory.fromaddress(source, job.nbytes))
            memory.staging.reduce(view, job.dtype.itemsize, job.arithmetic, job.what)
            return
        where, shared = found
        views = views_in(shared, source, job)
        if len(sweeps) == MAX_SWEEPS:
            sweeps.clear()
        steps = plan_sweep(views, memory.signals.rank, job.dtype.itemsize, job.arithmetic)
        what = call(f"{job.what.words} in {where}")
        shared.plan(sweeps)
        sweeps[source, number] = steps, what
        sweep(steps, memory.signals, what)

    return start


def views_in(shared: SharedMemory, address: int, job: Job) -> list[object]:
    """Return every rank's payload, at the same offset in its shared memory as this rank's."""
    first = address - shared.start
    return [job.arithmetic.view(buffer[first : first + job.nbytes]) for buffer in shared.buffers]


def direct_reduce_scatter(memory: NodeMemory, job: Job, _: Find) -> Start:
    """Prepare the reduce_scatter of `direct`. The target may be the own chunk of the source."""
    itemsize, rank, size = job.dtype.itemsize, memory.signals.rank, memory.signals.size
    begin, end = bounds(job.length, size, rank)

    def start(source: int, target: int) -> None:
        view = job.arithmetic.view
        payload = view(MPI.memory.fromaddress(source, job.nbytes))
        in_place = target == source + begin * itemsize
        shard = None if in_place else view(MPI.memory.fromaddress(target, (end - begin) * itemsize))
        memory.staging.reduce_scatter(payload, shard, itemsize, job.arithmetic, job.what)

    return start


def direct_all_gather(memory: NodeMemory, job: Job, _: Find) -> Start:
    """Prepare the all_gather of `direct`, in place: the source is the own chunk of the target."""
    itemsize, size = job.dtype.itemsize, memory.signals.size
    ends = [bounds(job.length, size, rank) for rank in range(size)]

    def start(_: int, target: int) -> None:
        whole = bytes_at(target, job.nbytes)
        memory.passing.share([whole[start * itemsize : stop * itemsize] for start, stop in ends], job.what)

    return start


def direct_all_to_all(memory: NodeMemory, job: Job, _: Find) -> Start:
    """Prepare the all_to_all of `direct`, from the source to the target."""
    shape = memory.signals.size, job.nbytes // memory.signals.size

    def start(source: int, target: int) -> None:
        goes, comes = (bytes_at(address, job.nbytes).reshape(shape) for address in (source, target))
        memory.passing.all_to_all(goes, comes, job.what)

    return start


def bytes_at(address: int, nbytes: int) -> Array:
    """Return the bytes at an address as an array; the caller keeps the memory alive."""
    memory: Any = MPI.memory.fromaddress(address, nbytes)
    return np.frombuffer(memory, np.uint8)


FUSED: Mapping[tuple[str, str], Callable[[NodeMemory, Job, Find], Start]] = {
    ("allreduce", "flat"): flat_allreduce,
    ("allreduce", "direct"): direct_allreduce,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("all_gather", "direct"): direct_all_gather,
    ("all_to_all", "direct"): direct_all_to_all,
}
"""Functions that prepare a fused form, by collective and by the schedule that it equals."""
