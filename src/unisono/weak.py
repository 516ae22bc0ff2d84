"""Calls that do not keep alive what they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a bound method as long as its object lives; then do nothing."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        living = reference()
        return None if living is None else living(*arguments, **named)

    return call
