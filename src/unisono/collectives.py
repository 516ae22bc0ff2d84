"""The collectives: each looks its schedule up and has it played on tensors of any shape and stride.

    tensor ── contiguous? ── choose ──┬── library     MPI's own
                                      ├── windows     flat, direct: through memory that the node's ranks share
                                      └── messages    any schedule: pieces of it as MPI messages

float16 and bfloat16 are summed in float32 everywhere and rounded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.errors import TensorError, UsageError
from unisono.mpi import MPI
from unisono.placement import Placement
from unisono.schedules import find
from unisono.schedules.pieces import bounds, cut
from unisono.schedules.schedule import Algorithm
from unisono.transports.arithmetic import HALF_DTYPES, Arithmetic, Step, arithmetic_of
from unisono.transports.messages import MessageChannel
from unisono.transports.node_memory import NodeMemory
from unisono.transports.player import play
from unisono.transports.staging import SLOT
from unisono.transports.sweep import can_sweep, plan_sweep, sweep
from unisono.transports.windows import Call, WindowChannel, call
from unisono.tuning.table import Choice, Table

PIECE = 512 << 10
"""Bytes of the largest message of a schedule."""

IN_FLIGHT = 8
"""Pieces of a payload that go through a schedule at once."""

READY = 256
"""Sizes of short allreduces that are kept ready."""

MPI_TYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}

CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands in for dtypes of that many bytes where nothing is summed."""


class _Plan(NamedTuple):
    """What carries out a collective for one dtype and size."""

    choice: Choice
    arithmetic: Arithmetic
    what: Call
    sweeps: bool
    """Whether each rank touches only its own chunk of everybody's, so that shared memory needs two meetings only."""


class _Ready(NamedTuple):
    """All that an allreduce of one dtype and size needs but the payload: for short ones, where planning would count."""

    dtype: torch.dtype
    play: Callable[[int], None]


