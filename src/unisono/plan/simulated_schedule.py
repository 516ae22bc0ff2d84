"""Simulated time of a schedule on nodes that are not there, in the pieces in which a call sends it.

up to 2,048 ranks    all messages flow by flow     `network/simulate.py`
above                refused: `unisono price` answers there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.choosing.pace import pace_of
from unisono.network import EVEN, NetworkError, Uneven, simulate
from unisono.network.critical_path import Cause, Delay
from unisono.plan.collective_costs import ELEMENT_BYTES, CollectiveCase

EAGER_BYTES = 1 << 16
"""Largest message in bytes that is sent before its receiver asks for it."""

MAX_SIMULATED_RANKS = 2048
"""Largest number of ranks all of whose messages are played."""


class ScheduleSimulation(NamedTuple):
    """Simulated time of a schedule."""

    schedule: str
    seconds: float
    ends: tuple[float, ...]
    """Seconds after which each rank ends."""
    delays: tuple[Delay, ...]
    """Waits of the rank that ends last, longest first."""
    exact: bool
    """False if nearly simultaneous events were handled together (`simulate`)."""

    @property
    def bottleneck(self) -> str:
        """Sentence with the rank that ends last, and the shares of what it waits for."""
        rank = self.ends.index(max(self.ends))
        if not self.delays:
            return "no rank waits"
        by_cause: dict[Cause, list[Delay]] = {}
        for delay in self.delays:
            by_cause.setdefault(delay.cause, []).append(delay)
        seconds = {cause: sum(delay.seconds for delay in some) for cause, some in by_cause.items()}
        words = [
            f"{seconds[cause] / self.seconds:.0%} {cause.value}{_places(by_cause[cause])}"
            for cause in sorted(by_cause, key=lambda cause: -seconds[cause])
        ]
        return f"rank {rank} ends last, its time is {', '.join(words)}"


def _places(delays: Sequence[Delay]) -> str:
    """Return where the delays of one cause are: the one place, or the most frequent of several."""
    if not delays[0].place:
        return ""
    if len(delays) == 1:
        return f" ({delays[0].place})"
    return f" ({len(delays)}, most {delays[0].place}: {delays[0].seconds / sum(one.seconds for one in delays):.0%})"


def simulate_schedule(case: CollectiveCase, name: str, nbytes: int, uneven: Uneven = EVEN) -> ScheduleSimulation:
    """Return the simulated time of a schedule, in the pieces in which a call of `nbytes` bytes sends it.

    Raises NetworkError for more than 2,048 ranks, and for too many messages.
    """
    placement, algorithm = case.placement, case.algorithm(name)
    if placement.ranks > MAX_SIMULATED_RANKS:
        raise NetworkError(
            f"{placement.ranks:,} ranks are too many to simulate; the limit is {MAX_SIMULATED_RANKS:,}: "
            "`unisono price` takes more"
        )
    program = algorithm(0, placement.ranks)
    by_node, share = program.landing_remote is not None, case.share
    length = -(-nbytes // ELEMENT_BYTES)
    pace = pace_of(program, placement.ranks, length, ELEMENT_BYTES, case.table.network, ELEMENT_BYTES * share, by_node)
    whole = case.collective == "all_to_all"  # it is sent in one piece
    piece_bytes = case.chunk_bytes(nbytes) or 1 if whole else ELEMENT_BYTES * pace.chunk_length
    network, eager, payload = case.network(by_node), int(EAGER_BYTES / share), case.chunk_bytes(nbytes)
    done = simulate(algorithm, placement, network, payload, piece_bytes, pace.in_flight, eager, uneven=uneven)
    return ScheduleSimulation(name, done.seconds, done.ends, done.delays, done.resolution < 1e-6)
