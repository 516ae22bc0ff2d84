"""Player of one rank, with handles that end when they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.step.play import Player
from unisono.step.program import UPDATE, Operation, Task, weights

UPDATES = Task(Operation("update", lambda *_: None), 1, UPDATE, (), (weights(0),))


class Pushed:
    """Handle of a task, which ends when `beside` has been called: that is what another thread does meanwhile."""

    def __init__(self, beside: Callable[[], object]) -> None:
        self.beside, self.waits, self.succeeded = beside, 0, False

    @property
    def over(self) -> Any:
        return SimpleNamespace(is_set=lambda: self.succeeded)

    def wait(self, seconds: float | None = None) -> bool:
        if seconds is None:
            self.waits += 1
            if self.waits == 1:
                self.beside()
            self.succeeded = True
        return self.succeeded


def pushing(handle: Pushed) -> Player:
    """Player that has pushed one task, with this handle."""
    engine = SimpleNamespace(push=lambda *_, **__: handle)
    pool: Any = SimpleNamespace(engine=engine, worlds=lambda count: count * [SimpleNamespace(size=1)])
    player = Player(pool, 1)
    (ready,) = player.prepare((UPDATES,))
    player.play(ready, None)  # type: ignore[arg-type]
    return player


def wait_for_weights(player: Player) -> object:
    return player.wait_for(weights(0))


@pytest.mark.parametrize("first", [wait_for_weights, Player.wait])
@pytest.mark.parametrize("second", [wait_for_weights, Player.wait])
def test_two_threads_wait_for_one_task(first: Callable[[Player], object], second: Callable[[Player], object]) -> None:
    handle = Pushed(lambda: second(player))
    player = pushing(handle)
    first(player)
    assert handle.waits == 2
    second(player)
    assert not wait_for_weights(player)


def test_a_wait_that_a_signal_interrupts_leaves_the_task_to_the_next_one() -> None:
    def ring() -> None:
        raise InterruptedError

    handle = Pushed(ring)
    player = pushing(handle)
    with pytest.raises(InterruptedError):
        wait_for_weights(player)
    assert wait_for_weights(player)
    assert handle.waits == 2
