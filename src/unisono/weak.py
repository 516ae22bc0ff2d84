"""Callables that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives, and then does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        living = reference()
        return None if living is None else living(*arguments, **named)

    return call
