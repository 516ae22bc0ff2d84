"""What an embedding says is to be done with a key: tasks, in the order in which they are pushed.

    push(key)   what happens when the key's gradient is there            pull(key)   what brings its sum back

Both are pure. The same tasks are carried out by the key-value store and by the step, and priced by the plan. A tag says
what a task reads or mutates: ("gradient", 3) is the gradient of key 3, ("buffer", 3) what of it travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.engine.engine import MAIN

__all__ = ["MAIN", "OUTSTANDING", "Embedding", "Tag", "Task", "buffer", "gradient"]

OUTSTANDING = 2
"""Exchanges that go on at once at most, where several may."""

Tag = tuple[str, int]


class Task(NamedTuple):
    """Something to be done."""

    what: str
    """"pack": the gradient into its buffer. "exchange": sum the buffer over all ranks. "unpack": the buffer into the
    gradient. "barrier": meet all ranks."""
    kind: str
    read: tuple[Tag, ...] = ()
    mutate: tuple[Tag, ...] = ()
    communicator: int = 0


class Embedding(NamedTuple):
    """Where communication sits in the step."""

    push: Callable[[int, int], tuple[Task, ...]]
    """(key, the most exchanges at once) -> tasks."""
    pull: Callable[[int, int], tuple[Task, ...]]
    several: bool = False
    """Whether several exchanges may go on at once, each on a communicator of its own."""
    after: bool = False
    """Whether nothing is exchanged before the backward pass has ended."""


def gradient(key: int) -> Tag:
    """The gradient of a key, and later its sum."""
    return "gradient", key


def buffer(key: int) -> Tag:
    """What travels for a key."""
    return "buffer", key


def communicator(number: int) -> Tag:
    """What keeps the exchanges of one communicator in order: those of all models that share it."""
    return "communicator", number
