"""The contract of a rule: what ranks exchange and when, as a step program for each event.

rule(Step(0), rank, layout)     the tasks of the first step, on that rank
rule(Step(1), rank, layout)     of the next; steps follow one another, and overlap where values allow it
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from unisono.step.layout import Layout
from unisono.step.program import COMMUNICATION, COMPUTING, MAIN, UPDATE, Step, StepProgram

ONE_THREAD: Mapping[str, int] = {MAIN: 1, COMPUTING: 1, COMMUNICATION: 1, UPDATE: 1}
"""Threads of each lane."""


class Whose(Enum):
    """Whose gradients an update applies."""

    ALL = "all ranks'"
    OWN = "its own rank's"


class Promise(NamedTuple):
    """What must hold of a step, whatever order its tasks come in; `verify` holds the program against it."""

    applied: Whose | None
    """Whose gradients each parameter's one update applies, each batch's once; None where nothing is updated."""
    equal: bool = True
    """True where all ranks have the same weights after it."""
    fresh: bool = True
    """True where gradients were made with the very weights that they are applied to."""


@runtime_checkable
class Rule(Protocol):
    """What ranks exchange and when. A frozen value."""

    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank. Pure: all ranks know each other's."""

    def promise(self, event: Step) -> Promise:
        """Return what must hold of the event."""

    def threads(self) -> Mapping[str, int]:
        """Return how many threads each lane has."""

    @property
    def period(self) -> int:
        """Return after how many steps the programs repeat."""

    @property
    def differs(self) -> bool:
        """True where ranks' weights differ between steps: a checkpoint then holds every rank's, and an evaluation uses
        their mean; else rank 0's are everybody's."""
