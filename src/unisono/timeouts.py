"""Timeout of a rank that waits for others, after which all ranks end."""

from __future__ import annotations

import os

from unisono.errors import UsageError

TIMEOUT = 600.0
"""Default timeout in seconds."""


def timeout_of(timeout: float | None) -> float:
    """Return the timeout in seconds: `timeout`, else the environment's UNISONO_TIMEOUT, else TIMEOUT.

    Raises UsageError where it is no number above 0.
    """
    value = os.environ.get("UNISONO_TIMEOUT") if timeout is None else timeout
    if value is None:
        return TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        source = "UNISONO_TIMEOUT" if timeout is None else "timeout"
        raise UsageError(f"{source} = {value}; it must be a number of seconds above 0")
    return seconds