class Collectives:
    """The collectives of one group of ranks. Every method is called by all ranks of the group, in the same order."""

    def __init__(self, comm: MPI.Intracomm, placement: Placement, table: Table) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self._messages = comm.Dup()  # so that a schedule's messages meet no others
        self._table = table
        self._place = "one node" if placement.one_node else "across nodes"
        self._memory: NodeMemory | None = None
        self._plans: dict[tuple[str, str, torch.dtype, int], _Plan] = {}
        self._sweeps: dict[tuple[int, int, torch.dtype], tuple[list[Step], Call]] = {}
        self._ready: dict[tuple[int, str], _Ready] = {}

    def allreduce(self, tensor: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
        """Sum `tensor` over all ranks, in place, and return it: any shape, any stride, the same on every rank.

        `algorithm` is "auto" (the table chooses), "library", or the name of a schedule. Every rank ends with the same
        bits. Raises TensorError for a dtype or device that cannot be carried, UsageError for an unknown algorithm.
        """
        ready = self._ready.get((tensor.numel(), algorithm))
        if ready is not None and ready.dtype is tensor.dtype and tensor.is_contiguous() and tensor.is_cpu:
            ready.play(tensor.data_ptr())
            return tensor
        nbytes = _nbytes(tensor)
        plan = self._plan("allreduce", algorithm, tensor.dtype, nbytes)
        if self.size == 1:
            return tensor
        if not tensor.is_contiguous():
            with torch.no_grad():
                return tensor.copy_(self.allreduce(tensor.detach().contiguous(), algorithm))
        payload = _bytes(tensor)
        if plan.choice.transport == "windows":
            self._allreduce_on_node(payload, tensor, algorithm, plan)
        elif plan.choice.algorithm == "library":
            self._meet(plan.what)
            self._allreduce_by_library(payload, tensor)
        else:
            self._play(find(plan.choice.algorithm).allreduce, tensor)
        return tensor

    def part_reduce(self, tensor: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
        """Sum `tensor` over all ranks and return this rank's chunk of the sum, flat (reduce-scatter; PCL-DNN 3.4).

        Rank r gets elements [n r // p, n (r+1) // p) of the flattened sum. `tensor` stays as it is.
        """
        plan = self._plan("part_reduce", algorithm, tensor.dtype, _nbytes(tensor))
        flat = tensor.detach().contiguous().view(-1)
        start, stop = bounds(flat.numel(), self.size, self.rank)
        if self.size == 1:
            return flat.clone()
        if plan.choice.transport == "windows":
            shard = torch.empty(stop - start, dtype=tensor.dtype)
            view, itemsize = plan.arithmetic.view, tensor.dtype.itemsize
            memory = self.node_memory
            memory.staging.part_reduce(view(_bytes(flat)), view(_bytes(shard)), itemsize, plan.arithmetic, plan.what)
            return shard
        self._meet(plan.what)
        exact = flat.float() if tensor.dtype in HALF_DTYPES else flat.clone()
        if plan.choice.algorithm == "library":
            shard = torch.empty(stop - start, dtype=exact.dtype)
            counts = [stop - start for start, stop in (bounds(flat.numel(), self.size, r) for r in range(self.size))]
            kind = MPI_TYPES[exact.dtype]
            self._comm.Reduce_scatter(
                [_bytes(exact), exact.numel(), kind], [_bytes(shard), shard.numel(), kind], counts
            )
            return shard.to(tensor.dtype)
        algorithm_ = find(plan.choice.algorithm).part_reduce
        assert algorithm_ is not None, "the plan offers what the schedule has"
        self._play(algorithm_, exact, chunk_major=True)
        return exact[start:stop].to(tensor.dtype, copy=True)

    def part_broadcast(self, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
        """Gather every rank's `shard` into everyone's `out`, and return it (all-gather; PCL-DNN 3.4).

        `shard` has the elements that `part_reduce` of a tensor like `out` would give this rank. Any dtype of 1, 2, 4 or
        8 bytes: nothing is summed.
        """
        start, stop = bounds(out.numel(), self.size, self.rank)
        if shard.numel() != stop - start or shard.dtype != out.dtype:
            raise TensorError(
                f"rank {self.rank}: a shard of {shard.numel()} x {shard.dtype} does not fit out, {out.numel()} x "
                f"{out.dtype} over {self.size} ranks; this rank's shard has {stop - start} elements"
            )
        carrier = _carrier(out)
        plan = self._plan("part_broadcast", algorithm, carrier, _nbytes(out))
        part = shard.detach().contiguous().view(-1).view(carrier)
        target = out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        flat = target.view(-1).view(carrier)
        if self.size == 1:
            flat.copy_(part)
        elif plan.choice.transport == "windows":
            view, itemsize = plan.arithmetic.view, carrier.itemsize
            memory = self.node_memory
            memory.staging.part_broadcast(view(_bytes(part)), view(_bytes(flat)), itemsize, plan.arithmetic, plan.what)
        elif plan.choice.algorithm == "library":
            self._meet(plan.what)
            ends = [bounds(flat.numel(), self.size, rank) for rank in range(self.size)]
            counts, starts = [stop - start for start, stop in ends], [start for start, _ in ends]
            kind = MPI_TYPES[carrier]
            self._comm.Allgatherv([_bytes(part), part.numel(), kind], [_bytes(flat), counts, starts, kind])
        else:
            flat[start:stop] = part
            algorithm_ = find(plan.choice.algorithm).part_broadcast
            assert algorithm_ is not None, "the plan offers what the schedule has"
            self._play(algorithm_, flat, chunk_major=True)
        if not out.is_contiguous():
            out.detach().copy_(target)
        return out

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Give every rank what rank `root` holds in `tensor`, in place, and return it: any dtype, shape and stride."""
        _nbytes(tensor)
        if not 0 <= root < self.size:
            raise UsageError(f"rank {self.rank}: broadcast from root {root}; the group has ranks 0 to {self.size - 1}")
        if self.size > 1:
            self._meet(call(f"broadcast({tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}, root {root})"))
            flat = tensor.detach().contiguous()
            self._comm.Bcast([_bytes(flat), MPI.BYTE], root)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        if self.size == 1:
            return
        if self._place == "one node":
            self.node_memory.signals.meet(_BARRIER)
            return
        request = self._comm.Ibarrier()
        while not request.Test():
            os.sched_yield()

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, zeroed tensor in memory where an allreduce copies nothing: a window where all ranks share a node.

        Called by all ranks with the same arguments. The memory lives as long as the group.
        """
        if self._place != "one node" or self.size == 1:
            return torch.zeros(length, dtype=dtype)
        self._meet(call(f"empty({length} x {str(dtype).removeprefix('torch.')})"))
        self._sweeps.clear()
        return self.node_memory.empty(length, dtype)

    @property
    def node_memory(self) -> NodeMemory:
        """What the ranks of the one node share, made at first use, by all ranks together."""
        if self._memory is None:
            self._memory = NodeMemory(self._comm)
        return self._memory

    def free(self) -> None:
        """Give communicators and shared memory back, all ranks together."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        self._plans.clear()
        self._sweeps.clear()
        self._ready.clear()
        self._messages.Free()

    def _plan(self, collective: str, algorithm: str, dtype: torch.dtype, nbytes: int) -> _Plan:
        """Choose once for each dtype and size."""
        key = collective, algorithm, dtype, nbytes
        if key not in self._plans:
            arithmetic = arithmetic_of(dtype)
            choice = self._choose(collective, algorithm, nbytes)
            count = nbytes // dtype.itemsize
            words = f"{collective}({count} x {str(dtype).removeprefix('torch.')}, {choice.algorithm})"
            sweeps = collective == "allreduce" and choice.transport == "windows"
            if sweeps:
                sweeps = can_sweep(find(choice.algorithm).allreduce(self.rank, self.size), self.rank, self.size)
            self._plans[key] = _Plan(choice, arithmetic, call(words), sweeps)
        return self._plans[key]

    def _choose(self, collective: str, algorithm: str, nbytes: int) -> Choice:
        if algorithm == "auto":
            return self._table.choose(collective, self._place, nbytes)
        if algorithm == "library":
            return Choice("library", "library")
        if getattr(find(algorithm), collective) is None:
            raise UsageError(f"the schedule {algorithm!r} has no {collective}")
        return Choice(algorithm, "windows" if self._place == "one node" else "messages")

    def _prepare(self, algorithm: str, tensor: torch.Tensor, play: Callable[[int], None]) -> None:
        """Keep what plays an allreduce of a tensor like this, for the next of its kind."""
        if len(self._ready) == READY:
            self._ready.clear()
        self._ready[tensor.numel(), algorithm] = _Ready(tensor.dtype, play)

    def _allreduce_by_library(self, payload: Any, tensor: torch.Tensor) -> None:
        if tensor.dtype in HALF_DTYPES:
            exact = tensor.float()
            self._comm.Allreduce(MPI.IN_PLACE, [_bytes(exact), exact.numel(), MPI.FLOAT])
            tensor.detach().copy_(exact)
        else:
            self._comm.Allreduce(MPI.IN_PLACE, [payload, tensor.numel(), MPI_TYPES[tensor.dtype]])

    def _allreduce_on_node(self, payload: Any, tensor: torch.Tensor, algorithm: str, plan: _Plan) -> None:
        memory, arithmetic, what, dtype = self.node_memory, plan.arithmetic, plan.what, tensor.dtype
        nbytes = len(payload)
        if nbytes == 0:
            memory.signals.meet(what)
            return
        if plan.choice.algorithm == "flat":
            for start in range(0, nbytes, SLOT):
                part = min(SLOT, nbytes - start)
                memory.staging.flat(part, arithmetic, what)(tensor.data_ptr() + start)
            if nbytes <= SLOT:
                self._prepare(algorithm, tensor, memory.staging.flat(nbytes, arithmetic, what))
            return
        key = tensor.data_ptr(), nbytes, dtype
        if key in self._sweeps:
            steps, what = self._sweeps[key]
            sweep(steps, memory.signals, what)
            return
        found = memory.find(tensor.data_ptr(), nbytes)
        if found is None and plan.sweeps:
            memory.staging.allreduce(arithmetic.view(payload), dtype.itemsize, arithmetic, what)
            return
        if found is None or (dtype in HALF_DTYPES and not plan.sweeps):
            memory.signals.meet(what)
            self._play(find(plan.choice.algorithm).allreduce, tensor)
            return
        where, buffers = found
        what = call(f"{what.words} in {where}")
        views = [arithmetic.view(buffer) for buffer in buffers]
        if plan.sweeps:
            self._sweeps[key] = plan_sweep(views, self.rank, dtype.itemsize, arithmetic), what
            sweep(self._sweeps[key][0], memory.signals, what)
        else:
            memory.signals.meet(what)
            program = find(plan.choice.algorithm).allreduce(self.rank, self.size)
            channel = WindowChannel(memory.signals, views, len(program.lanes), arithmetic)
            play(program, cut(tensor.numel(), program.chunks, tensor.numel()), channel, in_flight=1)

    def _meet(self, what: Call) -> None:
        """On one node, make sure that all ranks are in the same call before MPI carries it out."""
        if self._place == "one node":
            self.node_memory.signals.meet(what)

    def _play(self, algorithm: Algorithm, tensor: torch.Tensor, chunk_major: bool = False) -> None:
        """Play a schedule over messages on a contiguous tensor, in place; halves travel and are summed in float32."""
        exact = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
        program = algorithm(self.rank, self.size)
        arithmetic = arithmetic_of(exact.dtype)
        pieces = cut(exact.numel(), program.chunks, PIECE // exact.dtype.itemsize, chunk_major)
        channel = MessageChannel(self._messages, arithmetic.view(_bytes(exact)), arithmetic)
        play(program, pieces, channel, IN_FLIGHT)
        if exact is not tensor:
            tensor.detach().copy_(exact)


_BARRIER = call("barrier()")


def _nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements. Raises TensorError for one that is not in plain CPU memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TensorError(f"cannot carry a {tensor.layout} tensor on {tensor.device}; move it to the CPU, dense, first")
    return int(tensor.nbytes)


def _bytes(tensor: torch.Tensor) -> MPI.memory:
    """The memory of a contiguous tensor."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _carrier(tensor: torch.Tensor) -> torch.dtype:
    """A dtype of the same size that every transport knows, for tensors that are only moved."""
    if tensor.dtype.itemsize not in CARRIERS:
        raise TensorError(f"cannot carry a tensor of {tensor.dtype}: its elements have {tensor.dtype.itemsize} bytes")
    return CARRIERS[tensor.dtype.itemsize]
