"""Contract of a rule: it defines what ranks exchange and when, as a step program for each event.

    rule(Step(0), rank, layout)     the tasks of the first step, on that rank
    rule(Step(1), rank, layout)     of the next; steps follow one another, and overlap where values allow it

A rule is a frozen dataclass that inherits from `BaseRule`. It says what follows each bucket of the backward pass
(`follow`), and what its readers decide by (`traits`). `docs/rules.md` has one in a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.placement import Partition
from unisono.step import build
from unisono.step.layout import Layout
from unisono.step.operations import AGREE, allreduce
from unisono.step.overlaps import CollectiveTasks, Overlap, find_overlap
from unisono.step.program import COMMUNICATION, COMPUTING, LANES, MAIN, Operation, Step, StepProgram, Task, Value
from unisono.tables import check, number
from unisono.wires import WIRES

ONE_THREAD: Mapping[str, int] = dict.fromkeys(LANES, 1)
"""Number of threads of each lane."""

AUTO = "auto"

OUTSTANDING = 2
"""Largest number of collectives at once, where several may run and no other number is given."""


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


class RankState(Enum):
    """Weights and optimizer's state that a rank has between two steps."""

    WHOLE = "whole"
    """Weights and states that are the same on all ranks: a checkpoint has rank 0's."""
    SHARDED = "sharded"
    """Weights that are the same on all ranks, and the optimizer's state for this rank's shards of them alone."""
    OWN = "own"
    """Weights and states of its own: a checkpoint has every rank's, and evaluations use the mean of the weights."""
    SINCE_ANCHOR = "since anchor"
    """As OWN, and an anchor: weights that all ranks have in common, since which changes are counted."""
    ANCHORED = "anchored"
    """As SINCE_ANCHOR, but evaluations and checkpoints use the anchor in place of the mean."""

    @property
    def differs(self) -> bool:
        """True where ranks' weights differ."""
        return self not in (RankState.WHOLE, RankState.SHARDED)

    @property
    def has_anchor(self) -> bool:
        """True where each rank keeps an anchor."""
        return self in (RankState.SINCE_ANCHOR, RankState.ANCHORED)


class Members(Enum):
    """Ends of a rule's exchanges."""

    ALL = "all"
    """All ranks, or all that hold the same part of a split layer: exchanges are collectives."""
    SERVERS = "servers"
    """A worker and a server: the rule is asynchronous (`rules/asynchronous.py`)."""


@dataclass(frozen=True)
class Traits:
    """Properties of a rule that its readers decide by, besides its programs."""

    state: RankState = RankState.WHOLE
    cycle: tuple[int, ...] = (1,)
    """Steps after which the programs repeat, then other numbers that they depend on. A run gives `follow` the number of
    a step in this period: where it depends on the ranks, take a common multiple. A run that resumes with another cycle
    begins a new period."""
    members: Members = Members.ALL
    groups: bool = False
    """True where each bucket may have a group of ranks of its own, so that layers can be split over ranks."""
    exact: bool = False
    """True where the wire "exact" gives sums whose bits are the same for any number of ranks."""
    sums: bool = False
    """True where gradients are summed over the ranks; False where they are averaged."""
    buckets: int = 1
    """Number of buckets that the rule needs. The largest bucket is chosen so that there are as many."""

    @property
    def period(self) -> int:
        """Number of steps after which the programs repeat."""
        return self.cycle[0]


class SeatCounts(NamedTuple):
    """Places in a rule's programs: workers have the numbers from 0, servers those after them.

    A server may be a rank of its own or a thread of a worker's; its programs are the same.
    """

    workers: int
    servers: int


@dataclass(frozen=True)
class Exchange:
    """Options of the exchange of gradients."""

    algorithm: str = AUTO
    """Algorithm: "auto" (the fastest by measurement, else by estimate), "library", or the name of a schedule."""
    wire: str | None = None
    """Number format between nodes: "float32", "float16", "bfloat16", "int8" or "int4"; None for the gradients' own;
    "exact" for sums of integers, whose bits depend on nothing else here (`transports/exact.py`)."""
    bucket_bytes: int | None = number(None, at_least=1)
    """Largest bucket in bytes; None chooses it from the first steps."""

    def __post_init__(self) -> None:
        check(self)
        if self.wire is not None:
            WIRES.check(self.wire)


