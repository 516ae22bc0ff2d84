"""Decisions of servers: whom to serve, and the orders in replies."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from unisono.asynchronous.decisions import (
    Budget,
    RunState,
    afresh,
    answer,
    begin,
    missed,
    next_worker,
    resized,
    resumed_states,
)
from unisono.asynchronous.messages import Order, Reply, Request, WorkerHeader, WorkerProgress

BATCH = 10


def headers(state: RunState, worker: int, request: Request = Request.NONE) -> WorkerHeader:
    """Return the header of a worker that has made one more step."""
    return WorkerHeader(step=state.workers[worker].step + 1, samples=BATCH, loss=1.5 * BATCH, request=request)


def play(workers: Sequence[int], budget: Budget, requests: dict[int, Request] | None = None) -> list[Reply]:
    """Return the replies to workers that come in this order; `requests` by the number of the exchange."""
    state, replies = begin(max(workers) + 1), []
    for exchange, worker in enumerate(workers):
        header = headers(state, worker, (requests or {}).get(exchange, Request.NONE))
        state, reply = answer(state, worker, header, budget, elapsed=float(exchange))
        replies.append(reply)
    return replies


def test_the_first_to_come_is_served() -> None:
    assert next_worker([2, 0], [3, 1, -1], 4) == 2
    assert next_worker([], [3, 1, -1], 4) is None
    assert next_worker([], [3, 1], 4, staleness=1, alive=()) is None


def test_a_bound_lets_the_others_wait_for_the_slowest() -> None:
    """Worker 1 has missed 2, 3, 4: with a bound of 3, exchange 5 is its own."""
    assert next_worker([0, 2], [4, 1, 3], 5, staleness=3) is None
    assert next_worker([0, 2, 1], [4, 1, 3], 5, staleness=3) == 1
    assert next_worker([0, 2], [4, 1, 3], 5, staleness=3, alive=(0, 2)) == 0  # it has died
    assert next_worker([0, 2], [4, 1, 3], 5, staleness=4) == 0


def come_at_random(
    chance: random.Random, last: list[int], exchange: int, bound: int, steps: int, dead: Collection[int] = ()
) -> list[int]:
    """Serve workers that come at random, one of them more rarely; somebody can always go on.

    `last` is kept up to date. Return the exchanges that the served ones have missed, one after another, and then those
    that the living have missed at the end.
    """
    workers, waiting = [worker for worker in range(len(last)) if worker not in dead], list[int]()
    misses = list[int]()
    for _ in range(steps):
        absent = [worker for worker in workers if worker not in waiting]
        if absent and (not waiting or chance.random() < 0.5):
            waiting.append(chance.choice(absent if chance.random() < 0.3 else absent[:1]))
        worker = next_worker(waiting, last, exchange, bound, workers)
        if worker is None:
            assert len(waiting) < len(workers)  # with all of them there, one is served
            continue
        waiting.remove(worker)
        misses.append(missed(exchange, last[worker]))
        last[worker], exchange = exchange, exchange + 1
    return [*misses, *(missed(exchange, last[worker]) for worker in workers)]


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 1 << 20), st.integers(0, 60))
def test_no_worker_misses_more_than_the_bound(workers: int, slack: int, seed: int, steps: int) -> None:
    misses = come_at_random(random.Random(seed), [-1] * workers, 0, workers - 1 + slack, steps)
    assert max(misses) <= workers - 1 + slack
    assert (len(misses) > workers) == (steps > 0)  # the first to come is served


@given(st.data(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 1 << 20), st.integers(0, 60))
def test_the_bound_holds_where_workers_begin_afresh(
    data: st.DataObject, workers: int, slack: int, seed: int, steps: int
) -> None:
    """One has died long ago; it and others begin at the centre."""
    chance, bound, last = random.Random(seed), workers - 1 + slack, [-1] * workers
    assert max(come_at_random(chance, last, 0, bound, steps)) <= bound
    dead = data.draw(st.sets(st.integers(0, workers - 1), max_size=workers - 1))
    assert max(come_at_random(chance, last, max(last) + 1, bound, steps, dead)) <= bound
    others = data.draw(st.sets(st.integers(0, workers - 1)))
    next_exchange = max(last) + 1
    state = RunState(tuple(WorkerProgress(exchange + 1, exchange) for exchange in last), next_exchange)
    again = afresh(state, dead | others)
    assert [worker.step for worker in again.workers] == [worker.step for worker in state.workers]
    assert max(come_at_random(chance, [worker.exchange for worker in again.workers], next_exchange, bound, 60)) <= bound


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 1 << 20), st.integers(0, 60))
def test_the_bound_holds_with_other_numbers_of_workers(
    before: int, workers: int, servers: int, seed: int, steps: int
) -> None:
    chance, last = random.Random(seed), [-1] * before
    assert max(come_at_random(chance, last, 0, before, steps)) <= before
    next_exchange = max(last) + 1
    state = RunState(tuple(WorkerProgress(7 * exchange + 7, exchange) for exchange in last), next_exchange, samples=90)
    resumed = resized([state], workers, servers)
    assert [server.exchanges for server in resumed] == [next_exchange] + [0] * (servers - 1)
    assert {(server.steps, server.samples) for server in resumed} == {(state.steps, 90)}  # names of checkpoints go on
    for server in resumed:
        exchanges, bound = [worker.exchange for worker in server.workers], max(1, workers - 1)
        assert max(come_at_random(chance, exchanges, server.exchanges, bound, 60)) <= bound


def test_the_first_exchanges_after_a_change_are_hardly_stale() -> None:
    (state,) = resized([RunState((WorkerProgress(50, 99),), 100)], 2, 1)
    assert [missed(100, worker.exchange) for worker in state.workers] == [0, 0]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 4))
def test_each_epoch_ends_once_and_the_budget_stops_all(order: list[int], steps: int, epochs: int) -> None:
    budget = Budget(steps * BATCH, epochs)
    replies = play([*order, 0, 1, 2], budget)
    ended = [reply.ended for reply in replies if reply.ended]
    assert ended == list(range(1, len(ended) + 1))
    for index, reply in enumerate(replies):
        made = (index + 1) * BATCH
        assert reply.samples == made and reply.samples_before == made - BATCH
        assert bool(reply.orders & Order.STOP) == (made >= budget.samples * epochs)
        assert bool(reply.orders & Order.CENTRE) == bool(reply.ended)
    assert len(ended) == min(epochs - 1, len(replies) // steps)  # the last one ends with the final centre


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 39))
def test_each_worker_saves_once_for_a_request(order: list[int], at: int) -> None:
    order = [*order, 0, 1, 2, 3]
    at = min(at, len(order) - 1)
    replies = play(order, Budget(10**6, 1), {at: Request.SAVE})
    saved = [worker for worker, reply in zip(order, replies, strict=True) if reply.orders & Order.SAVE]
    assert sorted(saved) == sorted(set(order[at:]))
    assert [index for index, reply in enumerate(replies) if reply.orders & Order.CENTRE] == [at]
    assert not any(reply.orders & Order.STOP for reply in replies)
    assert len({reply.cut for reply in replies[at:]}) == 1


def test_a_signal_to_all_workers_is_one_checkpoint() -> None:
    replies = play([0, 1, 2, 0, 1, 2], Budget(10**6, 1), dict.fromkeys((1, 2, 3), Request.SAVE))
    assert [index for index, reply in enumerate(replies) if reply.orders & Order.CENTRE] == [1]
    assert [index for index, reply in enumerate(replies) if reply.orders & Order.SAVE] == [1, 2, 3]


def test_a_signal_asks_for_another_checkpoint_than_that_of_an_epoch_or_of_the_end() -> None:
    replies = play([0, 1, 0, 1], Budget(BATCH, 100), {1: Request.SAVE, 2: Request.STOP})
    assert [reply.cut for reply in replies if reply.orders & Order.CENTRE] == [1, 2, 3]
    replies = play([0, 0, 1, 0, 1], Budget(2 * BATCH, 2), {2: Request.SAVE})
    assert [reply.cut for reply in replies if reply.orders & Order.CENTRE] == [2, 3]


def test_a_request_to_stop_saves_and_stops_everyone() -> None:
    replies = play([0, 1, 0, 1], Budget(10**6, 1), {1: Request.STOP})
    orders = [reply.orders for reply in replies]
    assert orders[0] == Order.NONE
    assert orders[1] == Order.SAVE | Order.CENTRE | Order.STOP
    assert orders[2] == Order.SAVE | Order.STOP
    assert orders[3] == Order.STOP


def test_checkpoints_within_an_epoch() -> None:
    replies = play([0, 1] * 6, Budget(10**6, 1, checkpoint_samples=4 * BATCH))
    assert [index for index, reply in enumerate(replies) if reply.orders & Order.CENTRE] == [3, 7, 11]
    assert [reply.cut for reply in replies if reply.orders & Order.CENTRE] == [4, 8, 12]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.integers(3, 9), st.data())
def test_a_run_resumes_from_a_reply(order: list[int], steps: int, data: st.DataObject) -> None:
    """The state that a reply carries, and the same header again, give the same reply and the same next state."""
    order, budget = [0, 1, 2, *order], Budget(steps * BATCH, 1000)
    at = data.draw(st.integers(0, len(order) - 1))
    state = begin(3)
    for index, worker in enumerate(order):
        header = headers(state, worker)
        after, reply = answer(state, worker, header, budget, elapsed=float(index))
        if index == at:
            again, same = answer(resumed_states([reply])[0], worker, header, budget, elapsed=float(index))
            assert (again.workers, again.exchanges, again.samples) == (after.workers, after.exchanges, after.samples)
            assert (again.epoch, again.loss, again.loss_samples) == (after.epoch, after.loss, after.loss_samples)
            assert (same.ended, same.cut if same.ended else 0) == (reply.ended, reply.cut if reply.ended else 0)
        state = after


def test_times_are_the_mean_over_workers() -> None:
    state = begin(2)
    state, _ = answer(state, 0, WorkerHeader(step=1, seconds=(1.0, 2.0, 0.0, 0.0, 0.0)), Budget(100, 1), 1.0)
    _, reply = answer(state, 1, WorkerHeader(step=1, seconds=(3.0, 0.0, 0.0, 0.0, 0.0)), Budget(100, 1), 2.0)
    assert reply.seconds[:2] == (2.0, 1.0)
    assert reply.workers == (WorkerProgress(1, 0), WorkerProgress())
