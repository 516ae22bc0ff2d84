"""Costs of tasks: the measured computing of a step, and the times of its collectives and updates.

computing   0 ──forward──────────────▶│──backward─────────────────▶ whole        seconds of computing
needed      w0  w1    w2   w3
ready                                       w3   w2     w1       w0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum
from typing import TYPE_CHECKING, NamedTuple

from unisono.step.layout import Layout

if TYPE_CHECKING:
    from unisono.step.program import RankGroup, Task


@dataclass(frozen=True)
class Computing:
    """Times when computing needs each parameter and has its gradient, in seconds of computing since the step began.

    Waiting time does not count. Parameters are identified by their numbers.
    """

    needed: tuple[float, ...]
    ready: tuple[float, ...]
    whole: float
    update: float = 0.0
    """Seconds to update the parameters of one byte of gradients."""
    pack: float = 0.0
    """Seconds to copy one byte of gradients into its bucket: on a device, to the host."""
    unpack: float = 0.0
    """Seconds to copy one byte of sums to the gradients: on a device, from the host; else they stay in the bucket."""
    streams: bool = False
    """True where a device copies on a stream in each direction, beside updates."""
    beside: float = 1.0
    """Rate of computing, and of a collective, while both run, of that alone: they share the cores of a node."""

    def with_update_first(self, nbytes: float) -> Computing:
        """Return the computing of a loop of one's own, whose optimizer's step follows all exchanges of `nbytes` of
        gradients: it is the begin of the next step.

            whole   │ forward │ backward │         ...   exchanges   │ update │ forward │ backward │
                                                                     needed, ready and whole are later by the update
        """
        seconds = self.update * nbytes
        needed, ready = (tuple(time + seconds for time in times) for times in (self.needed, self.ready))
        return replace(self, needed=needed, ready=ready, whole=self.whole + seconds, update=0.0)

    def shortened(self, less: Sequence[tuple[float, float]]) -> Computing:
        """Return the computing where the forward and the backward pass of each parameter's layer take as many seconds
        less. Parameters have the order of the forward pass.

            2 layers, 1 s less each pass    needed 0, 3 -> 0, 2    ready 12, 9 -> 8, 6    whole 12 -> 8
        """
        earlier = list(accumulate((forward for forward, _ in less), initial=0.0))
        later = list(accumulate((backward for _, backward in reversed(less)), initial=earlier[-1]))
        needed = (time - sooner for time, sooner in zip(self.needed, earlier, strict=False))
        ready = (time - sooner for time, sooner in zip(self.ready, later[:0:-1], strict=True))
        return replace(self, needed=tuple(needed), ready=tuple(ready), whole=self.whole - later[-1])


class Cost(NamedTuple):
    """Cost of a collective: `latency + nbytes * a_byte` seconds."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for that many bytes of gradients."""
        return self.latency + nbytes * self.per_byte


FREE = Cost(0.0, 0.0)
"""Cost where nothing goes over a link."""


class Duration(NamedTuple):
    """Duration of a task."""

    seconds: float
    """Seconds, where nothing else uses the link."""
    link: float = 0.0
    """Seconds of these in which it keeps the link busy: collectives that run at once share it."""


