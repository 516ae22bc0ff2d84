"""Loading of a planned run: the worked example, and what is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.loading import (
    MAX_DECODING_THREADS,
    Loading,
    SampleFacts,
    held_bytes,
    least_step,
    loading_of,
    unknown_rates,
)
from unisono.plan.machines import DecodingFacts, DiskFacts, MachineFacts, NodeFacts

MACHINE = MachineFacts(
    "example", NodeFacts(cores=8, accelerators=1), disk=DiskFacts(200e6), decoding=DecodingFacts(40e6)
)
SAMPLES = SampleFacts(nbytes=1e5, pixels=1e5, from_disk=True)


def test_the_worked_example() -> None:
    loading = loading_of(MACHINE, SAMPLES, 64, 1)
    assert loading == pytest.approx((0.032, 0.020, 0.0))
    assert least_step(0.015, 0.0, loading) == pytest.approx(0.032)
    memory = loading_of(MACHINE, SAMPLES._replace(from_disk=False), 64, 1)
    assert least_step(0.015, 0.0, memory) == pytest.approx(0.020)
    cores = loading_of(replace(MACHINE, node=NodeFacts(cores=8)), SAMPLES, 64, 1)
    assert cores.in_turn == pytest.approx(0.020)
    assert least_step(0.012, 0.0, cores) == pytest.approx(0.032)


def test_ranks_have_their_threads_and_a_node_its_cores() -> None:
    wide = replace(MACHINE, node=NodeFacts(cores=40, accelerators=4))
    alone, four, eight = (loading_of(wide, SAMPLES, 64, ranks).decoding for ranks in (1, 4, 8))
    assert alone / four == pytest.approx(32 / MAX_DECODING_THREADS)
    assert alone / eight == pytest.approx(40 / MAX_DECODING_THREADS)
    assert loading_of(wide, SAMPLES._replace(threads=2), 64, 1).decoding == pytest.approx(4 * alone)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_step_waits_for_the_latest(computing: float, update: float, read: float, decode: float, turn: float) -> None:
    step = least_step(computing, update, Loading(read, decode, turn))
    assert step == max(computing + update + turn, read, decode)
    assert least_step(computing, update, Loading()) == computing + update


@pytest.mark.parametrize(
    ("machine", "samples", "patterns"),
    [
        (MACHINE, SAMPLES, []),
        (MACHINE, SampleFacts(), ["--set samples.pixels=N"]),
        (replace(MACHINE, decoding=DecodingFacts()), SAMPLES, ["decoding takes no time here: .* no decoding.pixels"]),
        (replace(MACHINE, node=NodeFacts()), SAMPLES, ["decoding takes no time here: .* no node.cores"]),
        (replace(MACHINE, disk=DiskFacts()), SAMPLES, ["reading takes no time here: .* no disk.bandwidth"]),
        (replace(MACHINE, disk=DiskFacts()), SAMPLES._replace(from_disk=False), []),
        (MACHINE, SAMPLES._replace(nbytes=0), ["--set samples.bytes=N"]),
    ],
)
def test_what_is_not_known_takes_no_time_and_is_said(
    machine: MachineFacts, samples: SampleFacts, patterns: list[str]
) -> None:
    lines = unknown_rates(machine, samples)
    assert len(lines) == len(patterns)
    for line, part in zip(lines, patterns, strict=True):
        assert re.search(part, line)
    loading = loading_of(machine, samples, 64, 1)
    assert (loading.decoding == 0) == (not samples.pixels or any("decoding" in line for line in lines))


def test_samples_in_memory_are_shared_by_ranks() -> None:
    facts = SampleFacts(nbytes=10)
    assert held_bytes(facts, 1000, nodes=4, ranks=8) == 1250
    assert held_bytes(facts._replace(copies=2), 1000, nodes=4, ranks=8) == 2500
    assert held_bytes(facts._replace(copies=0), 1000, nodes=4, ranks=8) == 5000  # one in each node
    assert held_bytes(facts._replace(from_disk=True), 1000, nodes=4, ranks=8) == 0
    assert held_bytes(facts, None, nodes=4, ranks=8) == 0


def test_a_streamed_part_in_memory_is_not_read_and_buffers_are_in_memory() -> None:
    streamed = SampleFacts(nbytes=10, from_disk=True, cached=0.25, buffers=800)
    all_read, rest = (loading_of(MACHINE, facts, 64, 1).reading for facts in (streamed._replace(cached=0.0), streamed))
    assert rest == pytest.approx(0.75 * all_read)
    assert held_bytes(streamed, 1000, nodes=4, ranks=8) == (800 + 4 * 2500) / 8
    assert held_bytes(streamed, 60, nodes=4, ranks=8) == (600 + 4 * 150) / 8  # no more than there are
    assert held_bytes(streamed, None, nodes=4, ranks=8) == 0
