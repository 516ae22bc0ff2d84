"""Server, with workers that are played by the test: whom it serves, what it logs, how a run ends."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.asynchronous.decisions import Budget, begin
from unisono.asynchronous.event_log import EventLog, read_events, read_order
from unisono.asynchronous.exchange import Centre
from unisono.asynchronous.messages import Kind, Order, Reply, Request, WorkerHeader, decode_reply
from unisono.asynchronous.server import Replay, Server
from unisono.errors import StallError
from unisono.rules import EASGD
from unisono.step.layout import Layout, even_layout

WORKERS = 3
ALPHA = 0.5


DEATH = "worker 1 has died"
"""Entry of a script."""


class DiedError(Exception):
    """The other end of a message has died."""


class ScriptedPort:
    """Port whose workers come as a script says, and send weights that are their number everywhere.

    An entry is a worker that exchanges, or a pair of worker and kind of header, or of worker and request. None lets the
    server look and find nobody. A dying worker raises at its `swap`. One that is `stuck` does not answer its first one.
    """

    def __init__(
        self,
        script: list[Any],
        dying: frozenset[int] = frozenset(),
        stop: int | None = None,
        stuck: int | None = None,
    ) -> None:
        self._stuck = stuck
        self._script, self._dying, self._idle, self._stop = deque(script), dying, 0, stop
        self.died = frozenset[int]()
        self.replies: list[tuple[int, Reply]] = []
        self.sent: list[tuple[int, torch.Tensor]] = []

    def poll(self) -> tuple[int, WorkerHeader] | None:
        if not self._script:
            self._idle += 1
            assert self._idle < 100, "the server waits for somebody who does not come"
            return None
        entry = self._script.popleft()
        if entry is None:
            return None
        if entry == DEATH:
            self.died = frozenset({1})
            return None
        worker, kind = entry if isinstance(entry, tuple) else (entry, Kind.EXCHANGE)
        if isinstance(kind, Request):
            return worker, WorkerHeader(step=1, samples=10, request=kind)
        return worker, WorkerHeader(kind, step=1, samples=10 if kind is Kind.EXCHANGE else 0)

    def link(self, worker: int) -> Any:
        port = self

        class Ends:
            def send(self, mine: torch.Tensor) -> None:
                if mine.dtype == torch.float64 and len(mine) > 10:
                    port.replies.append((worker, decode_reply(mine)))
                else:
                    port.sent.append((worker, mine.clone()))

            def swap(self, mine: torch.Tensor, came: torch.Tensor) -> None:
                if worker in port._dying:
                    raise DiedError
                if worker == port._stuck:
                    port._stuck = None
                    raise StallError
                port.sent.append((worker, mine.clone()))
                came.fill_(float(worker + 1))

            def receive(self, came: torch.Tensor) -> None:
                came.fill_(float(worker + 1))

        return Ends()

    @property
    def dead(self) -> frozenset[int]:
        return self.died

    def stopped(self, worker: int) -> bool:
        return worker == self._stop

    def lost(self, error: Exception) -> bool:
        return isinstance(error, DiedError)


def served(
    tmp_path: Path,
    script: list[Any],
    dying: frozenset[int] = frozenset(),
    stop: int | None = None,
    stuck: int | None = None,
    **options: Any,
) -> tuple[Server, ScriptedPort, list[str]]:
    layout: Layout = even_layout(WORKERS + 1, 2)
    port, lines = ScriptedPort(script, dying, stop, stuck), list[str]()
    centre = Centre({key: torch.zeros(3) for key in layout.keys})
    settings: dict[str, Any] = {"rule": EASGD(alpha=ALPHA), "budget": Budget(10**6, 1)}
    settings |= {"log": EventLog(tmp_path, 0), "report": lines.append, **options}
    server = Server(index=0, layout=layout, centre=centre, port=port, state=begin(WORKERS), **settings)
    server.run()
    return server, port, lines


END = [(0, Kind.ENDED), (1, Kind.ENDED), (2, Kind.ENDED), (0, Kind.FETCH), (0, Kind.DONE)]


def test_each_exchange_moves_the_centre(tmp_path: Path) -> None:
    """0 ─▶ (0 + 1) / 2 ─▶ (0.5 + 3) / 2 for workers that send 1 and 3."""
    server, port, _ = served(tmp_path, [0, None, 2, None, *END])
    assert all(torch.equal(flat, torch.full((3,), 1.75)) for flat in server.centre.flats.values())
    assert [float(centre[0]) for worker, centre in port.sent[:4]] == [0.0, 0.0, 0.5, 0.5]  # before it has moved
    assert read_order(tmp_path, 0) == [0, 2]
    assert [event["stale"] for event in read_events(tmp_path, 0)] == [0, 1]


def test_the_first_worker_fetches_and_the_others_leave(tmp_path: Path) -> None:
    _, port, _ = served(tmp_path, [1, None, *END])
    orders = [(worker, reply.orders) for worker, reply in port.replies]
    assert orders == [
        (1, Order.NONE),
        (0, Order.FETCH),
        (0, Order.CENTRE),
        (1, Order.LEAVE),
        (2, Order.LEAVE),
    ]


@pytest.mark.parametrize(
    ("to_server", "to_worker"),
    [(Request.STOP, Request.NONE), (Request.STOP, Request.SAVE), (Request.SAVE, Request.STOP)],
)
def test_a_signal_closes_the_run_without_a_final_centre(tmp_path: Path, to_server: Request, to_worker: Request) -> None:
    """Of two signals in the same exchange the stronger one counts."""
    asked = [to_server]
    script = [(1, to_worker), None, 0, None, 2, None, (0, Kind.ENDED), (1, Kind.ENDED), (2, Kind.ENDED), (0, Kind.DONE)]
    server, port, _ = served(tmp_path, script, request=lambda: asked.pop() if asked else Request.NONE)
    assert [reply.orders for _, reply in port.replies[:3]] == [
        Order.SAVE | Order.CENTRE | Order.STOP,
        Order.SAVE | Order.STOP,
        Order.SAVE | Order.STOP,
    ]
    assert port.replies[3] == (0, Reply(orders=Order.CLOSE, workers=server.state.workers))
    assert server.stopped


def test_a_replay_serves_in_the_recorded_order(tmp_path: Path) -> None:
    """Workers come 0, 1, 2, and 2 once more than was recorded: it is answered, and not applied."""
    _, port, _ = served(tmp_path, [0, 1, 2, None, None, None, 2, None, *END], replay=Replay((2, 0, 1)))
    assert read_order(tmp_path, 0) == [2, 0, 1]
    order = [worker for worker, _ in port.replies[:4]]
    assert order == [2, 0, 1, 2]
    assert port.replies[3][1].orders == Order.STOP
    straight = tmp_path / "straight"
    straight.mkdir()
    server, _, _ = served(straight, [2, None, 0, None, 1, None, *END])
    replayed, _, _ = served(tmp_path, [1, 0, 2, None, None, None, *END], replay=Replay((2, 0, 1)))
    for key, flat in server.centre.flats.items():
        assert torch.equal(flat, replayed.centre.flats[key])


LOG = (2, 0, 1, 1)
"""Recorded order, of which worker 1 has the exchanges 2 and 3."""


@pytest.mark.parametrize(
    ("script", "options", "why"),
    [
        ([2, None, 0, None, DEATH], {}, "exchange 2, but it has died"),
        ([1, 2, None, 0, None], {"dying": frozenset({1})}, "exchange 2, but it has died"),
        ([DEATH, 2, None, 0], {}, "exchange 2, but it has died"),  # at once, and not when its turn comes
        ([2, None, 0, None, 1, None, (1, Kind.ENDED)], {}, "exchange 3, but it has ended"),
        ([2, None, 0, None], {"timeout": 0.01}, "exchange 2, but it has not come for 0 s"),
        ([2, None, 0, None], {"stop": 1}, "exchange 2, but it is stopped"),
    ],
)
def test_a_replay_ends_where_a_recorded_worker_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: list[Any], options: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr("unisono.asynchronous.server.IDLE_SECONDS", 0.01)
    with pytest.raises(StallError, match=f"^server 0: the log that is replayed has worker 1 in {why}: replay the run"):
        served(tmp_path, script, replay=Replay(LOG), **options)


def test_a_replay_goes_on_without_a_worker_that_the_log_needs_no_more(tmp_path: Path) -> None:
    script = [2, None, 0, None, 1, None, DEATH, 0, None, (0, Kind.ENDED), (2, Kind.ENDED), (0, Kind.FETCH)]
    server, _, lines = served(tmp_path, [*script, (0, Kind.DONE)], replay=Replay((2, 0, 1, 0)))
    assert lines == ["worker 1 has died: the others go on without it"]
    assert server.gone == {1}


def test_nothing_of_a_dying_workers_exchange_is_applied(tmp_path: Path) -> None:
    script = [1, None, 0, None, (0, Kind.ENDED), (2, Kind.ENDED), (0, Kind.FETCH), (0, Kind.DONE)]
    server, port, lines = served(tmp_path, script, dying=frozenset({1}))
    assert lines == ["worker 1 has died: the others go on without it"]
    assert read_events(tmp_path, 0)[0] == {"died": 1, "number": 0}
    assert read_order(tmp_path, 0) == [0]
    assert all(torch.equal(flat, torch.full((3,), 0.5)) for flat in server.centre.flats.values())
    assert server.gone == {1}
    assert (0, Order.FETCH) in [(worker, reply.orders) for worker, reply in port.replies]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_stops_within_an_exchange_and_goes_on_is_ended(tmp_path: Path, servers: int) -> None:
    """It applies its half, and the centre nothing; it can end its exchange, and its next one, which is not applied."""
    script = [1, None, 0, None, 1, None, (1, Kind.ENDED), (0, Kind.ENDED), (2, Kind.ENDED), (0, Kind.FETCH)]
    rule = EASGD(alpha=ALPHA, servers=servers)
    server, port, lines = served(tmp_path, [*script, (0, Kind.DONE)], stuck=1, rule=rule)
    assert lines == [
        "worker 1 has stopped in an exchange: the others go on without it",
        "worker 1 goes on, but had stopped within an exchange, which the centre lacks: it ends",
    ]
    keys = rule.keys_of(0, server.layout)
    crossed = [worker for worker, _ in port.sent]
    assert crossed[: 3 * len(keys) - 1] == [1] * (len(keys) - 1) + [0] * len(keys) + [1] * len(keys)
    alone = Order.STOP | Order.LEAVE
    orders = [(worker, reply.orders) for worker, reply in port.replies]
    assert orders[:4] == [(1, Order.NONE), (0, Order.NONE), (1, alone), (1, alone)]
    assert [float(server.centre.flats[key][0]) for key in keys] == [0.5] * len(keys)
    events = read_events(tmp_path, 0)
    assert events[0] == {"died": 1, "number": 0}
    assert ["inexact" in event for event in events] == [False] + [servers > 1] * (servers > 1) + [False]
    assert read_order(tmp_path, 0) == [0]


def test_a_worker_that_was_away_between_exchanges_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.asynchronous.server.IDLE_SECONDS", 0.01)
    script = [(0, Request.STOP), None, (0, Kind.ENDED), (2, Kind.ENDED), *[None] * 20, 1, None, (1, Kind.ENDED)]
    server, _, lines = served(tmp_path, [*script, (0, Kind.FETCH), (0, Kind.DONE)], stop=1)
    assert lines[1:] == ["worker 1 is back"]
    assert read_order(tmp_path, 0) == [0, 1]
    assert server.gone == set()


def test_a_worker_that_is_back_while_another_stores_the_centre_stores_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.asynchronous.server.IDLE_SECONDS", 0.01)
    script = [1, None, (1, Kind.ENDED), (2, Kind.ENDED), *[None] * 20, 0, None, (0, Kind.ENDED)]
    end = [(1, Kind.FETCH), (1, Kind.DONE)]
    _, port, lines = served(tmp_path, [*script, *end], stop=0, budget=Budget(10, 1))
    assert lines[-1] == "worker 0 is back"
    ends = (Order.FETCH, Order.CENTRE, Order.LEAVE)
    assert [(worker, reply.orders) for worker, reply in port.replies if reply.orders in ends] == [
        (1, Order.FETCH),
        (1, Order.CENTRE),
        (0, Order.LEAVE),
        (2, Order.LEAVE),
    ]


def test_a_run_whose_workers_all_die_ends(tmp_path: Path) -> None:
    server, _, lines = served(tmp_path, [0, None, 1, None, 2, None], dying=frozenset({0, 1, 2}))
    assert len(lines) == 3
    assert server.living == []


def test_the_bound_of_staleness_holds_in_the_log(tmp_path: Path) -> None:
    script = [0, None, 0, None, 0, None, 1, None, None, 2, None, None, None, *END]
    served(tmp_path, script, rule=EASGD(alpha=ALPHA, staleness=2))
    assert read_order(tmp_path, 0)[:3] == [0, 1, 2]
    assert max(event["stale"] for event in read_events(tmp_path, 0)) <= 2


def test_an_error_of_the_servers_own_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        served(tmp_path, [0, None], clock=lambda: 1 // 0)


def test_the_recorded_worker_is_waited_for() -> None:
    replay = Replay([2, 0, 2])
    assert replay.choose([]) == (None, True)
    assert replay.choose([0]) == (None, True)
    assert replay.choose([0, 2]) == (2, True)


def test_a_worker_without_a_recorded_exchange_is_answered_but_not_applied() -> None:
    replay = Replay([2, 0])
    assert replay.choose([2, 1]) == (1, False)
    replay.popleft()
    assert replay.choose([0, 2]) == (2, False)
    replay.popleft()
    assert replay.choose([0]) == (0, False)
    assert replay.choose([]) == (None, True)


def test_the_error_names_the_exchange_and_the_worker() -> None:
    replay = Replay([0, 2])  # of 2, 0, 2
    assert str(replay.error(1, 2, "has died", 7)).startswith(
        "server 1: the log that is replayed has worker 2 in exchange 8, but it has died: replay the run again"
    )


@given(recorded=st.lists(st.integers(0, 3), max_size=20), seed=st.integers(0, 1000))
def test_any_order_of_arrival_gives_the_recorded_one(recorded: list[int], seed: int) -> None:
    replay, generator = Replay(recorded), random.Random(seed)
    left, waiting, served = list(recorded), list[int](), list[int]()
    while left or waiting:
        chosen, applied = replay.choose(waiting)
        if chosen is None:  # workers have one exchange at a time
            come = sorted(set(left) - set(waiting))
            worker = generator.choice(come)
            left.remove(worker)
            waiting.append(worker)
            continue
        assert applied
        waiting.remove(chosen)
        served.append(chosen)
        replay.popleft()
    assert served == recorded
