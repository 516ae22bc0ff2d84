"""Communicators and threads for exchanges, created once per world and shared by all its users.

    model 1   exchange 1 of model 1 │                  exchange 2 of model 1 │
    model 2                         │ exchange 1 of model 2 │                        one communicator: one at a time

Exchanges of one communicator run one at a time, in the order in which they are pushed. Each is labelled, so that ranks
that push in different orders get an error, and never add one model's gradients to another's.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

from unisono.engine.closing import Closing
from unisono.engine.dependencies import Turn
from unisono.engine.engine import Engine
from unisono.world import World


class User(Protocol):
    """Object whose exchanges are carried out here; it is held by a weak reference only."""

    def finish(self) -> None:
        """Let the work under way end: the program ends."""

    def release(self) -> None:
        """Stop using the world: it is about to be freed."""


class Exchanges(Closing):
    """Engine and communicators of a world. Created by all its ranks together."""

    def __init__(self, world: World) -> None:
        self.engine = Engine({"communication": 1, "update": 1, "computing": 1})
        self._world, self._dups = world, list[World]()
        self._turns = list[Turn]()
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._made = 0
        self._at_exit = partial(_finish, weakref.ref(self))
        atexit.register(self._at_exit)

    def worlds(self, number: int) -> list[World]:
        """Return the first `number` duplicates of the world; missing ones are created, by all ranks together."""
        if len(self._dups) < number:  # in turn: others may be at work on the first one
            self.engine.carry_out(partial(self._make, number), (), (self.turn(0),), "dup")
        return self._dups[:number]

    def turn(self, number: int) -> Turn:
        """Return the variable that keeps the exchanges of a communicator in order."""
        while len(self._turns) <= number:
            self._turns.append(Turn(f"communicator {len(self._turns)}"))
        return self._turns[number]

    def enter(self, user: User) -> int:
        """Register a user, to be notified when its exchanges have to end; return its number, the same on all ranks."""
        self._users.add(user)
        self._made += 1
        return self._made

    def finish(self) -> None:
        """Let the work under way of all users end."""
        for user in list(self._users):
            user.finish()

    def close(self) -> None:
        """End the threads, once all work is over: the world is about to be freed."""
        atexit.unregister(self._at_exit)
        for user in list(self._users):
            user.release()
        self.engine.close()

    def _make(self, number: int) -> None:
        while len(self._dups) < number:
            self._dups.append((self._dups[0] if self._dups else self._world).dup())
        self.engine.grow("communication", number)


def _finish(reference: weakref.ref[Exchanges]) -> None:
    if (exchanges := reference()) is not None:
        exchanges.finish()


def call_labelled(world: World, label: str, act: Callable[[World], object]) -> None:
    """Call `act`, whose collectives carry a label that ranks compare."""
    world.label(label)
    try:
        act(world)
    finally:
        world.label("")
