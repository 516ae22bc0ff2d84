"""What carries out each collective of a group: chosen once for every dtype, size, wire and op, and kept."""

from __future__ import annotations

from typing import NamedTuple

import torch

from unisono.choosing.priced import Choice
from unisono.choosing.table import SHARED, Table
from unisono.collectives.payload import name_of
from unisono.errors import UsageError
from unisono.placement import Placement
from unisono.schedules import find
from unisono.schedules.numbering import renumber
from unisono.schedules.schedule import Algorithm, Family, Program
from unisono.transports.arithmetic import Arithmetic, arithmetic_of, mover_of
from unisono.transports.sweep import can_sweep
from unisono.transports.windows import Call, call
from unisono.transports.wires import Wire, wire_of

PLANS = 4096
"""Plans that are kept."""


class Plan(NamedTuple):
    """What carries out a collective for one dtype and size."""

    choice: Choice
    arithmetic: Arithmetic
    wire: Wire | None
    what: Call
    sweeps: bool
    """Whether each rank touches only its own chunk of everybody's, so that shared memory needs two meetings only."""


class Plans:
    """The choices, schedules and programs of one rank of a group."""

    def __init__(self, rank: int, placement: Placement, table: Table) -> None:
        self._rank, self._placement, self._table = rank, placement, table
        self._plans: dict[tuple[str, str, str | None, str, torch.dtype, int, torch.dtype | None], Plan] = {}
        self._programs: dict[Algorithm, Program] = {}
        self._families: dict[str, Family] = {}
        self._rotated: dict[tuple[str, int], Algorithm] = {}

    def find(self, algorithm: str) -> Family:
        """The schedule of that name for where these ranks sit."""
        if algorithm not in self._families:
            self._families[algorithm] = find(algorithm, self._placement)
        return self._families[algorithm]

    def broadcast_from(self, algorithm: str, root: int) -> Algorithm:
        """The broadcast of that name from any root: the ranks move up by as many places."""
        if (algorithm, root) not in self._rotated:
            from_first = self.find(algorithm).broadcast
            assert from_first is not None, "the choice offers what the schedule has"
            ranks = self._placement.ranks
            self._rotated[algorithm, root] = renumber(from_first, [(place + root) % ranks for place in range(ranks)])
        return self._rotated[algorithm, root]

    def program(self, algorithm: Algorithm) -> Program:
        """This rank's program of a schedule."""
        if algorithm not in self._programs:
            self._programs[algorithm] = algorithm(self._rank, self._placement.ranks)
        return self._programs[algorithm]

    def plan(
        self,
        collective: str,
        algorithm: str,
        dtype: torch.dtype,
        nbytes: int,
        wire: str | None = None,
        op: str = "sum",
        carrier: torch.dtype | None = None,
    ) -> Plan:
        """What carries out a collective on `nbytes` of `dtype`. Where nothing is reduced, it is moved as `carrier`.

        Raises TensorError for a dtype, an op or a wire that cannot be carried, UsageError for an unknown name.
        """
        key = collective, algorithm, wire, op, dtype, nbytes, carrier
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            arithmetic = arithmetic_of(dtype, op) if carrier is None else mover_of(carrier)
            narrow = wire_of(wire, dtype)
            flying = nbytes if narrow is None else narrow.nbytes(nbytes // dtype.itemsize)
            choice = self.choose(collective, algorithm, flying)
            words = f"{collective}({nbytes // dtype.itemsize} x {name_of(dtype)}, {choice.algorithm}"
            words += "" if op == "sum" else f", op {op}"
            words += ")" if wire is None else f", wire {wire})"
            sweeps = collective == "allreduce" and choice.transport == "windows"
            if sweeps:
                ranks = self._placement.ranks
                sweeps = can_sweep(self.program(self.find(choice.algorithm).allreduce), self._rank, ranks)
            self._plans[key] = Plan(choice, arithmetic, narrow, call(words), sweeps)
        return self._plans[key]

    def choose(self, collective: str, algorithm: str, nbytes: int) -> Choice:
        """What carries out a collective for that many bytes in flight."""
        if algorithm == "auto":
            return self._table.choose(collective, self._placement, nbytes)
        base, _, inner = algorithm.partition("/")
        if algorithm == "library" or (base, inner) == ("hierarchical", "library"):
            return Choice(algorithm, "library")
        if getattr(self.find(algorithm), collective) is None:
            raise UsageError(f"the schedule {algorithm!r} has no {collective}")
        if self._placement.one_node and collective in SHARED:
            return Choice("direct" if base == "hierarchical" else algorithm, "windows")
        return Choice(algorithm, "messages")

    def forget(self) -> None:
        """Forget what was chosen."""
        self._plans.clear()
