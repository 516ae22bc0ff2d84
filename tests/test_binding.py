"""Cores of each rank of a node."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.progress import run

from unisono import binding
from unisono.binding import (
    COMMUNICATION_CORE_FROM,
    CoreShare,
    bind,
    core_locations,
    oversubscribed,
    report,
    share_cores,
    shares_of,
)
from unisono.launch import available_cores


@given(st.frozensets(st.integers(0, 200), min_size=1), st.integers(1, 12))
def test_equal_masks_are_shared_fairly(mask: frozenset[int], ranks: int) -> None:
    shares = share_cores([mask] * ranks, {})
    assert len(shares) == ranks
    assert all(share.threads >= 1 for share in shares)
    assert len({share.bound for share in shares}) == 1
    assert shares[0].bound == (ranks <= len(mask))
    if shares[0].bound:
        given = [core for share in shares for core in share.cores]
        assert sorted(given) == sorted(mask)
        sizes = [len(share.cores) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert all(
            share.threads == len(share.cores) - (len(share.cores) >= COMMUNICATION_CORE_FROM) for share in shares
        )


def test_bindings_of_a_launcher_are_kept() -> None:
    masks = [frozenset({4, 5}), frozenset({0, 1})]
    assert share_cores(masks, {}) == (CoreShare((4, 5), 2, bound=True), CoreShare((0, 1), 2, bound=True))


def test_masks_that_overlap_are_left_alone() -> None:
    shares = share_cores([frozenset({0, 1}), frozenset({1, 2})], {})
    assert [share.bound for share in shares] == [False, False]
    assert [share.threads for share in shares] == [1, 1]
    assert report(shares) == "cores: 2 ranks take turns on 3 cores (0 to 2); the launcher has bound them so"


def test_ranks_of_a_socket_share_it() -> None:
    near, far = frozenset(range(16)), frozenset(range(16, 32))
    shares = share_cores([near, far, near, far], {})
    assert [share.cores[0] for share in shares] == [0, 16, 8, 24]
    assert all(share == CoreShare(share.cores, COMMUNICATION_CORE_FROM - 1, bound=True) for share in shares)
    oversubscribed = share_cores([frozenset({0}), frozenset({1}), frozenset({1})], {})
    assert (
        report(oversubscribed) == "cores: rank 0 on 0, 2 ranks take turns on 1 cores (1); fewer ranks would be faster"
    )


def test_cores_are_divided_among_those_that_use_them() -> None:
    masks = [frozenset(range(8)), frozenset(range(4, 12)), frozenset(range(20, 24))]
    assert [share.threads for share in share_cores(masks, {})] == [4, 4, 4]


SIBLINGS = {core: (core % 2, core % 8) for core in range(16)}
"""8 real cores of two hardware threads, core and core + 8, by turns in two sockets."""


def test_ranks_have_whole_cores_of_one_socket() -> None:
    shares = share_cores([frozenset(range(16))] * 2, SIBLINGS)
    assert [share.cores for share in shares] == [(0, 2, 4, 6, 8, 10, 12, 14), (1, 3, 5, 7, 9, 11, 13, 15)]
    assert [share.threads for share in shares] == [4, 4]
    every = share_cores([frozenset(range(16))] * 8, SIBLINGS)
    assert [share.cores for share in every[:5]] == [(0, 8), (2, 10), (4, 12), (6, 14), (1, 9)]
    assert {share.threads for share in every} == {1}


def test_more_ranks_than_real_cores_have_hardware_threads() -> None:
    shares = share_cores([frozenset(range(16))] * 16, SIBLINGS)
    assert [share.cores for share in shares[:4]] == [(0,), (8,), (2,), (10,)]
    assert all(share.bound and share.threads == 1 for share in shares)
    assert share_cores([frozenset({0, 8})], SIBLINGS) == (CoreShare((0, 8), 1, bound=True),)


@given(st.frozensets(st.integers(0, 15), min_size=1), st.integers(1, 20))
def test_no_core_is_shared_or_unused(mask: frozenset[int], ranks: int) -> None:
    shares = share_cores([mask] * ranks, SIBLINGS)
    if ranks <= len(mask):
        assert sorted(core for share in shares for core in share.cores) == sorted(mask)
    else:
        assert all(share.cores == tuple(sorted(mask)) and not share.bound for share in shares)
    assert all(1 <= share.threads <= len({core % 8 for core in share.cores}) for share in shares)
    real = len({core % 8 for core in mask})
    if ranks <= real:
        physical = [{core % 8 for core in share.cores} for share in shares]
        assert sum(map(len, physical)) == real
        assert [share.threads for share in shares] == [
            len(cores) - (len(cores) >= COMMUNICATION_CORE_FROM) for cores in physical
        ]


def test_hardware_threads_of_one_core_given_to_two_ranks() -> None:
    halves = share_cores([frozenset(range(8)), frozenset(range(8, 16))], SIBLINGS)
    assert [(share.threads, share.bound) for share in halves] == [(4, True), (4, True)]
    shares = share_cores([frozenset({0}), frozenset({8})], SIBLINGS)
    assert [share.threads for share in shares] == [1, 1]
    assert [share.threads for share in share_cores([frozenset(range(16))] * 12, SIBLINGS)] == [1] * 12


def test_a_single_rank_leaves_no_core_to_communication() -> None:
    assert share_cores([frozenset(range(8))], {}, alone=True)[0].threads == 8
    assert share_cores([frozenset(range(8))], {})[0].threads == 7


def test_core_locations_are_read_from_linux(tmp_path: Path) -> None:
    for core, (socket, siblings) in {0: (0, "0,4"), 4: (0, "0,4"), 1: (1, "1-2"), 3: (1, "")}.items():
        (tmp_path / f"cpu{core}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}/topology/physical_package_id").write_text(f"{socket}\n")
        (tmp_path / f"cpu{core}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    assert core_locations(range(5), tmp_path) == {0: (0, 0), 4: (0, 0), 1: (1, 1)}


def test_oversubscribed_means_fewer_cores_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not oversubscribed([frozenset({0}), frozenset({1})])
    assert not oversubscribed([frozenset({0, 1})] * 2)
    assert oversubscribed([frozenset({0, 1})] * 3)
    assert oversubscribed([frozenset({0})] * 2)
    monkeypatch.setattr(binding, "cores", lambda: 2)
    assert not oversubscribed([frozenset()] * 2), "the system does not say masks"
    assert oversubscribed([frozenset()] * 3)


def test_where_masks_are_not_known_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "cores", lambda: 9)
    assert shares_of([frozenset()] * 2, alone=False) == (CoreShare((), 4, bound=False),) * 2
    assert report(shares_of([frozenset()] * 2, alone=False)) == "cores: not known on this system"


@pytest.mark.parametrize(
    ("mask", "ranks", "said"),
    [
        ({0, 1}, 1, "cores: rank 0 on 0 and 1"),
        ({0, 1, 2, 8}, 1, "cores: rank 0 on 0 to 2, 8"),
        ({0, 1}, 4, "cores: 4 ranks take turns on 2 cores (0 and 1); fewer ranks would be faster"),
        (set(), 1, "cores: not known on this system"),
    ],
)
def test_report(mask: set[int], ranks: int, said: str) -> None:
    assert report(share_cores([frozenset(mask)] * ranks, {})) == said


@pytest.mark.skipif(not available_cores(), reason="this system does not say which cores a process may use")
def test_all_threads_are_bound() -> None:
    program = """
import os, threading
from unisono.binding import CoreShare, bind
core = min(os.sched_getaffinity(0))
seen, begun, go = [], threading.Event(), threading.Event()
def work():
    begun.set(); go.wait(); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=work); thread.start(); begun.wait()
bind(CoreShare((core,), 1, True)); go.set(); thread.join()
print(seen == [{core}] and os.sched_getaffinity(0) == {core})
"""
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_ranks_that_take_turns_are_not_bound() -> None:
    before = available_cores()
    bind(CoreShare(tuple(before)[:1], 1, bound=False))
    assert available_cores() == before


def test_threads_that_end_meanwhile_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []

    def ended(thread: int, cores: object) -> None:
        if thread == 2:
            raise ProcessLookupError(3, "No such process")
        bound.append(thread)

    for thread in (1, 2, 3):
        (tmp_path / f"{thread}").mkdir()
    monkeypatch.setattr(binding, "TASK_DIRECTORY", tmp_path)
    monkeypatch.setattr(binding.os, "sched_setaffinity", ended)
    bind(CoreShare((0,), 1, bound=True))
    assert sorted(bound) == [1, 3]
