"""Ends of objects: of those that a `with` block closes, and of those that others do not keep alive."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self


class Closing(ABC):
    """Object that its `with` block closes on success; after an error it is not closed, as work may never end."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the work under way, and end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives, and then does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        living = reference()
        return None if living is None else living(*arguments, **named)

    return call
