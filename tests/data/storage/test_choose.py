"""The choice of a storage is a function of bytes. In one process: each rank a thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.options import MEGABYTE, DataOptions
from unisono.data.storage import free_memory
from unisono.data.storage.choose import MEMORY_SHARE, choose_storage, resolve_storage
from unisono.data.storage.free_memory import FreeMemory
from unisono.data.storage.partitioned import PartitionedStorage, plan_partition
from unisono.data.storage.sample_store import block_of, nbytes_of

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]

GB = 10**9

REPLICATED = DataOptions(storage="replicated")

GROUPS = st.lists(st.integers(1, 40), max_size=3).map(lambda counts: sorted({1, *counts}))

NODES = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9000), st.integers(0, 9000)), min_size=1, max_size=4)


def nodes_of(seats: list[tuple[int, int, int]]) -> list[FreeMemory]:
    """Nodes of which not more can be shared than is free."""
    return [FreeMemory(ranks, max(free, shared), shared) for ranks, free, shared in seats]


@pytest.mark.parametrize(
    ("pack", "shared", "expected", "reason"),
    [
        (12, 30, REPLICATED, "replicated: a copy takes 12.0 GB of 30.0 GB free in node 0, of which 50% may be used"),
        (12, 8, DataOptions(groups=2), "partitioned in 2 groups: partitions take 12.0 GB of 30.0 GB free in node 0"),
        (20, 30, DataOptions(), "partitioned over all ranks: partitions take 10.0 GB of 30.0 GB free in node 0"),
        (
            90,
            30,
            DataOptions(storage="streamed", cache_megabytes=14 * GB / MEGABYTE),
            "streamed through a shuffle buffer of 1.1 GB, with 16% of the pack cached in each node: partitions would "
            "take 45.0 GB of 30.0 GB free",
        ),
    ],
)
def test_the_example_of_the_docs(pack: int, shared: int, expected: DataOptions, reason: str) -> None:
    """4 ranks on 2 nodes; the last does not fit at all."""
    nodes = [FreeMemory(2, 30 * GB, shared * GB)] * 2
    partition = {1: pack * GB // 4, 2: pack * GB // 2}
    chosen, explanation = choose_storage(pack * GB, partition, nodes, DataOptions(), window=GB // 2)
    assert chosen == expected
    assert explanation.startswith(reason)
    assert "\n" not in explanation


def test_the_fullest_node_decides_and_is_named() -> None:
    nodes = [FreeMemory(2, 90 * GB, 90 * GB), FreeMemory(2, 30 * GB, 10 * GB), FreeMemory(3, 40 * GB, 40 * GB)]
    chosen, reason = choose_storage(6 * GB, {1: 1 * GB, 3: 3 * GB}, nodes, DataOptions())
    assert chosen == DataOptions(groups=3)
    assert "partitions take 9.0 GB of 40.0 GB free in node 2" in reason
    assert reason.endswith(
        "a copy would take 6.0 GB of 10.0 GB free in node 1, of which 50% may be used (shared memory)"
    )


@pytest.mark.parametrize("unknown", [FreeMemory(1, inf, 5), FreeMemory(1, 5, inf), FreeMemory(1, inf, inf)])
def test_without_the_memory_of_a_node_the_pack_is_partitioned(unknown: FreeMemory) -> None:
    chosen, reason = choose_storage(1, {1: 1}, [FreeMemory(1, GB, GB), unknown], DataOptions())
    assert chosen == DataOptions()
    assert reason.endswith("the free memory of the nodes is not known")


@given(st.integers(1, 9000), NODES, GROUPS)
def test_the_first_that_fits_is_taken(pack: int, seats: list[tuple[int, int, int]], groups: list[int]) -> None:
    nodes, partition = nodes_of(seats), {each: pack * each // 2 for each in groups}

    def fits(each: int) -> bool:
        return all(node.ranks * partition[each] <= MEMORY_SHARE * node.free for node in nodes)

    chosen, _ = choose_storage(pack, partition, nodes, DataOptions())
    if all(pack <= MEMORY_SHARE * node.shared for node in nodes):
        assert chosen == REPLICATED
    elif fitting := [each for each in groups if fits(each)]:
        assert chosen == DataOptions(groups=max(fitting))
    else:
        assert (chosen.storage, chosen.groups) == ("streamed", 1)


@given(st.integers(1, 9000), NODES, GROUPS, st.integers(0, 9000))
def test_more_memory_never_means_fewer_copies(
    pack: int, seats: list[tuple[int, int, int]], groups: list[int], more: int
) -> None:
    nodes, partition = nodes_of(seats), {each: pack * each // 2 for each in groups}
    richer = [FreeMemory(node.ranks, node.free + more, node.shared + more) for node in nodes]
    before, after = (choose_storage(pack, partition, each, DataOptions())[0] for each in (nodes, richer))
    names = ("streamed", "partitioned", "replicated")
    earlier, later = ((names.index(each.storage), each.groups) for each in (before, after))
    assert later >= earlier


@pytest.mark.parametrize("ranks", [1, 2, 5, 9])
@pytest.mark.parametrize("pack", ["tiny", "audio_samples", "many"])
def test_a_store_takes_what_was_counted_and_no_more(
    anywhere: OnRanks, request: pytest.FixtureRequest, pack: str, ranks: int
) -> None:
    index = request.getfixturevalue(pack).index
    block = block_of(index.length)
    counted = plan_partition(index.length, ranks).nbytes

    def work(world: Any) -> None:
        storage = PartitionedStorage(index, world, DataOptions())
        taken = nbytes_of(storage._store.capacity, block)
        assert taken == counted if storage._store.shared else taken <= counted
        storage.close()

    anywhere(ranks, work)


def test_a_storage_that_is_named_is_not_chosen_and_costs_no_collective(tiny: Any) -> None:
    for options in (DataOptions(), DataOptions(storage="replicated"), DataOptions(groups=3)):
        assert resolve_storage(options, tiny.index, None) == (options, "")  # type: ignore[arg-type]


def test_all_ranks_choose_alike_though_they_find_other_memory(
    on_ranks: OnRanks, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([9000, 400, 9000, 9000, 9000, 9000])
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: next(free))
    choices = on_ranks(3, lambda world: resolve_storage(DataOptions(storage="auto"), tiny.index, world))
    assert len(set(choices)) == 1


@pytest.mark.parametrize(("shared", "expected"), [(244, "replicated"), (243, "partitioned")])
def test_half_of_the_memory_may_be_used(
    on_ranks: OnRanks, tiny: Any, shared: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack has 122 bytes."""
    assert MEMORY_SHARE == 0.5
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared=False, most=shared: most if shared else 1 << 40)
    ((chosen, _), *_) = on_ranks(3, lambda world: resolve_storage(DataOptions(storage="auto"), tiny.index, world))
    assert chosen.storage == expected


