"""Smallest period of which the exchange hides behind computing.

    computing   │ step │ step │ step │ step │ step │ step │ ...        c seconds each
    exchange           ╞═ fragment ═══╡ exposed                        e seconds for all fragments, F of them
                       └ delay steps ─┘

A fragment's exchange is hidden for `delay` steps; the ranks wait for the rest of it. So e - F delay c seconds of a
period are exposed, and a longer period has them less often.
"""

from __future__ import annotations

from math import ceil

from unisono.errors import UsageError

EXPOSED_SHARE = 0.05
"""Largest time in which ranks wait for exchanges, relative to computing, that counts as hidden."""

LARGEST_PERIOD = 512
"""Largest period that is chosen, in steps: DiLoCo (arXiv:2311.08105) uses 500."""


def smallest_period(computing: float, exchange: float, fragments: int = 1, delay: int = 0) -> int:
    """Return the smallest period, in steps, of which the exchange hides; at most 512, or as many as the delay needs.

    `computing`: seconds of a step. `exchange`: seconds to exchange all fragments, one after another.
    Raises UsageError where a step takes no time.

    >>> smallest_period(computing=0.1, exchange=0.08)
    16
    >>> smallest_period(computing=0.1, exchange=0.48, fragments=4, delay=1)
    16
    >>> smallest_period(computing=0.1, exchange=0.4, fragments=4, delay=1)
    8
    """
    if computing <= 0 or exchange < 0:
        raise UsageError(f"a step of {computing} s with an exchange of {exchange} s has no period: measure both first")
    least = fragments * (delay + 1)
    exposed = exchange - fragments * delay * computing
    steps = ceil(round(exposed / (EXPOSED_SHARE * computing), 6))  # 16.000000000000004 are 16
    return max(least, min(steps, LARGEST_PERIOD))
