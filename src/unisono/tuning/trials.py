"""Times calls that all ranks make together: interleaved, in rotating order, slow ones are dropped early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from unisono.tuning.decide import worth_another
from unisono.world import World

TimedCall = Callable[[], object]

MIN_TRIAL_SECONDS = 4e-3
"""Least seconds of a trial: short calls are made several times."""

LONG_CALL_SECONDS = 0.3
"""Seconds of a call from which the untimed first call counts as a trial."""


def trial(world: World, call: TimedCall, repeat: int) -> float:
    """Return the seconds per call, on the slowest rank."""
    world.comm.Barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    took: float = max(world.all_gather_object((time.perf_counter() - start) / repeat))
    return took


def times(
    world: World,
    calls: Mapping[str, TimedCall],
    min_trials: int,
    max_trials: int,
    budget_seconds: float,
    factor: float | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of all trials by call: `min_trials` of each, then more until `max_trials` or `budget_seconds`.

    Each call is made once before, to warm up; if all take longer than LONG_CALL_SECONDS, that counts as a trial. With a
    `factor`, a call whose best is that much slower than the best median after two trials gets no more.
    """
    names: Sequence[str] = list(calls)
    first = {name: trial(world, call, 1) for name, call in calls.items()}
    long = min(first.values()) > LONG_CALL_SECONDS
    seconds: dict[str, list[float]] = {name: [took] if long else [] for name, took in first.items()}
    repeat = 1 if long else _repeat(world, calls)
    spent, number = 0.0, int(long)
    while number < max_trials and (number < min_trials or spent < budget_seconds):
        worth = worth_another(seconds, factor) if factor and number >= 2 else set(names)
        for offset in range(len(names)):
            name = names[(offset + number) % len(names)]
            if name in worth:
                took = trial(world, calls[name], repeat)
                seconds[name].append(took)
                spent += took * repeat
        number += 1
    return seconds


def _repeat(world: World, calls: Mapping[str, TimedCall]) -> int:
    """Return the number of calls in a trial, from the time of the fastest call."""
    fastest = min(trial(world, call, 1) for call in calls.values())
    return max(1, min(200, int(MIN_TRIAL_SECONDS / fastest)))
