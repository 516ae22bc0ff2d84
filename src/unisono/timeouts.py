"""Timeout of a rank that waits for others, after which all ranks end."""

from __future__ import annotations

import os

from unisono.errors import UsageError

TIMEOUT = 600.0
"""Default timeout in seconds."""


def timeout_of(asked: float | None) -> float:
    """Return the timeout in seconds: `asked`, else the environment's UNISONO_TIMEOUT, else TIMEOUT.

    Raises UsageError where it is no number above 0.
    """
    said = os.environ.get("UNISONO_TIMEOUT") if asked is None else asked
    if said is None:
        return TIMEOUT
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        source = "UNISONO_TIMEOUT" if asked is None else "timeout"
        raise UsageError(f"{source} = {said}; give the seconds that a rank waits for others, more than 0")
    return seconds
