"""Tuning on real ranks: the table that it writes is read again, and chooses what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.bench.collectives import measure
from unisono.choosing.schedule_table import COLLECTIVES, read_table
from unisono.tuning.tune import tune, write
from unisono.world import World


@pytest.mark.parametrize("where", ["world", "spread"])
def test_written_table_is_read_again(
    request: pytest.FixtureRequest, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.tuning import tune as tuning

    monkeypatch.setattr(tuning, "TRIAL_SECONDS_PER_SIZE", 0.05)
    these: World = request.getfixturevalue(where)
    if these.size == 1:
        pytest.skip("a single rank cannot communicate")
    said: list[str] = []
    tuned = tune(these, max_bytes=1 << 6, log=said.append)
    assert len(said) == 2 + 3 * len(COLLECTIVES)
    text = these.comm.bcast(write(tuned, [f"host{node}" for node in these.placement.node_of_rank]), 0)
    assert these.all_gather_object(tuned) == [tuned] * these.size
    path = tmp_path / "table.toml"
    path.write_text(text)
    table = read_table(path)
    for collective in COLLECTIVES:
        chosen = [table.choose(collective, these.placement, nbytes).algorithm for nbytes in (4, 1 << 30)]
        assert chosen == [tuned.rows[collective][0].algorithm, tuned.rows[collective][-1].algorithm]
    if these.nodes > 1:  # of one node there is nothing to say about what lies between nodes
        assert float(table.network.beta) == pytest.approx(float(tuned.network.beta))
    assert tuned.network.beta > 0


def test_the_bench_measures_every_contender(spread: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if spread.size == 1:
        pytest.skip("a single rank cannot communicate")
    monkeypatch.setattr("unisono.bench.collectives.TRIAL_SECONDS", 0.2)
    found = measure(spread, [4, 4096], ["ring", "auto bfloat16"])
    assert [row["bytes"] for row in found["sizes"]] == [4, 4096]
    for row in found["sizes"]:
        names = {"auto", "MPI library", "MPI library, tensor", "gloo", "ring", "auto bfloat16"}
        assert set(row["contenders"]) == names
        assert all(entry["low_us"] <= entry["median_us"] <= entry["high_us"] for entry in row["contenders"].values())
        assert row["bound_us"] > 0
