"""`calls.fail` ends every wait of a group, wherever ranks sit and whichever thread waits; then it is abandoned."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.progress import poll_until

from unisono.call import call_of
from unisono.collectives.all_to_all import all_to_all, all_to_all_v
from unisono.collectives.allreduce import allreduce
from unisono.collectives.group import Group
from unisono.collectives.reduce import broadcast, reduce
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.errors import StallError, UnisonoError
from unisono.placement import Placement, one_rank_per_node, place, regular
from unisono.world import World

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "one node": lambda ranks: regular(1, 1, ranks),
    "two nodes by turns": lambda ranks: place([rank % 2 for rank in range(ranks)]),
    "apart": one_rank_per_node,
}

CALLS: dict[str, Callable[[Group], object]] = {
    "barrier": Group.barrier,
    "short": lambda group: allreduce(group, torch.ones(3)),
    "long": lambda group: allreduce(group, torch.ones(3_000_000)),
    "ring": lambda group: allreduce(group, torch.ones(3_000_000), "ring"),
    "library, short": lambda group: allreduce(group, torch.ones(3), "library"),
    "library, long": lambda group: allreduce(group, torch.ones(300_000), "library"),
    "broadcast": lambda group: broadcast(group, torch.ones(3_000_000), root=1),
    "all_to_all": lambda group: all_to_all(group, torch.ones(300_000 * group.size)),
    "all_to_all_v": lambda group: all_to_all_v(
        group, [torch.ones(300_000)] * group.size, list(torch.ones(group.size, 300_000))
    ),
    "reduce": lambda group: reduce(group, torch.ones(300_000), root=1),
    "reduce_scatter": lambda group: reduce_scatter(group, torch.ones(300_000), op="maximum"),
}


class LateError(UnisonoError):
    """Error that ends the tests' waits."""


WAIT_SECONDS = 0.05
"""Seconds that a rank waits."""


def group_of(world: World, where: str) -> Group:
    return Group(world.comm.Dup(), PLACEMENTS[where](world.size), world.table)


def end_soon(group: Group) -> None:
    """End the group's calls a while after this rank has begun one, however late that is on a busy machine."""

    def end() -> None:
        poll_until(lambda: group.calls.current, bool)
        time.sleep(WAIT_SECONDS)
        group.calls.fail(LateError, "late")

    threading.Thread(target=end, name="end soon").start()


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("what", CALLS)
def test_wait_for_a_missing_rank_is_interrupted(world: World, what: str, where: str) -> None:
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    group = group_of(world, where)
    if world.rank:
        end_soon(group)
        with pytest.raises(LateError):
            CALLS[what](group)
        assert group.broken
    group.free() if world.rank else group.abandon()
    del group
    gc.collect()
    world.barrier()
    assert world.allreduce(torch.ones(3)).tolist() == [world.size] * 3


def test_wait_in_another_thread_is_interrupted(world: World) -> None:
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    for where in PLACEMENTS:
        group = group_of(world, where)
        caught: list[str] = []

        def run(group: Group = group, caught: list[str] = caught) -> None:
            end_soon(group)
            try:
                group.barrier()
            except LateError as error:
                caught.append(str(error))

        if world.rank:
            thread = threading.Thread(target=run, name="another")
            thread.start()
            thread.join(30)
            assert caught == ["late"]
        world.barrier()
        group.abandon()


@pytest.mark.parametrize("where", PLACEMENTS)
def test_waits_that_could_be_ended_and_are_not(world: World, where: str) -> None:
    group = group_of(world, where)
    for what in CALLS.values():
        if world.size > 1:
            what(group)
    assert not group.broken
    group.free()


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("what", CALLS)
def test_rank_whose_wait_a_signal_has_ended_makes_no_further_call(world: World, what: str, where: str) -> None:
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    group = group_of(world, where)
    CALLS[what](group)

    def ring(*_: object) -> None:
        if group.calls.current:  # else the next alarm: a busy machine is still making the tensor
            signal.setitimer(signal.ITIMER_REAL, 0)  # none while the call ends
            raise TimeoutError("alarm")

    if world.rank:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS, WAIT_SECONDS)
        with pytest.raises(TimeoutError, match="alarm"):
            CALLS[what](group)
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(StallError, match=f"TimeoutError has ended a call of rank {world.rank}"):
            CALLS[what](group)
    group.free() if world.rank else group.abandon()
    world.barrier()


def test_calls_of_a_world_that_has_ended_enter_no_barrier(world: World) -> None:
    """They would come to the slot from which a late rank reads."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    for compiled in (True, False):
        group = group_of(world, "one node")
        memory = group.shared_memory(call_of("barrier()"))
        assert memory is not None
        signals = memory.signals
        signals.compiled &= compiled
        group.calls.fail(LateError, "late")
        before = signals.sequence
        with pytest.raises(LateError):
            group.barrier()
        assert signals.sequence == before
        group.abandon()
    world.barrier()


@pytest.mark.parametrize("own_cores", [True, False])
@pytest.mark.parametrize("main", [True, False])
def test_the_main_thread_gives_its_own_core_to_no_other_program(
    world: World, own_cores: bool, main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    group, row, how = group_of(world, "one node"), memoryview(bytearray(16)).cast("q"), list[str]()
    call = call_of("barrier()")
    memory = group.shared_memory(call)
    assert memory is not None
    signals = memory.signals

    def arrive(name: str) -> None:
        how.append(name)
        row[1] = 7

    monkeypatch.setattr(signals, "_keeps_core", own_cores)
    monkeypatch.setattr("unisono.transports.barriers.os.sched_yield", lambda: arrive("yields"))
    polling = SimpleNamespace(poll_word=lambda *_: arrive("polls"))
    monkeypatch.setattr("unisono.transports.barriers.compiled", polling)
    monkeypatch.setattr("unisono.transports.barriers.SLEEP_AFTER_SECONDS", 60)
    wait = partial(signals._wait_for_token, row, 1, 0, call)
    if main:
        wait()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(wait).result()
    assert how == ["polls" if own_cores and main and signals.compiled else "yields"]
    group.abandon()
