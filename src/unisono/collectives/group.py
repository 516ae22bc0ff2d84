"""What the collectives of one group of ranks share: communicators, shared memory, and the plans made so far."""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.collectives.payload import memory_of, name_of
from unisono.errors import UsageError
from unisono.mpi import MPI
from unisono.placement import Placement
from unisono.schedules import find
from unisono.schedules.pieces import cut
from unisono.schedules.schedule import Algorithm, Family
from unisono.transports.arithmetic import HALF_DTYPES, Arithmetic, arithmetic_of
from unisono.transports.messages import MessageChannel
from unisono.transports.node_memory import NodeMemory
from unisono.transports.player import play
from unisono.transports.sweep import can_sweep
from unisono.transports.windows import Call, call
from unisono.tuning.table import Choice, Table

PIECE = 512 << 10
"""Bytes of the largest message of a schedule."""

IN_FLIGHT = 8
"""Pieces of a payload that go through a schedule at once."""

PLANS = 4096
"""Plans that are kept."""


class Plan(NamedTuple):
    """What carries out a collective for one dtype and size."""

    choice: Choice
    arithmetic: Arithmetic
    what: Call
    sweeps: bool
    """Whether each rank touches only its own chunk of everybody's, so that shared memory needs two meetings only."""


class Group:
    """A group of ranks. Every method that moves data is called by all of them, in the same order."""

    def __init__(self, comm: MPI.Intracomm, placement: Placement, table: Table) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.one_node = placement.one_node
        self._placement = placement
        self._messages = comm.Dup()  # so that a schedule's messages meet no others
        self._table = table
        self._memory: NodeMemory | None = None
        self._plans: dict[tuple[str, str, torch.dtype, int], Plan] = {}

    @property
    def node_memory(self) -> NodeMemory:
        """What the ranks of the one node share, made at first use, by all ranks together."""
        if self._memory is None:
            self._memory = NodeMemory(self.comm)
        return self._memory

    def find(self, algorithm: str) -> Family:
        """The schedule of that name for where these ranks sit."""
        return find(algorithm, self._placement)

    def plan(self, collective: str, algorithm: str, dtype: torch.dtype, nbytes: int) -> Plan:
        """Choose once for each dtype and size."""
        key = collective, algorithm, dtype, nbytes
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            arithmetic = arithmetic_of(dtype)
            choice = self._choose(collective, algorithm, nbytes)
            count = nbytes // dtype.itemsize
            words = f"{collective}({count} x {name_of(dtype)}, {choice.algorithm})"
            sweeps = collective == "allreduce" and choice.transport == "windows"
            if sweeps:
                sweeps = can_sweep(self.find(choice.algorithm).allreduce(self.rank, self.size), self.rank, self.size)
            self._plans[key] = Plan(choice, arithmetic, call(words), sweeps)
        return self._plans[key]

    def _choose(self, collective: str, algorithm: str, nbytes: int) -> Choice:
        if algorithm == "auto":
            return self._table.choose(collective, "one node" if self.one_node else "across nodes", nbytes)
        if algorithm == "library":
            return Choice("library", "library")
        if getattr(self.find(algorithm), collective) is None:
            raise UsageError(f"the schedule {algorithm!r} has no {collective}")
        return Choice(algorithm, "windows" if self.one_node else "messages")

    def meet(self, what: Call) -> None:
        """On one node, make sure that all ranks are in the same call before MPI carries it out."""
        if self.one_node:
            self.node_memory.signals.meet(what)

    def play(self, algorithm: Algorithm, tensor: torch.Tensor, chunk_major: bool = False) -> None:
        """Play a schedule over messages on a contiguous tensor, in place; halves travel and are summed in float32."""
        exact = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
        program = algorithm(self.rank, self.size)
        arithmetic = arithmetic_of(exact.dtype)
        pieces = cut(exact.numel(), program.chunks, PIECE // exact.dtype.itemsize, chunk_major)
        channel = MessageChannel(self._messages, arithmetic.view(memory_of(exact)), arithmetic)
        play(program, pieces, channel, IN_FLIGHT)
        if exact is not tensor:
            tensor.detach().copy_(exact)

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, zeroed tensor in a window where all ranks share a node, in the rank's own memory elsewhere."""
        if not self.one_node or self.size == 1:
            return torch.zeros(length, dtype=dtype)
        self.meet(call(f"empty({length} x {name_of(dtype)})"))
        return self.node_memory.empty(length, dtype)

    def free(self) -> None:
        """Give communicators and shared memory back, all ranks together."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        self._plans.clear()
        self._messages.Free()
