"""Tuning on real ranks: the table that it writes is read again, and chooses what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unisono.bench.collectives import measure
from unisono.measure.facts import file_of
from unisono.measure.player import machine_at, tune
from unisono.network import Network
from unisono.network.choice import COLLECTIVES, ChoiceTables, read_table
from unisono.plan.machines import MachineFacts, NodeFacts
from unisono.world import World


@pytest.mark.parametrize("where", ["world", "spread"])
def test_written_table_is_read_again(
    request: pytest.FixtureRequest, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.measure.player.TRIAL_SECONDS_PER_SIZE", 0.05)
    these: World = request.getfixturevalue(where)
    if these.size == 1:
        pytest.skip("a single rank cannot communicate")
    said: list[str] = []
    tuned = tune(these, 1 << 6, said.append)
    assert len(said) == 2 + 3 * len(COLLECTIVES)
    assert these.all_gather_object(tuned) == [tuned] * these.size
    path = tmp_path / "machine.toml"
    path.write_text(file_of(tuned))
    assert machine_at(path) == tuned
    table = read_table(path)
    for collective in COLLECTIVES:
        chosen = [table.choose(collective, these.placement, nbytes).algorithm for nbytes in (4, 1 << 30)]
        written = getattr(tuned.choices, collective)
        assert chosen == [written[0].algorithm, written[-1].algorithm]
    if these.nodes > 1:  # of one node there is nothing to say about what lies between nodes
        assert table.network.measured
        assert tuned.link.bandwidth == pytest.approx(1 / float(table.network.beta), rel=1e-4)


def test_a_machine_that_was_measured_before_keeps_all_but_its_choices(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("a single rank cannot communicate")
    monkeypatch.setattr("unisono.measure.player.TRIAL_SECONDS_PER_SIZE", 0.0)
    before = MachineFacts("ours", NodeFacts(flops=1e9), choices=ChoiceTables(network=Network(1.0, 1.0)))
    after = tune(world, 4, lambda _: None, before)
    assert all(getattr(after.choices, collective) for collective in COLLECTIVES)
    assert replace(after, choices=ChoiceTables()) == replace(before, choices=ChoiceTables())
    path = tmp_path / "table.toml"
    assert machine_at(path) is None
    path.write_text("[network]\nalpha = 1.0\nbeta = 1.0\n")
    assert machine_at(path) is None


def test_the_bench_measures_every_contender(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if spread.size == 1:
        pytest.skip("a single rank cannot communicate")
    monkeypatch.setattr("unisono.bench.collectives.TRIAL_SECONDS", 0.2)
    measured = measure(spread, [4, 4096], ["ring", "auto bfloat16"])
    assert [row["bytes"] for row in measured["sizes"]] == [4, 4096]
    for row in measured["sizes"]:
        names = {"auto", "MPI library", "MPI library, tensor", "gloo", "ring", "auto bfloat16"}
        assert set(row["contenders"]) == names
        assert all(entry["low_us"] <= entry["median_us"] <= entry["high_us"] for entry in row["contenders"].values())
        assert row["bound_us"] > 0
