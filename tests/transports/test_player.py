"""Every schedule, played by threads, sums what a float64 sum does; and in the order of ranks where it can."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.placement import one_rank_per_node
from unisono.schedules import find, names
from unisono.schedules.pieces import bounds, cut, cut_program
from unisono.schedules.schedule import Action, Program, receive, send
from unisono.testing import play as in_process
from unisono.testing import play_all
from unisono.transports.arithmetic import NUMPY_DTYPES, arithmetic_of
from unisono.transports.player import Move, reduce_arrivals

RANKS = (1, 2, 3, 7, 8)


def contributions(length: int, ranks: int, dtype: np.dtype) -> list[np.ndarray]:
    """Small whole numbers, so that sums are exact in every dtype."""
    return [np.random.default_rng((length, rank)).integers(0, 9, length).astype(dtype) for rank in range(ranks)]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("length", [0, 1, 101])
def test_allreduce(name: str, ranks: int, length: int) -> None:
    for dtype in NUMPY_DTYPES if length == 101 else [torch.float32]:
        payloads = contributions(length, ranks, NUMPY_DTYPES[dtype])
        expected = np.sum(payloads, axis=0, dtype=np.float64).astype(NUMPY_DTYPES[dtype])
        programs = [find(name, one_rank_per_node(ranks)).allreduce(rank, ranks) for rank in range(ranks)]
        play_all(programs, lambda chunks: cut(length, chunks, max(1, length // 5)), payloads, arithmetic_of(dtype))
        for payload in payloads:
            np.testing.assert_array_equal(payload, expected)


@pytest.mark.parametrize("name", [name for name in names() if find(name, one_rank_per_node(2)).reduce_scatter])
@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_scatter_and_all_gather_by_threads(name: str, ranks: int) -> None:
    length, family = 1009, find(name, one_rank_per_node(ranks))
    payloads = contributions(length, ranks, np.dtype(np.float32))
    expected = np.sum(payloads, axis=0)
    for algorithm in (family.reduce_scatter, family.all_gather):
        programs = [algorithm(rank, ranks) for rank in range(ranks)]
        parts = lambda _: cut_program(programs[0], length, 100, by_chunk=True)  # noqa: B023, E731
        play_all(programs, parts, payloads, arithmetic_of(torch.float32))
        for rank, payload in enumerate(payloads):
            own = slice(*bounds(length, ranks, rank))
            np.testing.assert_array_equal(payload[own], expected[own])
    for payload in payloads:
        np.testing.assert_array_equal(payload, expected)


@given(
    name=st.sampled_from(names()),
    ranks=st.integers(1, 6),
    length=st.integers(0, 400),
    largest=st.integers(1, 60),
    in_flight=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_ranks_end_with_the_same_bits(
    name: str, ranks: int, length: int, largest: int, in_flight: int, seed: int
) -> None:
    payloads = list(np.random.default_rng(seed).normal(size=(ranks, length)))
    expected = np.sum(payloads, axis=0)
    programs = [find(name, one_rank_per_node(ranks)).allreduce(rank, ranks) for rank in range(ranks)]
    play_all(programs, lambda chunks: cut(length, chunks, largest), payloads, arithmetic_of(torch.float64), in_flight)
    for payload in payloads:
        assert payload.tobytes() == payloads[0].tobytes()
        np.testing.assert_allclose(payload, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["direct", "flat"])
def test_one_round_sums_in_the_order_of_ranks(name: str) -> None:
    payloads = list(np.random.default_rng(0).normal(size=(7, 1000)))
    serial = payloads[0].copy()
    for payload in payloads[1:]:
        serial += payload
    programs = [find(name, one_rank_per_node(7)).allreduce(rank, 7) for rank in range(7)]
    play_all(programs, lambda chunks: cut(1000, chunks, 30), payloads, arithmetic_of(torch.float64))
    assert all(payload.tobytes() == serial.tobytes() for payload in payloads)


def test_stuck_play_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "STUCK_SECONDS", 0.2)
    programs = [Program(1, (((receive(1, 0),),),)), Program(1, ((),))]
    with pytest.raises(Exception, match="rank 0 waits forever"):
        play_all(programs, lambda chunks: cut(3, chunks, 3), [np.zeros(3), np.zeros(3)], arithmetic_of(torch.float64))


def test_error_of_one_rank_is_raised_before_the_waits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "STUCK_SECONDS", 0.2)
    programs = [Program(1, (((receive(1, 0),),),)), Program(1, (((send(0, 0),),),))]
    payloads = [np.zeros(3), None]
    with pytest.raises(TypeError, match="NoneType"):
        play_all(programs, lambda chunks: cut(3, chunks, 3), payloads, arithmetic_of(torch.float64))


def test_sender_and_receiver_that_ask_at_once_get_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a queue may pass the turn to another thread, for example in a garbage collection."""

    class SlowQueue(SimpleQueue[None]):
        def __init__(self) -> None:
            barrier.wait(timeout=60)

    barrier, queues = Barrier(2), dict[tuple[int, int, int], SimpleQueue[None]]()
    transport = in_process.ThreadTransport(queues, 0, None, arithmetic_of(torch.float64))
    with ThreadPoolExecutor(2) as pool:  # it has a SimpleQueue of its own
        monkeypatch.setattr(in_process, "SimpleQueue", SlowQueue)
        results = [future.result() for future in [pool.submit(transport._find, 0, 1, 0) for _ in range(2)]]
    assert results[0] is results[1]


def test_arrivals_are_summed_in_rank_order() -> None:
    big, small = 2.0**53, 1.0  # big + small + small differs from small + small + big
    payload = np.array([small, 7.0])
    moves = [Move(Action.ADD, 3, slice(0, 1)), Move(Action.SEND, 0, slice(1, 2)), Move(Action.ADD, 0, slice(0, 1))]
    arrivals = [np.array([small]), None, np.array([big])]
    reduce_arrivals(1, payload, arithmetic_of(torch.float64), moves, arrivals)
    assert payload.tolist() == [(big + small) + small, 7.0]
    assert (big + small) + small != (small + small) + big
