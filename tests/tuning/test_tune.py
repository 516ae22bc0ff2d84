"""What tuning found, written as a table and read again; in one process, for any number of nodes."""

from __future__ import annotations

from pathlib import Path

from unisono.choosing.schedule_table import COLLECTIVES, read_table
from unisono.network import Network
from unisono.placement import regular
from unisono.tuning.decide import Row, timing_of
from unisono.tuning.tune import TuningResult, write

NETWORK = Network(5e-5, 4e-8, 1e-10, 1.6e-7)
ROWS = {name: [Row(None, "library", timing_of([0.1, 0.2, 0.3]))] for name in COLLECTIVES}


def test_supernodes_are_written_by_the_names_of_their_hosts(tmp_path: Path) -> None:
    placement = regular(supernodes=2, nodes=2, ranks=1)
    path = tmp_path / "table.toml"
    path.write_text(write(TuningResult(NETWORK, placement, ROWS), ["a", "b", "c", "d"]))
    table = read_table(path)
    assert table.supernodes == {"a": 0, "b": 0, "c": 1, "d": 1}
    assert "left out" not in path.read_text()


def test_hosts_with_equal_names_omit_supernodes_with_a_comment(tmp_path: Path) -> None:
    placement = regular(supernodes=2, nodes=2, ranks=1)
    path = tmp_path / "table.toml"
    path.write_text(write(TuningResult(NETWORK, placement, ROWS), ["vm"] * 4))
    assert "# The supernodes are omitted" in path.read_text()
    assert not read_table(path).supernodes
