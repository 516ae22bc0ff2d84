"""Contract of a rule: it defines what ranks exchange and when, as a step program for each event.

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
"""Number of threads of each lane."""


class Whose(Enum):
    """Gradients that an update applies: all ranks', or its own rank's."""

    ALL = "all ranks'"
    OWN = "its own rank's"


class Promise(NamedTuple):
    """Properties of a step that must hold in any order of its tasks; `verify` checks the program against them."""

    applied: Whose | None
    """Gradients that each parameter's one update applies, each batch's once; None where nothing is updated."""
    equal: bool = True
    """True where all ranks have the same weights after the step."""
    fresh: bool = True
    """True where gradients are applied to the same weights that they were made with."""


@runtime_checkable
class Rule(Protocol):
    """Definition of what ranks exchange and when. A frozen value."""

    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank. Pure: each rank can compute those of all others."""

    def promise(self, event: Step) -> Promise:
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