def test_what_no_partition_holds_is_streamed_through_the_buffer_that_is_given(
    on_ranks: OnRanks, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda shared: 100)
    for cache, cached in ((0, ""), (30, ", with 25% of the pack cached in each node"), (900, ", with 100% of .* node")):
        auto = DataOptions(storage="auto", buffer_megabytes=40 / MEGABYTE, cache_megabytes=cache / MEGABYTE)
        ((chosen, reason), *_) = on_ranks(3, lambda world, auto=auto: resolve_storage(auto, tiny.index, world))
        assert chosen == DataOptions(
            storage="streamed", buffer_megabytes=40 / MEGABYTE, cache_megabytes=cache / MEGABYTE
        )
        assert re.match(rf"streamed through a shuffle buffer of 0\.0 MB{cached}: partitions would take ", reason)


@given(st.integers(1, 9000), NODES, st.integers(0, 500))
def test_windows_and_cache_stay_within_the_memory_that_may_be_used(
    pack: int, seats: list[tuple[int, int, int]], window: int
) -> None:
    nodes = nodes_of(seats)
    chosen, _ = choose_storage(pack, {1: pack}, nodes, DataOptions(), window=window)
    assert 0 <= chosen.cache <= pack
    if chosen.cache:
        for node in nodes:
            assert chosen.cache <= MEMORY_SHARE * node.shared
            assert chosen.cache + node.ranks * window <= MEMORY_SHARE * node.free
