"""Plans: data that say how each collective of a group is carried out. `prepare.py` turns a plan into a callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from unisono.call import call_of
from unisono.collectives.payload import name_of
from unisono.errors import UsageError
from unisono.network.choice import LIBRARY, Choice, ScheduleTable
from unisono.placement import Placement
from unisono.schedules import SCHEDULES, algorithm_of
from unisono.schedules.numbering import renumber
from unisono.schedules.schedule import Algorithm, Program, cuts_alike
from unisono.transports.plan import Plan
from unisono.wires import EXACT, wire_of

AUTO = "auto"

MAX_PLANS = 4096
"""Largest number of plans that are kept."""


class PlanRequest(NamedTuple):
    """Collective that is requested, and its payload."""

    collective: str
    algorithm: str
    dtype: torch.dtype
    nbytes: int
    wire: str | None
    op: str | None
    root: int
    move_dtype: torch.dtype
    """Dtype that replaces `dtype` if nothing is reduced."""


def plan_of(asked: PlanRequest, choice: Choice) -> Plan:
    """Return the plan of a collective that was chosen. Raises TensorError for what cannot be reduced."""
    collective, _, dtype, nbytes, wire, op, root, move_dtype = asked
    parts = [f"{nbytes // dtype.itemsize} x {name_of(dtype)}"]
    parts += [f"root {root}"] if collective in ("broadcast", "reduce") else []
    parts += [choice.algorithm]
    parts += [f"op {op}"] if op not in ("sum", None) else []
    parts += [f"wire {wire}"] if wire is not None else []
    call = call_of(f"{collective}({', '.join(parts)})")
    plan = Plan(collective, *choice, nbytes // move_dtype.itemsize, move_dtype, wire, op, root, call)
    _ = plan.arithmetic  # raises for what cannot be reduced
    return plan


class Plans:
    """Cache of the plans, schedules and programs of one rank of a group."""

    def __init__(
        self, rank: int, placement: Placement, table: ScheduleTable, measure: Callable[[Plan], Choice] | None = None
    ) -> None:
        """`measure` returns the best choice for a plan that is made for no table, or of an exact sum; all ranks make it
        together."""
        self._measure = measure
        self._rank, self._placement, self._table = rank, placement, table
        self._plans: dict[PlanRequest, Plan] = {}
        self._programs: dict[Algorithm, Program] = {}
        self._schedules: dict[tuple[str, str, int], Algorithm] = {}

    def schedule(self, plan: Plan) -> Algorithm:
        """Return the schedule that a plan names. For a root other than 0, ranks are rotated."""
        key = plan.collective, plan.algorithm, plan.root
        if key not in self._schedules:
            algorithm, ranks = algorithm_of(plan.algorithm, plan.collective, self._placement), self._placement.ranks
            self._schedules[key] = renumber(algorithm, [(index + plan.root) % ranks for index in range(ranks)])
        return self._schedules[key]

    def program(self, algorithm: Algorithm) -> Program:
        if algorithm not in self._programs:
            self._programs[algorithm] = algorithm(self._rank, self._placement.ranks)
        return self._programs[algorithm]

    def plan(
        self,
        collective: str,
        algorithm: str,
        tensor: torch.Tensor,
        wire: str | None = None,
        op: str | None = "sum",
        root: int = 0,
        move_dtype: torch.dtype | None = None,
    ) -> Plan:
        """Return the plan of a collective on a payload like `tensor`. With `op` None it is only moved, as `move_dtype`.

        Raises TensorError for a dtype, an op or a wire that is not supported, UsageError for an unknown name.
        """
        asked = PlanRequest(
            collective, algorithm, tensor.dtype, tensor.nbytes, wire, op, root, move_dtype or tensor.dtype
        )
        if asked not in self._plans:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            self._plans[asked] = self._make(asked)
        return self._plans[asked]

    def _make(self, asked: PlanRequest) -> Plan:
        collective, algorithm, dtype, nbytes, wire, *_ = asked
        narrow = wire_of(wire, dtype)
        sent = nbytes if narrow is None else narrow.nbytes(nbytes // dtype.itemsize)
        choice = self.choose(collective, algorithm, sent, encoded=narrow is not None)
        if self._measure is not None and (wire == EXACT or (algorithm == AUTO and wire is None)):
            return plan_of(asked, self._measure(plan_of(asked, choice)))
        blocks = narrow is not None and not narrow.elementwise and choice.algorithm != LIBRARY
        if blocks and not cuts_alike(algorithm_of(choice.algorithm, collective, self._placement), self._placement):
            if algorithm != AUTO:
                raise UsageError(
                    f"{collective} by {algorithm!r} with the wire {wire!r}: that wire encodes blocks of numbers, and "
                    "this schedule cuts the payload differently in each round; use 'direct' or 'ring'"
                )
            choice = self.choose(collective, "direct", nbytes)
        return plan_of(asked, choice)

    def choose(self, collective: str, algorithm: str, nbytes: int, encoded: bool = False) -> Choice:
        """Return the algorithm and the transport of a collective for a payload of `nbytes` encoded bytes."""
        if algorithm == AUTO:
            algorithm, transport = self._table.choose(collective, self._placement, nbytes, encoded)
        else:
            transport = "windows" if self._placement.one_node else "messages"
        if algorithm == LIBRARY:
            return Choice(LIBRARY, LIBRARY)
        base, _, _ = algorithm.partition("/")
        algorithm_of(algorithm, collective, self._placement)  # raises where there is none
        if self._placement.one_node:  # where `hierarchical` is `direct`, in a lane for each rank
            return Choice("direct" if base == "hierarchical" else algorithm, transport)
        several = self._placement.ranks > len(self._placement.nodes)
        return Choice(algorithm, "mixed" if SCHEDULES[base].by_node and several else transport)