@dataclass(frozen=True)
class BaseRule:
    """Rule by which all ranks have the same weights after each step that synchronizes, unless its traits differ."""

    exchange: Exchange = field(default_factory=Exchange)
    overlap: str = AUTO
    """Place of communication in the step: "chain", "phases", "concurrent", "funnel" or "none" (`step/overlaps.py`).
    "auto" chooses the one that is predicted to be the fastest from the first steps."""
    outstanding: int | None = number(None, at_least=1)
    """Largest number of collectives at once, where the overlap has several; None chooses it from the first steps."""

    def __post_init__(self) -> None:
        if not isinstance(self.exchange, Exchange):
            raise UsageError(
                f"{type(self).__name__}(exchange={self.exchange!r}): pass an Exchange, as in "
                f'{type(self).__name__}(Exchange(wire="int8"))'
            )
        check(self)

    def __call__(self, event: Step, rank: int, layout: Layout, /) -> StepProgram:
        """Return the tasks of an event on one rank. Pure: each rank can compute those of all others."""
        lane = COMPUTING if self.found_overlap.beside_main and layout.deferred else MAIN
        forward, backward = build.forward(layout, rank), build.backward(layout, lane, rank)
        follow = self.follow(event, rank, layout) if event.synchronize else ()
        return (*forward, *build.merge(backward, follow))

    def follow(self, event: Step, rank: int, layout: Layout, /) -> build.Followers:
        """Return the tasks that follow buckets of the backward pass of a step that synchronizes, in program order: each
        with the key of its bucket, or AT_THE_END."""
        raise NotImplementedError(f"{type(self).__name__} defines neither what follows a bucket nor whole programs")

    @property
    def traits(self) -> Traits:
        """Properties that readers decide by."""
        return Traits()

    def guarantee(self, event: Step) -> Guarantee:
        """Return the properties of the event that must hold. Where the ranks' weights differ, own gradients are
        applied, else those of all ranks, in each step that synchronizes."""
        differs = self.traits.state.differs
        source = GradientSource.OWN if differs else GradientSource.ALL
        return Guarantee(source if event.synchronize else None, equal=not differs)

    def partitions(self, ranks: int) -> Sequence[Partition]:  # noqa: ARG002
        """Return the partitions of the ranks into groups, where collectives are of groups beside all ranks."""
        return ()

    def seats(self, ranks: int) -> SeatCounts:
        """Return the number of workers and servers on so many ranks: all are workers."""
        return SeatCounts(ranks, 0)

    def programs(self, layout: Layout, steps: Sequence[Step], seed: int = 0) -> list[StepProgram]:  # noqa: ARG002
        """Return the programs of all seats over these steps. `seed` chooses the order in which servers serve."""
        workers = self.seats(layout.ranks).workers
        return [tuple(task for event in steps for task in self(event, seat, layout)) for seat in range(workers)]

    def threads(self) -> Mapping[str, int]:
        """Return the number of threads of each lane. Communication has one for each communicator."""
        return {**ONE_THREAD, COMMUNICATION: self.communicators}

    @property
    def algorithm(self) -> str:
        """Schedule of the exchanges by its name; "auto" where each call chooses."""
        return self.exchange.algorithm

    @property
    def found_overlap(self) -> Overlap:
        """Overlap of the rule; chain where it has to be searched. Raises UsageError for an unknown name."""
        return find_overlap("chain" if self.overlap == AUTO else self.overlap)

    @property
    def communicators(self) -> int:
        """Number of communicators that the programs use."""
        return self.found_overlap.communicators(self.outstanding or OUTSTANDING)

    # Parts of programs

    def collectives(self, layout: Layout, rank: int | None = None) -> CollectiveTasks:
        """Return the builder that places a step's collectives: of the ranks that hold a bucket; without the `rank`, of
        all ranks."""
        return CollectiveTasks(layout, self.found_overlap, self.outstanding or OUTSTANDING, rank)

    def allreduce(self) -> Operation:
        """Return the operation that sums a bucket, with the algorithm and wire format of `exchange`."""
        return allreduce(self.exchange.algorithm, self.exchange.wire)

    def due(self, key: int) -> int:
        """Return the key of the bucket that an exchange follows: AT_THE_END where the overlap sends nothing before."""
        return build.AT_THE_END if self.found_overlap.after else key

    @property
    def gate(self) -> Value:
        """Value that the first exchange of a backward pass waits for."""
        return build.ENDED if self.found_overlap.after else build.BEGUN

    def agree(self, sends: CollectiveTasks, gate: Value = build.ENDED) -> tuple[Task, ...]:
        """Return the tasks that sum the control messages of the ranks, before anything else is sent."""
        return sends.place(AGREE, 0, (gate,), (build.CONTROL,))
