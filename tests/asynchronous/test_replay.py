"""Order of a replayed log."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from unisono.asynchronous.replay import Replay


def test_the_recorded_worker_is_waited_for() -> None:
    replay = Replay(0, [2, 0, 2])
    assert replay.next == 2
    assert replay.choose([]) == (None, True)
    assert replay.choose([0]) == (None, True)
    assert replay.choose([0, 2]) == (2, True)


def test_a_worker_without_a_recorded_exchange_is_answered_but_not_applied() -> None:
    replay = Replay(0, [2, 0])
    assert replay.choose([2, 1]) == (1, False)
    replay.advance()
    assert not replay.needs(2)
    assert replay.choose([0, 2]) == (2, False)
    replay.advance()
    assert replay.next is None
    assert replay.choose([0]) == (0, False)
    assert replay.choose([]) == (None, True)


def test_the_error_names_the_exchange_and_the_worker() -> None:
    replay = Replay(1, [2, 0, 2])
    replay.advance()
    assert str(replay.error(2, "has died", 7)).startswith(
        "server 1: the log that is replayed has worker 2 in exchange 8, but it has died: replay the run again"
    )


@given(recorded=st.lists(st.integers(0, 3), max_size=20), seed=st.integers(0, 1000))
def test_any_order_of_arrival_gives_the_recorded_one(recorded: list[int], seed: int) -> None:
    replay, generator = Replay(0, recorded), random.Random(seed)
    left, waiting, served = list(recorded), list[int](), list[int]()
    while left or waiting:
        found, applied = replay.choose(waiting)
        if found is None:  # workers have one exchange at a time
            come = sorted(set(left) - set(waiting))
            worker = generator.choice(come)
            left.remove(worker)
            waiting.append(worker)
            continue
        assert applied
        waiting.remove(found)
        served.append(found)
        replay.advance()
    assert served == recorded
