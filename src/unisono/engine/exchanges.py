"""Communicators and threads for exchanges, made once for a world and shared by all that exchange in it.

    model 1   exchange 1 of model 1 │                  exchange 2 of model 1 │
    model 2                         │ exchange 1 of model 2 │                        one communicator: one at a time

Exchanges of one communicator go on one at a time, in the order in which they are pushed. Each is labelled, so that
ranks which push in different orders find out, and never add one model's gradients to another's.
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
    """What has exchanges carried out, and lives no longer than it is used."""

    def finish(self) -> None:
        """Let what is under way end: the program does."""

    def release(self) -> None:
        """Use the world no more: it is about to be freed."""


class Exchanges(Closing):
    """The engine and the communicators of a world. Made by all its ranks together."""

    def __init__(self, world: World) -> None:
        self.engine = Engine({"communication": 1, "update": 1, "computing": 1})
        self._world, self._twins = world, list[World]()
        self._turns = list[Turn]()
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._made = 0
        self._at_exit = partial(_finish, weakref.ref(self))
        atexit.register(self._at_exit)

    def worlds(self, number: int) -> list[World]:
        """The first `number` twins of the world; those that are missing are made, by all ranks together."""
        if len(self._twins) < number:  # in turn: others may be at work on the first one
            self.engine.carry_out(partial(self._make, number), (), (self.turn(0),), "twin")
        return self._twins[:number]

    def turn(self, number: int) -> Turn:
        """What keeps the exchanges of a communicator in order."""
        while len(self._turns) <= number:
            self._turns.append(Turn(f"communicator {len(self._turns)}"))
        return self._turns[number]

    def enter(self, user: User) -> int:
        """Have a user told when its exchanges have to end, as long as it lives; its number, the same on all ranks."""
        self._users.add(user)
        self._made += 1
        return self._made

    def finish(self) -> None:
        """Have all users let what is under way end."""
        for user in list(self._users):
            user.finish()

    def close(self) -> None:
        """End the threads, once all is over: the world is about to be freed."""
        atexit.unregister(self._at_exit)
        for user in list(self._users):
            user.release()
        self.engine.close()

    def _make(self, number: int) -> None:
        while len(self._twins) < number:
            self._twins.append((self._twins[0] if self._twins else self._world).twin())
        self.engine.grow("communication", number)


def _finish(reference: weakref.ref[Exchanges]) -> None:
    if (exchanges := reference()) is not None:
        exchanges.finish()


def call_labelled(world: World, label: str, act: Callable[[World], object]) -> None:
    """Call the collectives of `act` with a label that ranks compare."""
    world.label(label)
    try:
        act(world)
    finally:
        world.label("")
