"""Times calls that all ranks make together: interleaved, in rotating order, what is hopeless left out early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from unisono.tuning.decide import worth_another
from unisono.world import World

Call = Callable[[], object]

TRIAL = 4e-3
"""Seconds of a trial at least: short calls are made several times."""


def trial(world: World, call: Call, repeat: int) -> float:
    """Seconds a call, on the slowest rank."""
    world.comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    took: float = max(world.gather((time.perf_counter() - start) / repeat))
    return took


def repeats(world: World, calls: Mapping[str, Call]) -> int:
    """How often a call is made in a trial, by the fastest one; each is made here, short ones twice, to get ready."""
    first = min(trial(world, call, 1) for call in calls.values())
    if first > TRIAL:
        return 1
    fastest = min(trial(world, call, 1) for call in calls.values())
    return max(1, min(200, int(TRIAL / fastest)))


def times(
    world: World, calls: Mapping[str, Call], fewest: int, most: int, budget: float, factor: float | None = None
) -> dict[str, list[float]]:
    """Seconds of each trial of each call: `fewest` of each, then more until `most` or `budget` seconds are spent.

    With a `factor`, a call whose best is that much slower than the best median after two trials gets no more.
    """
    names: Sequence[str] = list(calls)
    repeat = repeats(world, calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    spent, number = 0.0, 0
    while number < most and (number < fewest or spent < budget):
        worth = worth_another(seconds, factor) if factor and number >= 2 else set(names)
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            if name in worth:
                took = trial(world, calls[name], repeat)
                seconds[name].append(took)
                spent += took * repeat
        number += 1
    return seconds
