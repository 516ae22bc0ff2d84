"""Contract of a rule: it defines what ranks exchange and when, as a step program for each event.

rule(Step(0), rank, layout)     the tasks of the first step, on that rank
rule(Step(1), rank, layout)     of the next; steps follow one another, and overlap where values allow it
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from unisono.step.layout import Layout
from unisono.step.program import COMMUNICATION, COMPUTING, MAIN, UPDATE, Arrival, Step, StepProgram

ONE_THREAD: Mapping[str, int] = {MAIN: 1, COMPUTING: 1, COMMUNICATION: 1, UPDATE: 1}
"""Number of threads of each lane."""


class GradientSource(Enum):
    """Gradients that an update applies: all ranks', or its own rank's."""

    ALL = "all ranks'"
    OWN = "its own rank's"


class Guarantee(NamedTuple):
    """Properties of a step that must hold in any order of its tasks; `verify` checks the program against them."""

    applied: GradientSource | None
    """Gradients that each parameter's one update applies, each batch's once; None where nothing is updated."""
    equal: bool = True
    """True where all ranks have the same weights after the step."""
    fresh: bool = True
    """True where gradients are applied to the same weights that they were made with."""
    outer: bool = False
    """True where every bucket has had one outer step since the last step with this property, or since the first."""


@runtime_checkable
class Rule(Protocol):
    """Definition of what ranks exchange and when. A frozen value."""

    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank. Pure: each rank can compute those of all others."""

    def guarantee(self, event: Step) -> Guarantee:
        """Return the properties of the event that must hold."""

    def threads(self) -> Mapping[str, int]:
        """Return the number of threads of each lane."""

    @property
    def period(self) -> int:
        """Number of steps after which the programs repeat."""

    @property
    def differs(self) -> bool:
        """True where ranks' weights differ between steps: a checkpoint then holds every rank's, and an evaluation uses
        their mean. Otherwise rank 0's weights are those of all ranks."""

    @property
    def asynchronous(self) -> bool:
        """True for an `AsynchronousRule`: nothing that it plays is a collective of all ranks."""


class SeatCounts(NamedTuple):
    """Places in the programs of an asynchronous rule: workers have the numbers from 0, servers those after them.

    A server may be a rank of its own or a thread of a worker's; its programs are the same.
    """

    workers: int
    servers: int


@runtime_checkable
class AsynchronousRule(Rule, Protocol):
    """Rule of workers that train by themselves and exchange with servers, each when it gets there."""

    def seats(self, ranks: int) -> SeatCounts:
        """Return the number of workers and servers on so many ranks."""

    def serve(self, event: Arrival, server: int, layout: Layout, /) -> StepProgram:
        """Return the tasks by which a server, numbered from 0, serves an exchange. Pure, as the rule itself."""

    def server_of(self, layout: Layout) -> Mapping[int, int]:
        """Return the server of each key."""

    def exchanges(self, event: Step) -> bool:
        """Return True where a worker exchanges in that step."""
