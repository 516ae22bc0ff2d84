"""Loading: the worked example, the threads and cores that share it, and what is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.plan.machines import DecodingFacts, DiskFacts, MachineFacts, NodeFacts
from unisono.plan.planned_run import (
    MAX_DECODING_THREADS,
    Loading,
    PlannedRun,
    RankMemory,
    SampleFacts,
    held_bytes,
    least_step,
    loading_of,
    numbers_kept,
    rank_memory,
    unknown_rates,
)
from unisono.plan.trace import TracedLayer
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD, Sharded

MACHINE = MachineFacts(
    "example", NodeFacts(cores=8, accelerators=1), disk=DiskFacts(200e6), decoding=DecodingFacts(40e6)
)
SAMPLES = SampleFacts(nbytes=1e5, pixels=1e5, from_disk=True)


def test_the_worked_example() -> None:
    found = loading_of(MACHINE, SAMPLES, 64, 1)
    assert found == pytest.approx((0.032, 0.020, 0.0))
    assert least_step(0.015, 0.0, found) == pytest.approx(0.032)
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
    ("machine", "samples", "words"),
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
    machine: MachineFacts, samples: SampleFacts, words: list[str]
) -> None:
    lines = unknown_rates(machine, samples)
    assert len(lines) == len(words)
    for line, part in zip(lines, words, strict=True):
        assert re.search(part, line)
    found = loading_of(machine, samples, 64, 1)
    assert (found.decoding == 0) == (not samples.pixels or any("decoding" in line for line in lines))


def test_samples_in_memory_are_shared_by_ranks() -> None:
    facts = SampleFacts(nbytes=10)
    assert held_bytes(facts, 1000, nodes=4, ranks=8) == 1250
    assert held_bytes(facts._replace(copies=2), 1000, nodes=4, ranks=8) == 2500
    assert held_bytes(facts._replace(copies=0), 1000, nodes=4, ranks=8) == 5000  # one in each node
    assert held_bytes(facts._replace(from_disk=True), 1000, nodes=4, ranks=8) == 0
    assert held_bytes(facts, None, nodes=4, ranks=8) == 0


LAYERS = [
    TracedLayer("0", "Linear", parameter_bytes=100, gradient_bytes=100, activation_bytes=60),
    TracedLayer("1", "ReLU", activation_bytes=40),
]
RUN = PlannedRun(MachineFacts("example"), LAYERS, 2, BSP(), 32, 4, kept=2.0)


def test_the_worked_example_of_memory() -> None:
    found = rank_memory(RUN)
    assert found == RankMemory(100, 100, 200, 0, 400)
    assert found.total == 800
    assert rank_memory(replace(RUN, rule=Sharded())).total == 650


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    frozen = replace(RUN, layers=[*LAYERS, TracedLayer("2", "Linear", parameter_bytes=50)])
    assert rank_memory(frozen) == rank_memory(RUN)._replace(weights=150)


def test_an_anchor_is_as_large_as_the_weights() -> None:
    assert rank_memory(replace(RUN, rule=LocalSGD(Exchange(wire="int4")))).anchor == 100
    assert rank_memory(replace(RUN, rule=LocalSGD())).anchor == 0


def test_an_outer_optimizer_has_a_momentum_and_a_wire_of_changes_what_it_rounded_away() -> None:
    wire = Exchange(wire="int4")
    assert rank_memory(replace(RUN, rule=DiLoCo())).outer == 100
    assert rank_memory(replace(RUN, rule=DiLoCo(outer_momentum=0.0))).outer == 0
    assert rank_memory(replace(RUN, rule=DiLoCo(wire))).outer == 100 + 125
    assert rank_memory(replace(RUN, rule=LocalSGD(wire))).outer == 125
    assert rank_memory(replace(RUN, rule=LocalSGD(Exchange(wire="exact")))).outer == 0


def test_ranks_that_differ_gather_their_states_for_a_checkpoint() -> None:
    local, outer = (rank_memory(replace(RUN, rule=rule)) for rule in (LocalSGD(), DiLoCo()))
    assert (local.gathered, outer.gathered) == (4 * 300, 4 * 500)
    assert (local.total, outer.total) == (400 + 1200, 600 + 2000)
    assert rank_memory(replace(RUN, rule=LocalSGD(), minibatch=1280)).total == 400 + 16_000
    assert rank_memory(RUN).gathered == rank_memory(replace(RUN, rule=Sharded())).gathered == 0


def test_an_optimizer_keeps_what_its_step_leaves() -> None:
    kept = {name: numbers_kept(name, 0.9) for name in ("sgd", "adamw", "lars", "lamb")}
    assert kept == {"sgd": 1, "adamw": 2, "lars": 1, "lamb": 2}
    assert numbers_kept("sgd", 0.0) == 0
    with pytest.raises(UsageError, match="there is no optimizer 'adagrad'"):
        numbers_kept("adagrad", 0.9)
