"""Across nodes, ranks that are in different calls are told so on every rank, with both calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from unisono.collectives import state_queries, watch
from unisono.collectives.states import State
from unisono.errors import MismatchError
from unisono.placement import place, regular
from unisono.world import World

CASES: dict[str, tuple[Callable[[World], object], Callable[[World], object], str, str]] = {
    "size, library, short": (
        lambda world: world.allreduce(torch.zeros(5), "library"),
        lambda world: world.allreduce(torch.zeros(7), "library"),
        "allreduce(5 x float32, library)",
        "allreduce(7 x float32, library)",
    ),
    "size, library, long": (
        lambda world: world.allreduce(torch.zeros(5000), "library"),
        lambda world: world.allreduce(torch.zeros(7000), "library"),
        "allreduce(5000 x float32, library)",
        "allreduce(7000 x float32, library)",
    ),
    "size, schedule": (
        lambda world: world.allreduce(torch.zeros(500_000), "ring"),
        lambda world: world.allreduce(torch.zeros(700_000), "ring"),
        "allreduce(500000 x float32, ring)",
        "allreduce(700000 x float32, ring)",
    ),
    "dtype": (
        lambda world: world.allreduce(torch.zeros(50), "ring"),
        lambda world: world.allreduce(torch.zeros(50, dtype=torch.int32), "ring"),
        "allreduce(50 x float32, ring)",
        "allreduce(50 x int32, ring)",
    ),
    "algorithm": (
        lambda world: world.allreduce(torch.zeros(50), "ring"),
        lambda world: world.allreduce(torch.zeros(50), "direct"),
        "allreduce(50 x float32, ring)",
        "allreduce(50 x float32, direct)",
    ),
    "wire": (
        lambda world: world.allreduce(torch.zeros(50), "ring", "bfloat16"),
        lambda world: world.allreduce(torch.zeros(50), "ring"),
        "allreduce(50 x float32, ring, wire bfloat16)",
        "allreduce(50 x float32, ring)",
    ),
    "levels": (
        lambda world: world.allreduce(torch.zeros(300_000), "hierarchical"),
        lambda world: world.allreduce(torch.zeros(300_001), "hierarchical"),
        "allreduce(300000 x float32, hierarchical)",
        "allreduce(300001 x float32, hierarchical)",
    ),
    "collective": (
        lambda world: world.reduce_scatter(torch.zeros(50), "ring"),
        lambda world: world.barrier(),
        "reduce_scatter(50 x float32, ring)",
        "barrier()",
    ),
    "root": (
        lambda world: world.broadcast(torch.zeros(5), 0),
        lambda world: world.broadcast(torch.zeros(5), 1),
        "broadcast(5 x float32, root 0, ",
        "broadcast(5 x float32, root 1, ",
    ),
}


@pytest.fixture
def broken(world: World, differing: None) -> Iterator[World]:
    """All ranks on two nodes by turns, in a world that is not used again."""
    yield World(world.comm.Dup(), place([rank % 2 for rank in range(world.size)]), world.table)
    world.barrier()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("odd", ["first", "last"])
def test_mismatch_names_both_calls_on_every_rank(broken: World, case: str, odd: str) -> None:
    if broken.size == 1:
        pytest.skip("one rank agrees with itself")
    call, other_call, message, other_message = CASES[case]
    differs = broken.rank == (0 if odd == "first" else broken.size - 1)
    broken.allreduce(torch.zeros(3), "ring")
    with pytest.raises(MismatchError) as caught:
        (other_call if differs else call)(broken)
        for _ in range(2):  # where ranks wait for nobody, as the roots of a broadcast do, the next calls tell them
            broken.barrier()
    assert message in str(caught.value)
    assert other_message in str(caught.value)
    with pytest.raises(MismatchError):  # such a world is not used again
        broken.allreduce(torch.zeros(3), "ring")


def test_what_one_rank_has_found_ends_the_waits_of_its_node(world: World, differing: None) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    node = World(world.comm.Dup(), regular(1, 1, world.size), world.table)
    node.barrier()
    if node.rank == 0:  # which leaves, and answers no more
        assert node.watch is not None
        node.watch.report_mismatch(node._group.calls, "rank 0 is in one call")
        node._group.abandon()
    with pytest.raises(MismatchError, match="rank 0 is in one call"):
        node.barrier()
    world.barrier()


def test_late_rank_is_no_mismatch(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "COMPARE_AFTER_SECONDS", 0.1)
    for algorithm in ("ring", "library", "hierarchical"):
        if spread.rank == 0:
            time.sleep(0.4)
        assert spread.allreduce(torch.ones(3), algorithm).tolist() == [spread.size] * 3


def test_lengths_whose_words_had_one_short_checksum_differ(group: World) -> None:
    if group.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError, match=r"73598 x .*80046 x |80046 x .*73598 x "):
        group.allreduce(torch.zeros(73_598 if group.rank == 0 else 80_046))
    assert group.allreduce(torch.ones(3)).tolist() == [group.size] * 3


@pytest.mark.parametrize("enough", [True, False])
def test_memory_of_states_is_taken_at_the_start(world: World, monkeypatch: pytest.MonkeyPatch, enough: bool) -> None:
    """Without enough, a rank keeps its state to itself."""
    taken = list[int]()
    monkeypatch.setattr(state_queries, "populate", lambda memory: taken.append(memory.nbytes) or enough)
    states = state_queries.NodeStates(world.comm, range(world.size))
    states.write(State("here"))
    assert states.written(world.rank)[1] == (State("here") if enough else None)
    assert taken[0] > state_queries.MAX_STATE_BYTES
    world.barrier()
    states.free()
