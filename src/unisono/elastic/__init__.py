"""Runs that go on when ranks die, are stopped or join: generations of ranks, forked by processes that wait.

`Loop` is for a program of your own.
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes

if TYPE_CHECKING:
    from unisono.elastic.loop import Loop

__all__ = ["Loop"]

__getattr__ = lazy_attributes(__name__, {"Loop": "unisono.elastic.loop"})
