"""Times of calls that all ranks make together: interleaved, in rotating order, slow ones are dropped early; their
median with its interval.

    trial    0            1            2            3
             a b c        b c a        c a          a c          b is 1.5 times slower: no more trials
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from unisono.schedules.pieces import bounds
from unisono.world import World

TimedCall = Callable[[], object]

MIN_TRIAL_SECONDS = 4e-3
"""Least seconds of a trial: short calls are made several times."""

LONG_CALL_SECONDS = 0.3
"""Seconds of a call from which the first call, which warms up, counts as a trial."""

MIN_TRIALS, MAX_TRIALS = 3, 41
"""Smallest number of trials of a call that is worth them, and the largest: its median and spread get no better."""


class Timing(NamedTuple):
    """Seconds per call: the median of several trials, and the interval with the true median at 95% confidence."""

    median: float
    low: float
    high: float


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the median of measurements in seconds with its interval, from the order statistics (distribution-free).

    With fewer than six the interval spans all of them: 95% need six.
    """
    ordered = sorted(seconds)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return Timing(statistics.median(ordered), ordered[low], ordered[high])


def worth_another(trials: Mapping[str, Sequence[float]], factor: float = 1.5) -> set[str]:
    """Return the calls whose best time is within `factor` of the best median: the others need no more trials."""
    best = min(sorted(seconds)[len(seconds) // 2] for seconds in trials.values())
    return {name for name, seconds in trials.items() if min(seconds) <= factor * best}


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
    max_trials: int,
    budget_seconds: float,
    factor: float | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of all trials by call: MIN_TRIALS of each, then more until `max_trials` or `budget_seconds`.

    Each call is made once before, to warm up; if all take longer than LONG_CALL_SECONDS, that counts as a trial. With a
    `factor`, a call whose best is that much slower than the best median after two trials gets no more.
    """
    names: Sequence[str] = list(calls)
    first = {name: trial(world, call, 1) for name, call in calls.items()}
    long = min(first.values()) > LONG_CALL_SECONDS
    seconds: dict[str, list[float]] = {name: [took] if long else [] for name, took in first.items()}
    fastest = 1.0 if long else min(trial(world, call, 1) for call in calls.values())
    repeat = max(1, min(200, int(MIN_TRIAL_SECONDS / fastest)))
    spent, count = 0.0, int(long)
    while count < max_trials and (count < MIN_TRIALS or spent < budget_seconds):
        worth = worth_another(seconds, factor) if factor and count >= 2 else set(names)
        for offset in range(len(names)):
            name = names[(offset + count) % len(names)]
            if name in worth:
                took = trial(world, calls[name], repeat)
                seconds[name].append(took)
                spent += took * repeat
        count += 1
    return seconds


def collective_call(
    world: World, collective: str, payload: torch.Tensor, algorithm: str = "auto", wire: str | None = None
) -> TimedCall:
    """Return the call of a collective of that name on a flat payload; all ranks make it together."""
    match collective:
        case "broadcast":
            return partial(world.broadcast, payload, 0, algorithm)
        case "all_to_all":
            parts = torch.zeros(max(1, payload.numel() // world.size) * world.size)
            return partial(world.all_to_all, parts, algorithm)
        case "all_gather":
            start, stop = bounds(payload.numel(), world.size, world.rank)
            return partial(world.all_gather, torch.zeros(stop - start), payload, algorithm, wire)
        case "reduce_scatter":
            return partial(world.reduce_scatter, payload, algorithm, wire)
    return partial(world.allreduce, payload, algorithm, wire)