@dataclass(frozen=True)
class Costs:
    """Costs of the tasks of a layout's programs."""

    layout: Layout
    computing: Computing
    collective: Cost
    groups: Mapping[tuple[int, ...], Cost] = field(default_factory=dict)
    """Cost of an allreduce of some ranks, where it differs from that of all."""
    activations: tuple[Duration, ...] = ()
    """Duration of each exchange of activations."""

    def without_exchanges(self) -> Costs:
        """Return the costs where exchanges take no time."""
        layout = replace(self.layout, activations=())
        return replace(self, layout=layout, collective=FREE, groups={}, activations=())

    def nbytes(self, key: int) -> int:
        """Return the bytes that are sent for a bucket; 0 for a key without one."""
        return self.layout.bucket(key).nbytes if 0 < key <= len(self.layout.buckets) else 0

    def exchange(self, nbytes: float, group: RankGroup | None = None) -> Duration:
        """Return the duration of a collective of that many bytes, at the cost of an allreduce of the group's ranks."""
        cost = self.collective if group is None else self.groups.get(group.ranks, self.collective)
        return Duration(cost.seconds(nbytes), nbytes * cost.per_byte)

    @cached_property
    def forward(self) -> dict[int, float]:
        """Seconds from the reading of each parameter to that of the next; for key -1, until the first is read."""
        order, needed = self.layout.order, self.computing.needed
        times = accumulate((0.0, *(needed[parameter] for parameter in order)), max)  # none before the previous one
        between = [after - before for before, after in pairwise(times)]
        return dict(zip((-1, *order), (*between, 0.0), strict=True))

    @cached_property
    def backward(self) -> dict[int, float]:
        """Seconds until the first gradient (key 0), then until each bucket is full, as they fill; key -1: the rest."""
        ready, order = self.computing.ready, self.layout.order
        begin = max((self.computing.needed[parameter] for parameter in order), default=0.0)
        first = min(ready, default=self.computing.whole)
        full = [max(ready[parameter] for parameter in self.layout.bucket(key).parameters) for key in self.layout.filled]
        times = accumulate((begin, first, *full, self.computing.whole), max)
        between = [after - before for before, after in pairwise(times)]
        return dict(zip((0, *self.layout.filled, -1), between, strict=True))


def free(_: Task, __: Costs) -> Duration:
    """Return a duration of 0: next to a collective, work in a rank's own memory takes no time."""
    return Duration(0.0)


def whole_exchange(task: Task, costs: Costs) -> Duration:
    """Return the duration of an allreduce of the task's bucket. The cost is that of the rule's wire: it counts bytes
    before they are encoded."""
    return costs.exchange(costs.nbytes(task.key), task.group)


def node_exchange(task: Task, costs: Costs) -> Duration:
    """Return the duration of a sum or of copies within a node: half an allreduce of its ranks, off the link. Free where
    that has no cost: what these take of the ranks' cores, only a trial tells."""
    known = task.group is not None and task.group.ranks in costs.groups
    return Duration(half_exchange(task, costs).seconds if known else 0.0)


def half_exchange(task: Task, costs: Costs) -> Duration:
    """Return half the duration of an allreduce of the task's bucket: half its messages, and each byte is sent once."""
    full = costs.exchange(costs.nbytes(task.key), task.group)
    return Duration(full.seconds / 2, full.link / 2)


def small_exchange(_: Task, costs: Costs) -> Duration:
    """Return the duration of a collective of almost no bytes."""
    return costs.exchange(0)


class Prediction(NamedTuple):
    """Predicted seconds of a step."""

    step: float
    communicating: float
    """Seconds in which a collective runs, hidden or not."""
    waiting: float
    """Seconds in which nothing is computed."""


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Cost:
    """Return the cost of collectives of these bytes that took these seconds, by least squares; neither part is below 0.

    >>> fit([1, 2, 3], [3.0, 5.0, 7.0])
    Cost(latency=1.0, per_byte=2.0)
    """
    # fsum rounds once, so the result does not depend on the order of the measurements, even for a flat line
    count, total, bytes_moved = len(sizes), fsum(seconds), fsum(sizes)
    middle, mean = bytes_moved / count, total / count
    spread = fsum((size - middle) ** 2 for size in sizes)
    rising = fsum((size - middle) * took for size, took in zip(sizes, seconds, strict=True))
    slope = rising / spread if spread else 0.0
    if slope <= 0 or mean - slope * middle < 0:  # too few sizes, or noise: no latency
        return Cost(0.0, total / bytes_moved) if bytes_moved else Cost(mean, 0.0)
    return Cost(mean - slope * middle, slope)
